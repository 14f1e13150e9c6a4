"""kt-kernel's routed experts as a program to ask: its wheel unpacked, neither torch nor CUDA.

`python benchmarks/harness/kt_kernel.py FOLDER FORMAT E K D F T THREADS` makes random experts, says
the relative error of a token against numpy's fp64, and then, for each line it is given, the
milliseconds of as many calls as the line says, after one that is not timed and wakes its threads.
Each call has other routing than the one before.
FOLDER: `pip download --no-deps kt-kernel==0.7.2`, unpacked. Its int4 products round activations
to int8. The extension that the processor's best instruction set needs is chosen.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.bench.peers.kt_kernel import find_extension

# The class of each format in extensions for AVX-512, and in that for AVX2.
CLASSES = {
    "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
    "fp8": ("AMXFP8_MOE", "AVX2FP8_MOE"),
    "mxfp4": ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"),
    "int4": ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"),
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GROUP = 32
BLOCK = 128


def main() -> None:
    """The process itself."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    num_experts, top_k, dim_model, dim_hidden, num_tokens, threads = map(int, sys.argv[3:9])
    extension = find_extension(str(folder))
    experts = Experts(kind, num_experts, dim_model, dim_hidden)
    pool = extension.CPUInfer(threads)
    product = experts.loaded_into(extension, pool, top_k, num_tokens)
    generator = np.random.default_rng(1)
    x_TD = _bf16(generator.standard_normal((num_tokens, dim_model)))
    weights_TK = generator.random((num_tokens, top_k)).astype(np.float32)
    out_TD = np.zeros((num_tokens, dim_model), np.uint16)
    count = np.array([num_tokens], np.int32)

    def call() -> tuple[float, Any]:
        choices = [generator.permutation(num_experts)[:top_k] for _ in range(num_tokens)]
        ids_TK = np.stack(choices).astype(np.int64)
        arrays = (ids_TK, weights_TK, x_TD, out_TD)
        places = [array.ctypes.data for array in arrays]
        start = time.perf_counter()
        pool.submit(product.forward_task(count.ctypes.data, top_k, *places, False))
        pool.sync()
        return 1e3 * (time.perf_counter() - start), ids_TK

    _, ids_TK = call()
    expected_D = experts.reference(_f32(x_TD[0]), ids_TK[0], weights_TK[0])
    error = np.linalg.norm(_f32(out_TD[0]) - expected_D) / np.linalg.norm(expected_D)
    print(f"= {error}", flush=True)
    for line in sys.stdin:
        call()
        times = [call()[0] for _ in range(int(line))]
        print("=", *times, flush=True)


class Experts:
    """Random experts as a file has them, by format: codes and scales of gate, up and down."""

    def __init__(self, kind: str, num_experts: int, dim_model: int, dim_hidden: int) -> None:
        self.kind = kind
        self.sizes = num_experts, dim_model, dim_hidden
        self.generator = np.random.default_rng(0)
        shapes = ((dim_hidden, dim_model), (dim_hidden, dim_model), (dim_model, dim_hidden))
        self.parts = [[self._matrix(*shape) for _ in range(num_experts)] for shape in shapes]

    def loaded_into(self, extension: Any, pool: Any, top_k: int, num_tokens: int) -> Any:
        """Its object that computes them; it keeps a copy in a layout of its own."""
        num_experts, dim_model, dim_hidden = self.sizes
        config = extension.moe.MOEConfig(num_experts, top_k, dim_model, dim_hidden, 0)
        config.max_len, config.pool = max(64, num_tokens), pool.backend_
        names = ("gate", "up", "down")
        if self.kind == "bf16":
            self.whole = [np.stack([codes for codes, _ in part]) for part in self.parts]
            for name, array in zip(names, self.whole, strict=True):
                setattr(config, f"{name}_proj", array.ctypes.data)
                setattr(config, f"{name}_scale", 0)
        else:
            for name, part in zip(names, self.parts, strict=True):
                setattr(config, f"{name}_projs", [[codes.ctypes.data for codes, _ in part]])
                setattr(config, f"{name}_scales", [[scales.ctypes.data for _, scales in part]])
            is_fp8 = self.kind == "fp8"
            config.quant_config.bits = 8 if is_fp8 else 4
            config.quant_config.group_size = BLOCK if is_fp8 else GROUP
            config.quant_config.zero_point = False
        known = vars(extension.moe)
        product = next(known[name] for name in CLASSES[self.kind] if name in known)(config)
        order = np.arange(num_experts, dtype=np.int64)
        pool.submit(product.load_weights_task(order.ctypes.data))
        pool.sync()
        return product

    def reference(self, x_D: Any, ids_K: Any, weights_K: Any) -> Any:
        """The weighted sum of the experts for one token, in fp64."""
        out_D = np.zeros(len(x_D))
        for expert, weight in zip(ids_K, weights_K, strict=True):
            gate, up, down = (self._values(*part[expert]) for part in self.parts)
            hidden = gate @ x_D
            out_D += weight * (down @ (hidden / (1 + np.exp(-hidden)) * (up @ x_D)))
        return out_D

    def _matrix(self, num_rows: int, num_cols: int) -> tuple[Any, Any]:
        random = self.generator
        if self.kind == "bf16":
            return _bf16(random.standard_normal((num_rows, num_cols)) / np.sqrt(num_cols)), None
        if self.kind == "fp8":
            codes = random.integers(0, 0x40, (num_rows, num_cols), np.uint8)
            codes |= random.integers(0, 2, codes.shape, np.uint8) << 7
            blocks = -(-num_rows // BLOCK), -(-num_cols // BLOCK)
            return codes, np.full(blocks, 0.5 / np.sqrt(num_cols), np.float32)
        codes = random.integers(0, 256, (num_rows, num_cols // 2), np.uint8)
        scales = np.full((num_rows, num_cols // GROUP), 2.0 ** -round(np.log2(num_cols) / 2 + 1.5))
        return codes, _bf16(scales)

    def _values(self, codes: Any, scales: Any) -> Any:
        if self.kind == "bf16":
            return _f32(codes).astype(np.float64)
        if self.kind == "fp8":
            exponents, mantissas = codes >> 3 & 15, codes & 7
            normal = np.ldexp(1 + mantissas / 8, exponents.astype(int) - 7)
            sizes = np.where(exponents == 0, mantissas * 2.0**-9, normal)
            spread = np.kron(scales, np.ones((BLOCK, BLOCK)))[: codes.shape[0], : codes.shape[1]]
            return np.where(codes & 128, -sizes, sizes) * spread
        nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
        if self.kind == "int4":
            values = nibbles.astype(np.float64) - 8
        else:
            values = np.where(nibbles & 8, -FP4[nibbles & 7], FP4[nibbles & 7])
        return values * np.repeat(_f32(scales), GROUP, axis=1)


def _bf16(values: Any) -> Any:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _f32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    main()
