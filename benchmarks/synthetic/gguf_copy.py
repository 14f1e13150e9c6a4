"""Writes the weights of a synthetic checkpoint as a GGUF file, one tensor in memory at a time.

Tensor names, types and the stacking of experts are those that llama.cpp's own converter gives such
a model: matrices in bf16, experts of gpt-oss in MXFP4 as they are, norms, biases, sinks and routers
in fp32, the experts of a layer in one tensor. For FP8 in blocks llama.cpp has no type: each matrix
of such a model becomes Q8_0, rounded once more. The vocabulary is the checkpoint's tokenizer's.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from moe_runtime.benchmarks.synthetic.family_plans import MAX_POSITIONS, config_of
from moe_runtime.benchmarks.synthetic.gguf_shape import add_vocabulary, require_gguf
from moe_runtime.benchmarks.synthetic.model_shapes import (
    FP8_BLOCK,
    MXFP4_GROUP,
    GptOssShape,
    GroupedShape,
    MixtralShape,
    ModelShape,
    Qwen3Fp8Shape,
    Qwen3Shape,
)
from moe_runtime.benchmarks.synthetic.tensor_places import TensorPlace, locate_tensors
from moe_runtime.benchmarks.synthetic.texts import TOKENIZER_NAME
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import write_atomically

TABLES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ATTENTION_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
OLMOE_PARTS = ATTENTION_PARTS | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
GPT_OSS_PARTS = ATTENTION_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
FLOAT32_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "attn_sinks.weight", ".bias")
BLOCK_BYTES = 1 + MXFP4_GROUP // 2
"""Of 32 values in MXFP4: the exponent, then the codes of elements j and j + 16 in byte j."""
Q8_GROUP, Q8_BYTES = 32, 34
"""Values of a block in Q8_0, and its bytes: a scale in fp16 and a signed byte each."""


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor of the GGUF file: its kind and the shape of its values, and what reads them."""

    name: str
    kind: Literal["F32", "BF16", "MXFP4", "Q8_0"]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        num_values = math.prod(self.shape)
        if self.kind == "MXFP4":
            return num_values // MXFP4_GROUP * BLOCK_BYTES
        if self.kind == "Q8_0":
            return num_values // Q8_GROUP * Q8_BYTES
        return num_values * (4 if self.kind == "F32" else 2)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In fp32 numbers, or in bytes."""
        if self.kind == "F32":
            return self.shape
        num_rows = math.prod(self.shape[:-1])
        return (*self.shape[:-1], self.num_bytes // num_rows)


def write_gguf(
    shape: ModelShape,
    checkpoint: Path,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the checkpoint of `shape` in folder `checkpoint` to the GGUF file `target`.

    The file gets its name when it is complete, and several processes may write it at a time. Needs
    the `gguf` package (extra `peers`).

    Args:
        progress: called with bytes written and bytes in all after each tensor.

    Raises:
        UnsupportedModelError: the package is missing, or the family is not known here.
        OSError: it cannot be written.
    """
    require_copy(shape)
    gguf = importlib.import_module("gguf")
    tensors = list(_plan(shape, locate_tensors(checkpoint)))
    if isinstance(shape, Qwen3Fp8Shape):
        tensors = [_as_q8_0(tensor, gguf) for tensor in tensors]
    total = sum(tensor.num_bytes for tensor in tensors)
    with write_atomically(target) as file:
        # The package opens its file by a name.
        writer = gguf.GGUFWriter(f"/proc/self/fd/{file.fileno()}", _architecture(shape))
        _add_metadata(writer, gguf, shape)
        add_vocabulary(writer, gguf, checkpoint / TOKENIZER_NAME)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name,
                tensor.stored_shape,
                np.dtype(np.float32 if tensor.kind == "F32" else np.uint8),
                tensor.num_bytes,
                raw_dtype=gguf.GGMLQuantizationType[tensor.kind],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor in tensors:
            writer.write_tensor_data(tensor.read())
            done += tensor.num_bytes
            if progress is not None:
                progress(done, total)
        writer.close()


def require_copy(shape: Any) -> None:
    """Refuses what `write_gguf` would refuse.

    Raises:
        UnsupportedModelError: the `gguf` package is missing, or the family is not known here.
    """
    if not isinstance(shape, ModelShape) or isinstance(shape, MixtralShape):
        raise UnsupportedModelError(f"no GGUF file is made of {shape.name}: give llama_cpp=FILE")
    require_gguf()


def _architecture(shape: ModelShape) -> str:
    if isinstance(shape, GptOssShape):
        return "gpt-oss"
    return "qwen3moe" if isinstance(shape, Qwen3Shape) else "olmoe"


def _plan(shape: ModelShape, places: dict[str, TensorPlace]) -> Iterator[CopiedTensor]:
    for key, name in TABLES.items():
        yield _plain(f"{name}.weight", places[f"{key}.weight"])
    is_gpt_oss = isinstance(shape, GptOssShape)
    for layer in range(shape.num_layers):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        for key, name in (GPT_OSS_PARTS if is_gpt_oss else OLMOE_PARTS).items():
            for end in ("weight", "bias"):
                if f"{prefix}.{key}.{end}" in places:
                    yield _matrices(f"{block}.{name}.{end}", [f"{prefix}.{key}.{end}"], places)
        if is_gpt_oss:
            yield _plain(f"{block}.attn_sinks.weight", places[f"{prefix}.self_attn.sinks"])
            yield from _gpt_oss_experts(block, f"{prefix}.mlp.experts", places)
            continue
        for key, name in EXPERT_PARTS.items():
            stems = (f"{prefix}.mlp.experts.{expert}" for expert in range(shape.num_experts))
            names = [f"{stem}.{key}.weight" for stem in stems]
            yield _matrices(f"{block}.{name}.weight", names, places)


def _plain(name: str, *places: TensorPlace, rows: slice = slice(None)) -> CopiedTensor:
    """In bf16, or in fp32 where llama.cpp wants that; several stand for a stack of experts.

    `rows` are taken of the last dimension.
    """
    is_float32 = name.endswith(FLOAT32_PARTS)
    one = (*places[0].shape[:-1], len(range(*rows.indices(places[0].shape[-1]))))

    def read() -> np.ndarray:
        bits = np.stack([place.read_bfloat16_bits()[..., rows] for place in places])
        bits = np.ascontiguousarray(bits if len(places) > 1 else bits[0])
        if not is_float32:
            return bits.view(np.uint8)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

    stacked = one if len(places) == 1 else (len(places), *one)
    return CopiedTensor(name, "F32" if is_float32 else "BF16", stacked, read)


def _matrices(name: str, keys: list[str], places: dict[str, TensorPlace]) -> CopiedTensor:
    """Tensors as they are, or in fp32 where a checkpoint has FP8; several are stacked."""
    matrices = [places[key] for key in keys]
    if f"{keys[0]}_scale_inv" not in places:
        return _plain(name, *matrices)
    scales = [places[f"{key}_scale_inv"] for key in keys]

    def read() -> np.ndarray:
        found = [*map(_from_fp8, matrices, scales)]
        return np.stack(found) if len(found) > 1 else found[0]

    one = matrices[0].shape
    return CopiedTensor(name, "F32", one if len(keys) == 1 else (len(keys), *one), read)


def _from_fp8(matrix: TensorPlace, scales: TensorPlace) -> np.ndarray:
    """Codes in E4M3 times the scale of their block of 128 x 128."""
    rows, cols = matrix.shape
    bits = scales.read_bfloat16_bits().astype(np.uint32) << np.uint32(16)
    blocks = bits.view(np.float32).repeat(FP8_BLOCK, 0).repeat(FP8_BLOCK, 1)
    return _e4m3()[matrix.read_bytes()] * blocks[:rows, :cols]


def _e4m3() -> np.ndarray:
    """The value of each code: sign, four bits of exponent, three of mantissa; 127 and 255: NaN."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    normal, subnormal = (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9
    values = np.where(exponents > 0, normal, subnormal) * np.where(codes & 128, -1, 1)
    return np.where(codes & 127 == 127, np.nan, values).astype(np.float32)


def _as_q8_0(tensor: CopiedTensor, gguf: ModuleType) -> CopiedTensor:
    """A matrix in Q8_0; what llama.cpp wants in fp32 stays."""
    if tensor.name.endswith(FLOAT32_PARTS):
        return tensor

    def read() -> np.ndarray:
        values = tensor.read()
        if tensor.kind == "BF16":
            values = (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)

    return CopiedTensor(tensor.name, "Q8_0", tensor.shape, read)


def _gpt_oss_experts(
    block: str, stem: str, places: dict[str, TensorPlace]
) -> Iterator[CopiedTensor]:
    """Rows of gate and up take turns in the checkpoint and lie apart in the GGUF file."""
    for key, parts in (
        ("gate_up_proj", {"ffn_gate_exps": slice(0, None, 2), "ffn_up_exps": slice(1, None, 2)}),
        ("down_proj", {"ffn_down_exps": slice(None)}),
    ):
        for name, rows in parts.items():
            codes, scales = (places[f"{stem}.{key}_{end}"] for end in ("blocks", "scales"))
            yield _mxfp4(f"{block}.{name}.weight", codes, scales, rows)
            yield _plain(f"{block}.{name}.bias", places[f"{stem}.{key}_bias"], rows=rows)


def _mxfp4(name: str, codes: TensorPlace, scales: TensorPlace, rows: slice) -> CopiedTensor:
    """Codes `[E, N, G, 16]` with neighbours in a byte, as ggml's blocks `[E, N, G * 17]`."""
    num_experts, num_rows, num_groups, _ = codes.shape
    num_rows, half = len(range(*rows.indices(num_rows))), MXFP4_GROUP // 4

    def read() -> np.ndarray:
        blocks = np.empty((num_experts, num_rows, num_groups, BLOCK_BYTES), np.uint8)
        each = zip(codes.read_bytes(), scales.read_bytes(), blocks, strict=True)
        for pairs, exponents, block in each:  # what is written out stays in the cache
            block[..., 0] = exponents[rows]
            low, high = pairs[rows, :, :half], pairs[rows, :, half:]
            block[..., 1::2] = low & 15 | high << 4
            block[..., 2::2] = low >> 4 | high & 0xF0
        return blocks.reshape(num_experts, num_rows, num_groups * BLOCK_BYTES)

    return CopiedTensor(name, "MXFP4", (num_experts, num_rows, num_groups * MXFP4_GROUP), read)


def _add_metadata(writer: Any, gguf: ModuleType, shape: ModelShape) -> None:
    kinds, settings = gguf.LlamaFileType, config_of(shape)
    is_gpt_oss = isinstance(shape, GptOssShape)
    writer.add_name(shape.name)
    plain = kinds.MOSTLY_Q8_0 if isinstance(shape, Qwen3Fp8Shape) else kinds.MOSTLY_BF16
    writer.add_file_type(kinds.MOSTLY_MXFP4_MOE if is_gpt_oss else plain)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.model_width)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_rope_freq_base(float(str(settings["rope_theta"])))
    writer.add_head_count_kv(int(str(settings["num_key_value_heads"])))
    if isinstance(shape, GroupedShape):
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_expert_feed_forward_length(shape.expert_width)
    if is_gpt_oss:
        writer.add_sliding_window(settings["sliding_window"])
