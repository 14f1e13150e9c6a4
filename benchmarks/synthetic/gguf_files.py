"""GGUF files: of random blocks with a model's layers, and of the weights of synthetic checkpoints.

The first kind has Qwen3.5 MoE's architecture in the types of a Q4_K_M file. The second kind has
matrices in bf16, experts of gpt-oss in MXFP4 as they are, FP8 in blocks as Q8_0, and the rest in
fp32. Names, types and metadata are those of llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from moe_runtime.benchmarks.synthetic.checkpoint_writer import TensorPlace, locate_tensors
from moe_runtime.benchmarks.synthetic.model_shapes import (
    FP8_BLOCK,
    MAX_POSITIONS,
    MXFP4_GROUP,
    GptOssShape,
    GroupedShape,
    MixtralShape,
    ModelShape,
    Qwen3Fp8Shape,
    Qwen3Shape,
    with_layers,
)
from moe_runtime.benchmarks.synthetic.texts import END_OF_TEXT, TOKENIZER_NAME, write_tokenizer
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import write_atomically

FILE_NAME = "model.gguf"
_ARCHITECTURE = "qwen35moe"
_CONTEXT, _TAPS, _INTERVAL = 16384, 4, 4
_OUTPUT_SCALE = 0.01
_BLOCKS = {
    **{"F32": (1, 4), "BF16": (1, 2), "MXFP4": (MXFP4_GROUP, 1 + MXFP4_GROUP // 2)},
    **{"Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)},
}
"""Values of a block, and its bytes."""
_SCALES = {"Q4_K": ((0, 2), 350.0), "Q6_K": ((208,), 1400.0), "Q8_0": ((0,), 74.0)}
"""Where the fp16 numbers of a block lie, in bytes, and the spread of random codes without them."""


class WrittenTensor(NamedTuple):
    """A tensor of a file: its type, the shape of its values, and what gives its content."""

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
    add_metadata: Callable[[Any, ModuleType], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes one tensor at a time; the file gets its name when it is complete."""
    gguf = importlib.import_module("gguf")
    tensors = list(tensors)
    with write_atomically(target) as file:
        # The package opens its file by a name.
        writer = gguf.GGUFWriter(f"/proc/self/fd/{file.fileno()}", architecture)
        add_metadata(writer, gguf)
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
    """Adds the tokenizer that `write_tokenizer` wrote, in llama.cpp's words."""
    model = json.loads(tokenizer.read_text())["model"]
    ids = model["vocab"]
    kinds = gguf.TokenType
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
    """Sizes of a file of random blocks."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    model_width: int
    expert_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: int
    linear_keys: int
    linear_values: int
    linear_dim: int
    vocab_size: int

    @property
    def total_bytes(self) -> int:
        """Of all matrices."""
        return sum(one.num_bytes for one in self._matrices(np.random.default_rng(0)))

    @property
    def _linear_width(self) -> int:
        return self.linear_values * self.linear_dim

    @property
    def _mixed_width(self) -> int:
        return 2 * self.linear_keys * self.linear_dim + self._linear_width

    def write(self, folder: Path) -> None:
        """Writes file and tokenizer.

        Raises:
            UnsupportedModelError: the `gguf` package is missing.
            OSError: they cannot be written.
        """
        _require_gguf()
        write_tokenizer(folder, self.vocab_size)
        generator = np.random.default_rng(0)
        plain = [
            WrittenTensor(name, "F32", values.shape, values.view)
            for name, values in self._plain(generator).items()
        ]
        tensors = [*self._matrices(generator), *plain]
        tokenizer = folder / TOKENIZER_NAME
        _write_file(folder / FILE_NAME, _ARCHITECTURE, tokenizer, tensors, self._add_metadata)

    def write_settings(self, folder: Path) -> None:
        """Writes the tokenizer, and a configuration by which transformers finds it."""
        write_tokenizer(folder, self.vocab_size)
        settings = {"model_type": "gpt2", "n_positions": _CONTEXT}
        (folder / "config.json").write_text(f"{json.dumps(settings)}\n")

    def is_complete(self, folder: Path) -> bool:
        """Whether the file is there; it gets its name when it is whole."""
        file = folder / FILE_NAME
        return file.is_file() and file.stat().st_size >= self.total_bytes

    def _matrices(self, generator: np.random.Generator) -> Iterator[WrittenTensor]:
        width, hidden, experts = self.model_width, self.expert_width, self.num_experts
        values = self._linear_width
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def tensor(name: str, shape: tuple[int, ...], kind: str = "Q8_0") -> WrittenTensor:
            return WrittenTensor(name, kind, shape, partial(_blocks, name, shape, kind, generator))

        for name in ("token_embd", "output"):
            yield tensor(f"{name}.weight", (self.vocab_size, width))
        for layer in range(self.num_layers):
            if layer % _INTERVAL == _INTERVAL - 1:
                parts = {"attn_q": (2 * queries, width), "attn_k": (keys, width)}
                parts |= {"attn_v": (keys, width), "attn_output": (width, queries)}
            else:
                parts = {"attn_qkv": (self._mixed_width, width), "attn_gate": (values, width)}
                parts |= {f"ssm_{one}": (self.linear_values, width) for one in ("alpha", "beta")}
                parts["ssm_out"] = (width, values)
            parts |= {f"ffn_{one}_shexp": (hidden, width) for one in ("gate", "up")}
            parts["ffn_down_shexp"] = (width, hidden)
            for name, shape in parts.items():
                yield tensor(f"blk.{layer}.{name}.weight", shape)
            for name in ("gate", "up"):
                shape = (experts, hidden, width)
                yield tensor(f"blk.{layer}.ffn_{name}_exps.weight", shape, "Q4_K")
            yield tensor(f"blk.{layer}.ffn_down_exps.weight", (experts, width, hidden), "Q6_K")

    def _plain(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Norms, routers and what linear attention has in fp32."""
        width = self.model_width

        def drawn(*sizes: int, scale: float = 0.1, shift: float = 0.0) -> np.ndarray:
            numbers = generator.standard_normal(sizes, dtype=np.float32)
            return (scale * numbers + shift).astype(np.float32)

        found = {"output_norm.weight": drawn(width, shift=1)}
        for layer in range(self.num_layers):
            own = {"attn_norm.weight": drawn(width, shift=1)}
            own["post_attention_norm.weight"] = drawn(width, shift=1)
            if layer % _INTERVAL == _INTERVAL - 1:
                own["attn_q_norm.weight"] = drawn(self.head_dim, shift=1)
                own["attn_k_norm.weight"] = drawn(self.head_dim, shift=1)
            else:
                own["ssm_conv1d.weight"] = drawn(self._mixed_width, _TAPS, scale=0.3)
                own["ssm_dt.bias"] = drawn(self.linear_values, scale=1)
                own["ssm_a"] = -np.exp(drawn(self.linear_values, scale=1))
                own["ssm_norm.weight"] = drawn(self.linear_dim, shift=1)
            own["ffn_gate_inp.weight"] = drawn(self.num_experts, width, scale=width**-0.5)
            own["ffn_gate_inp_shexp.weight"] = drawn(width, scale=width**-0.5)
            found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
        return found

    def _add_metadata(self, writer: Any, gguf: ModuleType) -> None:
        del gguf
        for name, value in {
            "name": self.name,
            "context_length": _CONTEXT,
            "embedding_length": self.model_width,
            "block_count": self.num_layers,
            "vocab_size": self.vocab_size,
            "head_count": self.num_heads,
            "head_count_kv": self.num_kv_heads,
            "key_length": self.head_dim,
            "value_length": self.head_dim,
            "layer_norm_rms_eps": 1e-6,
            "rope_freq_base": 1e7,
            "rope_dimension_count": self.rotated,
            "rope_dimension_sections": [11, 11, 10, 0],
            "ssm_conv_kernel": _TAPS,
            "ssm_state_size": self.linear_dim,
            "ssm_group_count": self.linear_keys,
            "ssm_time_step_rank": self.linear_values,
            "ssm_inner_size": self._linear_width,
        }.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", _INTERVAL)
        writer.add_expert_count(self.num_experts)
        writer.add_expert_used_count(self.top_k)
        writer.add_expert_feed_forward_length(self.expert_width)
        writer.add_expert_shared_feed_forward_length(self.expert_width)


def _blocks(
    name: str, shape: tuple[int, ...], kind: str, generator: np.random.Generator
) -> np.ndarray:
    """Random codes, with scales for numbers of a standard deviation of one over the root of K."""
    values, num_bytes = _BLOCKS[kind]
    places, spread = _SCALES[kind]
    count = math.prod(shape) // values
    blocks = np.frombuffer(generator.bytes(count * num_bytes), np.uint8)
    blocks = blocks.reshape(count, num_bytes).copy()
    std = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    if any(part in name for part in ("attn_output", "ssm_out", "ffn_down")):
        std *= _OUTPUT_SCALE
    scale = np.frombuffer(np.float16(std / spread).tobytes(), np.uint8)
    for place in places:
        blocks[:, place : place + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


GGUF_SHAPES = {
    shape.name: shape
    for shape in (
        GgufShape("qwen3.6-35b-a3b-q4_k", 40, 256, 8, 2048, 512, 16, 2, 256, 64, 16, 32, 128, 4096),
        GgufShape("qwen3.6-tiny-q4_k", 4, 8, 2, 256, 256, 2, 1, 256, 64, 1, 2, 128, 512),
    )
}


def gguf_shape_of_name(name: str, num_layers: int | None = None) -> GgufShape:
    """A shape of `GGUF_SHAPES`, with fewer layers if wanted; its name says so."""
    return with_layers(GGUF_SHAPES, name, num_layers)


_TABLES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION_PARTS = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
}
_OLMOE_PARTS = _ATTENTION_PARTS | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_GPT_OSS_PARTS = _ATTENTION_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
_FLOAT32_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "attn_sinks.weight", ".bias")


def write_gguf(
    shape: ModelShape,
    checkpoint: Path,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the checkpoint of `shape` in folder `checkpoint` to the GGUF file `target`.

    Several processes may write it at a time. Needs the `gguf` package (extra `peers`).

    Args:
        progress: called with bytes written and bytes in all after each tensor.

    Raises:
        UnsupportedModelError: the package is missing, or the family is not known here.
        OSError: it cannot be written.
    """
    require_copy(shape)
    tensors = _plan(shape, locate_tensors(checkpoint))
    if isinstance(shape, Qwen3Fp8Shape):
        tensors = map(_as_q8_0, tensors)
    architecture = "qwen3moe" if isinstance(shape, Qwen3Shape) else "olmoe"
    if isinstance(shape, GptOssShape):
        architecture = "gpt-oss"
    add_metadata = partial(_add_metadata, shape=shape)
    tokenizer = checkpoint / TOKENIZER_NAME
    _write_file(target, architecture, tokenizer, tensors, add_metadata, progress)


def require_copy(shape: Any) -> None:
    """Raises `UnsupportedModelError` for what `write_gguf` would refuse."""
    if not isinstance(shape, ModelShape) or isinstance(shape, MixtralShape):
        raise UnsupportedModelError(f"no GGUF file is made of {shape.name}: give llama_cpp=FILE")
    _require_gguf()


def _plan(shape: ModelShape, places: dict[str, TensorPlace]) -> Iterator[WrittenTensor]:
    for key, name in _TABLES.items():
        yield _plain(f"{name}.weight", places[f"{key}.weight"])
    is_gpt_oss = isinstance(shape, GptOssShape)
    for layer in range(shape.num_layers):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        for key, name in (_GPT_OSS_PARTS if is_gpt_oss else _OLMOE_PARTS).items():
            for end in ("weight", "bias"):
                if f"{prefix}.{key}.{end}" in places:
                    yield _matrices(f"{block}.{name}.{end}", [f"{prefix}.{key}.{end}"], places)
        if is_gpt_oss:
            yield _plain(f"{block}.attn_sinks.weight", places[f"{prefix}.self_attn.sinks"])
            yield from _gpt_oss_experts(block, f"{prefix}.mlp.experts", places)
            continue
        for key in ("gate", "up", "down"):
            stems = (f"{prefix}.mlp.experts.{expert}" for expert in range(shape.num_experts))
            names = [f"{stem}.{key}_proj.weight" for stem in stems]
            yield _matrices(f"{block}.ffn_{key}_exps.weight", names, places)


def _plain(name: str, *places: TensorPlace, rows: slice = slice(None)) -> WrittenTensor:
    """In bf16, or fp32 where llama.cpp wants that; `rows` are taken of the last dimension."""
    is_float32 = name.endswith(_FLOAT32_PARTS)
    one = (*places[0].shape[:-1], len(range(*rows.indices(places[0].shape[-1]))))

    def read() -> np.ndarray:
        bits = np.stack([place.read_bits()[..., rows] for place in places])
        bits = np.ascontiguousarray(bits if len(places) > 1 else bits[0])
        return _from_bf16(bits) if is_float32 else bits.view(np.uint8)

    stacked = one if len(places) == 1 else (len(places), *one)
    return WrittenTensor(name, "F32" if is_float32 else "BF16", stacked, read)


def _matrices(name: str, keys: list[str], places: dict[str, TensorPlace]) -> WrittenTensor:
    """Tensors as they are, or in fp32 where a checkpoint has FP8; several are stacked."""
    matrices = [places[key] for key in keys]
    if f"{keys[0]}_scale_inv" not in places:
        return _plain(name, *matrices)
    scales = [places[f"{key}_scale_inv"] for key in keys]

    def read() -> np.ndarray:
        found = [*map(_from_fp8, matrices, scales)]
        return np.stack(found) if len(found) > 1 else found[0]

    one = matrices[0].shape
    return WrittenTensor(name, "F32", one if len(keys) == 1 else (len(keys), *one), read)


def _from_fp8(matrix: TensorPlace, scales: TensorPlace) -> np.ndarray:
    """Codes in E4M3 times the scale of their block of 128 x 128."""
    import torch

    rows, cols = matrix.shape
    blocks = _from_bf16(scales.read_bits()).repeat(FP8_BLOCK, 0).repeat(FP8_BLOCK, 1)
    codes = torch.from_numpy(matrix.read_bits()).view(torch.float8_e4m3fn)
    return codes.float().numpy() * blocks[:rows, :cols]


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_q8_0(tensor: WrittenTensor) -> WrittenTensor:
    """A matrix in Q8_0; what llama.cpp wants in fp32 stays."""
    if tensor.name.endswith(_FLOAT32_PARTS):
        return tensor

    def read() -> np.ndarray:
        gguf: Any = importlib.import_module("gguf")
        values = tensor.read()
        if tensor.kind == "BF16":
            values = _from_bf16(values.view(np.uint16))
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)

    return tensor._replace(kind="Q8_0", read=read)


def _gpt_oss_experts(
    block: str, stem: str, places: dict[str, TensorPlace]
) -> Iterator[WrittenTensor]:
    """Rows of gate and up take turns in the checkpoint and lie apart in the GGUF file."""
    for name, key, rows in (
        ("gate", "gate_up_proj", slice(0, None, 2)),
        ("up", "gate_up_proj", slice(1, None, 2)),
        ("down", "down_proj", slice(None)),
    ):
        codes, scales = (places[f"{stem}.{key}_{end}"] for end in ("blocks", "scales"))
        yield _mxfp4(f"{block}.ffn_{name}_exps.weight", codes, scales, rows)
        yield _plain(f"{block}.ffn_{name}_exps.bias", places[f"{stem}.{key}_bias"], rows=rows)


def _mxfp4(name: str, codes: TensorPlace, scales: TensorPlace, rows: slice) -> WrittenTensor:
    """Codes `[E, N, G, 16]` with neighbours in a byte, as ggml's blocks `[E, N, G * 17]`.

    A block is the exponent, then the codes of elements j and j + 16 in byte j.
    """
    num_experts, num_rows, num_groups, _ = codes.shape
    num_rows, half = len(range(*rows.indices(num_rows))), MXFP4_GROUP // 4

    def read() -> np.ndarray:
        blocks = np.empty((num_experts, num_rows, num_groups, _BLOCKS["MXFP4"][1]), np.uint8)
        each = zip(codes.read_bits(), scales.read_bits(), blocks, strict=True)
        for pairs, exponents, block in each:  # what is written out stays in the cache
            block[..., 0] = exponents[rows]
            low, high = pairs[rows, :, :half], pairs[rows, :, half:]
            block[..., 1::2] = low & 15 | high << 4
            block[..., 2::2] = low >> 4 | high & 0xF0
        return blocks.reshape(num_experts, num_rows, -1)

    return WrittenTensor(name, "MXFP4", (num_experts, num_rows, num_groups * MXFP4_GROUP), read)


def _add_metadata(writer: Any, gguf: ModuleType, shape: ModelShape) -> None:
    kinds, settings = gguf.LlamaFileType, shape.config()
    kind = kinds.MOSTLY_Q8_0 if isinstance(shape, Qwen3Fp8Shape) else kinds.MOSTLY_BF16
    for name, value in {
        "name": shape.name,
        "file_type": kinds.MOSTLY_MXFP4_MOE if isinstance(shape, GptOssShape) else kind,
        "context_length": MAX_POSITIONS,
        "embedding_length": shape.model_width,
        "block_count": shape.num_layers,
        "feed_forward_length": shape.expert_width,
        "head_count": shape.num_heads,
        "layer_norm_rms_eps": 1e-5,
        "expert_count": shape.num_experts,
        "expert_used_count": shape.top_k,
        "vocab_size": shape.vocab_size,
        "rope_freq_base": settings["rope_theta"],
        "head_count_kv": settings["num_key_value_heads"],
    }.items():
        getattr(writer, f"add_{name}")(value)
    if isinstance(shape, GroupedShape):
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_expert_feed_forward_length(shape.expert_width)
    if isinstance(shape, GptOssShape):
        writer.add_sliding_window(settings["sliding_window"])
