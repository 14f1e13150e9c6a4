"""Write GGUF files: random blocks in a model's layout, or the weights of a synthetic checkpoint.

The first kind has Qwen3.5 MoE's architecture in the types of a Q4_K_M file. The second kind has
matrices in bf16, experts of gpt-oss in MXFP4 as they are, FP8 in blocks as Q8_0, and the rest in
fp32. Names, types and metadata are those of llama.cpp's `convert_hf_to_gguf.py`; `families.json`
has them.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_runtime.benchmarks.synthetic.model_shapes import (
    FAMILIES,
    FP8_BLOCK,
    MXFP4_GROUP,
    ModelShape,
    TensorPlace,
    facts_of,
    filled,
    locate_tensors,
)
from moe_runtime.benchmarks.synthetic.texts import END_OF_TEXT, TOKENIZER_NAME, write_tokenizer
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import write_atomically

FILE_NAME = "model.gguf"
_RANDOM = "qwen35moe"
_OUTPUT_SCALE = 0.01
_BLOCKS = {
    **{"F32": (1, 4), "BF16": (1, 2), "MXFP4": (MXFP4_GROUP, 1 + MXFP4_GROUP // 2)},
    **{"Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)},
}
"""Values per block, and its bytes."""
_SCALES = {"Q4_K": (0, 350.0), "Q6_K": (208, 1400.0), "Q8_0": (0, 74.0)}
"""Offsets of a block's fp16 scale and the spread of random codes without it; Q4_K has a second
scale right after it."""


class WrittenTensor(NamedTuple):
    """A tensor of a file: type, shape, and a function that returns its content."""

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        values, num_bytes = _BLOCKS[self.kind]
        return self.shape[-1] // values * num_bytes


def _write_file(
    target: Path,
    architecture: str,
    tokenizer: Path,
    tensors: Iterable[WrittenTensor],
    metadata: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write one tensor at a time; rename the file when complete."""
    gguf = importlib.import_module("gguf")
    tensors = list(tensors)
    with write_atomically(target) as file:
        # The package opens files by name.
        writer = gguf.GGUFWriter(f"/proc/self/fd/{file.fileno()}", architecture)
        if "file_type" in metadata:
            metadata = {**metadata, "file_type": gguf.LlamaFileType[metadata["file_type"]]}
        for name, value in metadata.items():
            getattr(writer, f"add_{name}")(value)
        if architecture == _RANDOM:
            interval = FAMILIES[_RANDOM]["interval"]
            writer.add_uint32(f"{_RANDOM}.full_attention_interval", interval)
        _add_vocabulary(writer, gguf, tokenizer)
        for one in tensors:
            is_plain = one.kind == "F32"
            writer.add_tensor_info(
                one.name,
                one.shape if is_plain else (*one.shape[:-1], one.row_bytes),
                np.dtype(np.float32 if is_plain else np.uint8),
                one.num_bytes,
                raw_dtype=gguf.GGMLQuantizationType[one.kind],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(one.num_bytes for one in tensors)
        for one in tensors:
            writer.write_tensor_data(one.read())
            done += one.num_bytes
            if progress is not None:
                progress(done, total)
        writer.close()


def _add_vocabulary(writer: Any, gguf: Any, tokenizer: Path) -> None:
    """Add the tokenizer of `write_tokenizer` in llama.cpp's format."""
    model, kinds = json.loads(tokenizer.read_text())["model"], gguf.TokenType
    ids = model["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([kinds.NORMAL] * (len(ids) - 1) + [kinds.CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(ids[END_OF_TEXT])
    writer.add_add_bos_token(False)


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "a GGUF file of the shape needs gguf; install it with pip install 'moe-runtime[peers]'"
        )


@dataclass(frozen=True)
class GgufShape:
    """Sizes of a file of random blocks, by their letters in ``families.json``."""

    name: str
    num_layers: int
    sizes: Mapping[str, int]

    @property
    def num_experts(self) -> int:
        return self.sizes["E"]

    @property
    def total_bytes(self) -> int:
        """Bytes of all matrices."""
        every = self._tensors(np.random.default_rng(0))
        return sum(one.num_bytes for one in every if one.kind != "F32")

    def write(self, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write the file and a tokenizer.

        Raises:
            UnsupportedModelError: the `gguf` package is missing.
            OSError: they cannot be written.
        """
        _require_gguf()
        write_tokenizer(folder, self.sizes["V"])
        metadata = filled(FAMILIES[_RANDOM]["gguf"], self._dims())
        tensors = self._tensors(np.random.default_rng(0))
        tokenizer = folder / TOKENIZER_NAME
        _write_file(folder / FILE_NAME, _RANDOM, tokenizer, tensors, metadata, progress)

    def write_settings(self, folder: Path) -> None:
        """Write the tokenizer and a configuration that lets transformers find it."""
        write_tokenizer(folder, self.sizes["V"])
        positions = FAMILIES[_RANDOM]["gguf"]["context_length"]
        settings = {"model_type": "gpt2", "n_positions": positions}
        (folder / "config.json").write_text(f"{json.dumps(settings)}\n")

    def _dims(self) -> dict[str, Any]:
        """Sizes with derived ones: Q queries, KV keys, S values and M all of linear layers."""
        of, queries = self.sizes, self.sizes["H"] * self.sizes["d"]
        found = {**of, "L": self.num_layers, "name": self.name, "Q": queries, "2Q": 2 * queries}
        found |= {"KV": of["A"] * of["d"], "S": of["T"] * of["s"], "taps": 4}
        return found | {"M": 2 * of["G"] * of["s"] + found["S"]}

    def _tensors(self, generator: np.random.Generator) -> Iterator[WrittenTensor]:
        facts, letters = FAMILIES[_RANDOM], self._dims()
        rows = [("", row) for row in facts["top"]]
        for layer in range(self.num_layers):
            kind = "linear" if (layer + 1) % facts["interval"] else "full"
            rows += ((f"blk.{layer}.", row) for row in facts["every"] + facts[kind])
        for prefix, row in rows:
            name, dims, kind, *drawn = row.split()
            shape = tuple(letters[dim] for dim in dims.split(","))
            draw = partial(_numbers, *drawn) if drawn else partial(_blocks, kind)
            yield WrittenTensor(prefix + name, kind, shape, partial(draw, name, shape, generator))


def _numbers(
    scale: str, shift: str, name: str, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Norms, routers and the fp32 parameters of linear attention."""
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(shape[-1] ** -0.5 if scale == "root" else float(scale))
    return -np.exp(values) if name == "ssm_a" else values + np.float32(shift)


def _blocks(
    kind: str, name: str, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Random codes, scaled to a standard deviation of 1 / sqrt(K)."""
    (values, num_bytes), (place, spread) = _BLOCKS[kind], _SCALES[kind]
    count = math.prod(shape) // values
    blocks = np.frombuffer(generator.bytes(count * num_bytes), np.uint8)
    blocks = blocks.reshape(count, num_bytes).copy()
    std = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    if name.startswith(("attn_output", "ssm_out", "ffn_down")):
        std *= _OUTPUT_SCALE
    scale = np.frombuffer(np.float16(std / spread).tobytes(), np.uint8)
    for first in (place, place + 2) if kind == "Q4_K" else (place,):
        blocks[:, first : first + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


# Experts, top-k, model and expert width, heads, those of keys, their size and what is rotated of
# it; heads of keys and values in linear layers, and their size; vocabulary.
_LETTERS = ("E", "K", "D", "F", "H", "A", "d", "R", "G", "T", "s", "V")
_TABLE = {
    "qwen3.6-35b-a3b-q4_k": (40, 256, 8, 2048, 512, 16, 2, 256, 64, 16, 32, 128, 4096),
    "qwen3.6-tiny-q4_k": (4, 8, 2, 256, 256, 2, 1, 256, 64, 1, 2, 128, 512),
}
GGUF_SHAPES = {
    name: GgufShape(name, layers, dict(zip(_LETTERS, sizes, strict=True)))
    for name, (layers, *sizes) in _TABLE.items()
}


_FLOAT32_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "attn_sinks.weight", ".bias")


def write_gguf(
    shape: ModelShape,
    checkpoint: Path,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the checkpoint of `shape` in folder `checkpoint` to the GGUF file `target`.

    Several processes may write it at a time. Needs the `gguf` package (extra `peers`).

    Args:
        progress: called with bytes written and bytes in all after each tensor.

    Raises:
        UnsupportedModelError: the package is missing, or the family is not known here.
        OSError: it cannot be written.
    """
    require_copy(shape)
    facts, tensors = facts_of(shape.family), _plan(shape, locate_tensors(checkpoint))
    if facts["stored"] == "fp8":
        tensors = map(_as_q8_0, tensors)
    metadata = filled(facts["gguf"], shape.sizes()) | {"file_type": facts["file_type"]}
    tokenizer = checkpoint / TOKENIZER_NAME
    _write_file(target, facts["architecture"], tokenizer, tensors, metadata, progress)


def require_copy(shape: Any) -> None:
    """Raise `UnsupportedModelError` for shapes that `write_gguf` would refuse."""
    if not isinstance(shape, ModelShape) or facts_of(shape.family)["architecture"] is None:
        raise UnsupportedModelError(f"no GGUF file is made of {shape.name}: give llama_cpp=FILE")
    _require_gguf()


def _plan(shape: ModelShape, places: Mapping[str, TensorPlace]) -> Iterator[WrittenTensor]:
    tables = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, name in tables.items():
        yield _tensor(f"{name}.weight", [f"{key}.weight"], places, slice(None))
    rows = [row.split() for row in facts_of(shape.family)["layer"]]
    for layer in range(shape.num_layers):
        for key, *_, names in rows:
            full = f"model.layers.{layer}.{key}"
            each = range(shape.num_experts if "{e}" in key else 1)
            keys, names = [full.format(e=expert) for expert in each], names.split(",")
            # Gate and up rows alternate in the checkpoint and are separate in the GGUF file.
            for first, name in enumerate(names):
                part = slice(first, None, len(names))
                yield _tensor(f"blk.{layer}.{name}", keys, places, part)


def _tensor(
    name: str, keys: list[str], places: Mapping[str, TensorPlace], rows: slice
) -> WrittenTensor:
    """Tensors unchanged, or in fp32 where llama.cpp requires it or the checkpoint has FP8; several
    are stacked. `rows` selects rows of experts."""
    if f"{keys[0]}_blocks" in places:
        return _mxfp4(name, places[f"{keys[0]}_blocks"], places[f"{keys[0]}_scales"], rows)
    found, (*lead, last) = [places[key] for key in keys], places[keys[0]].shape
    one = (*lead, len(range(*rows.indices(last))))
    scales = [places[f"{key}_scale_inv"] for key in keys if f"{key}_scale_inv" in places]
    is_float32 = bool(scales) or name.endswith(_FLOAT32_PARTS)

    def read() -> np.ndarray:
        if scales:
            every = [*map(_from_fp8, found, scales)]
        else:
            every = [place.read_bits()[..., rows] for place in found]
        values = np.ascontiguousarray(np.stack(every) if len(every) > 1 else every[0])
        if scales:
            return values
        return _from_bf16(values) if is_float32 else values.view(np.uint8)

    stacked = one if len(found) == 1 else (len(found), *one)
    return WrittenTensor(name, "F32" if is_float32 else "BF16", stacked, read)


def _from_fp8(matrix: TensorPlace, scales: TensorPlace) -> np.ndarray:
    """E4M3 codes times the scales of their blocks of 128 x 128."""
    import torch

    rows, cols = matrix.shape
    blocks = _from_bf16(scales.read_bits()).repeat(FP8_BLOCK, 0).repeat(FP8_BLOCK, 1)
    codes = torch.from_numpy(matrix.read_bits()).view(torch.float8_e4m3fn)
    return codes.float().numpy() * blocks[:rows, :cols]


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_q8_0(tensor: WrittenTensor) -> WrittenTensor:
    """Matrices in Q8_0; tensors that llama.cpp needs in fp32 stay."""
    if tensor.name.endswith(_FLOAT32_PARTS):
        return tensor

    def read() -> np.ndarray:
        gguf: Any = importlib.import_module("gguf")
        values = tensor.read()
        if tensor.kind == "BF16":
            values = _from_bf16(values.view(np.uint16))
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)

    return tensor._replace(kind="Q8_0", read=read)


def _mxfp4(name: str, codes: TensorPlace, scales: TensorPlace, rows: slice) -> WrittenTensor:
    """Codes `[E, N, G, 16]` with neighbours in a byte, as ggml's blocks `[E, N, G * 17]`.

    A block is the exponent, then the codes of elements j and j + 16 in byte j.
    """
    num_experts, num_rows, num_groups, _ = codes.shape
    num_rows, half = len(range(*rows.indices(num_rows))), MXFP4_GROUP // 4

    def read() -> np.ndarray:
        blocks = np.empty((num_experts, num_rows, num_groups, _BLOCKS["MXFP4"][1]), np.uint8)
        each = zip(codes.read_bits(), scales.read_bits(), blocks, strict=True)
        for pairs, exponents, block in each:  # free the page cache of what is written
            block[..., 0] = exponents[rows]
            low, high = pairs[rows, :, :half], pairs[rows, :, half:]
            block[..., 1::2] = low & 15 | high << 4
            block[..., 2::2] = low >> 4 | high & 0xF0
        return blocks.reshape(num_experts, num_rows, -1)

    return WrittenTensor(name, "MXFP4", (num_experts, num_rows, num_groups * MXFP4_GROUP), read)
