"""GGUF files: of random blocks with a model's layers, and of the weights of synthetic checkpoints.

The first kind is for programs that read nothing else. Its architecture is Qwen3.5 MoE's: three of
four layers of linear attention. Types are those of a Q4_K_M file: experts in Q4_K and Q6_K, other
matrices in Q8_0. Token embeddings outweigh what layers add, so that routing depends on the token
and rounding seldom decides which token is likeliest.

The second kind is written one tensor in memory at a time: matrices in bf16, experts of gpt-oss in
MXFP4 as they are, norms, biases, sinks and routers in fp32, the experts of a layer in one tensor.
For FP8 in blocks llama.cpp has no type: each matrix of such a model becomes Q8_0, rounded once
more. The vocabulary is the checkpoint's tokenizer's.

Names, types and metadata of both are those that llama.cpp's converter writes
(`convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

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
_BLOCKS = {"Q4_K": (256, 144), "Q6_K": (256, 210), "Q8_0": (32, 34)}
"""Values of a block, and its bytes."""
_SCALES = {"Q4_K": ((0, 2), 350.0), "Q6_K": ((208,), 1400.0), "Q8_0": ((0,), 74.0)}
"""Where the fp16 numbers of a block lie, in bytes, and how far random codes spread without them."""


@dataclass(frozen=True, kw_only=True)
class GgufShape:
    """Sizes of the file: D model width, F expert width, and of heads."""

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
        return sum(_num_bytes(sizes, kind) for _, sizes, kind in self._matrices())

    def write(self, folder: Path) -> None:
        """Writes file and tokenizer."""
        require_gguf()
        gguf: Any = importlib.import_module("gguf")
        write_tokenizer(folder, self.vocab_size)
        generator = np.random.default_rng(0)
        with write_atomically(folder / FILE_NAME) as file:
            # The package opens its file by a name.
            writer = gguf.GGUFWriter(f"/proc/self/fd/{file.fileno()}", _ARCHITECTURE)
            self._add_metadata(writer)
            add_vocabulary(writer, gguf, folder / TOKENIZER_NAME)
            matrices = list(self._matrices())
            for name, sizes, kind in matrices:
                shape, size = (*sizes[:-1], _row_bytes(sizes, kind)), _num_bytes(sizes, kind)
                type_of = gguf.GGMLQuantizationType[kind]
                writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, raw_dtype=type_of)
            plain = self._plain(generator)
            for name, values in plain.items():
                writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, sizes, kind in matrices:
                writer.write_tensor_data(_blocks(name, sizes, kind, generator))
            for values in plain.values():
                writer.write_tensor_data(values)
            writer.close()

    def write_settings(self, folder: Path) -> None:
        """Writes the tokenizer, and a configuration for who reads it by that."""
        write_tokenizer(folder, self.vocab_size)
        settings = {"model_type": "gpt2", "n_positions": _CONTEXT}
        (folder / "config.json").write_text(f"{json.dumps(settings)}\n")

    def is_complete(self, folder: Path) -> bool:
        """Whether the file is there; it gets its name when it is whole."""
        file = folder / FILE_NAME
        return file.is_file() and file.stat().st_size >= self.total_bytes

    def _matrices(self) -> list[tuple[str, tuple[int, ...], str]]:
        width, hidden, experts = self.model_width, self.expert_width, self.num_experts
        values = self.linear_values * self.linear_dim
        mixed = 2 * self.linear_keys * self.linear_dim + values
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        table = (self.vocab_size, width)
        found = [("token_embd.weight", table, "Q8_0"), ("output.weight", table, "Q8_0")]
        for layer in range(self.num_layers):
            parts: dict[str, tuple[int, ...]] = {
                "attn_qkv": (mixed, width),
                "attn_gate": (values, width),
                "ssm_alpha": (self.linear_values, width),
                "ssm_beta": (self.linear_values, width),
                "ssm_out": (width, values),
            }
            if layer % _INTERVAL == _INTERVAL - 1:
                parts = {"attn_q": (2 * queries, width), "attn_k": (keys, width)}
                parts |= {"attn_v": (keys, width), "attn_output": (width, queries)}
            parts |= {"ffn_gate_shexp": (hidden, width), "ffn_up_shexp": (hidden, width)}
            parts |= {"ffn_down_shexp": (width, hidden)}
            stacks = {"ffn_gate_exps": (experts, hidden, width)}
            stacks |= {"ffn_up_exps": (experts, hidden, width)}
            found += [(f"blk.{layer}.{one}.weight", size, "Q8_0") for one, size in parts.items()]
            found += [(f"blk.{layer}.{one}.weight", size, "Q4_K") for one, size in stacks.items()]
            found.append((f"blk.{layer}.ffn_down_exps.weight", (experts, width, hidden), "Q6_K"))
        return found

    def _plain(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Norms, routers and what linear attention has in fp32."""
        width = self.model_width
        values = self.linear_values * self.linear_dim
        mixed = 2 * self.linear_keys * self.linear_dim + values

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
                own["ssm_conv1d.weight"] = drawn(mixed, _TAPS, scale=0.3)
                own["ssm_dt.bias"] = drawn(self.linear_values, scale=1)
                own["ssm_a"] = -np.exp(drawn(self.linear_values, scale=1))
                own["ssm_norm.weight"] = drawn(self.linear_dim, shift=1)
            own["ffn_gate_inp.weight"] = drawn(self.num_experts, width, scale=width**-0.5)
            own["ffn_gate_inp_shexp.weight"] = drawn(width, scale=width**-0.5)
            found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
        return found

    def _add_metadata(self, writer: Any) -> None:
        writer.add_name(self.name)
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(self.model_width)
        writer.add_block_count(self.num_layers)
        writer.add_vocab_size(self.vocab_size)
        writer.add_head_count(self.num_heads)
        writer.add_head_count_kv(self.num_kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e7)
        writer.add_rope_dimension_count(self.rotated)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(_TAPS)
        writer.add_ssm_state_size(self.linear_dim)
        writer.add_ssm_group_count(self.linear_keys)
        writer.add_ssm_time_step_rank(self.linear_values)
        writer.add_ssm_inner_size(self.linear_values * self.linear_dim)
        writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", _INTERVAL)
        writer.add_expert_count(self.num_experts)
        writer.add_expert_used_count(self.top_k)
        writer.add_expert_feed_forward_length(self.expert_width)
        writer.add_expert_shared_feed_forward_length(self.expert_width)


def gguf_shape_of_name(name: str, num_layers: int | None = None) -> GgufShape:
    """A shape of `GGUF_SHAPES`, with fewer layers if wanted; its name says so."""
    return with_layers(GGUF_SHAPES, name, num_layers)


def require_gguf() -> None:
    """Refuses to go on without the package."""
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "a GGUF file of the shape needs gguf; install it with pip install 'moe-runtime[peers]'"
        )


def add_vocabulary(writer: Any, gguf: Any, tokenizer: Path) -> None:
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


def _row_bytes(sizes: tuple[int, ...], kind: str) -> int:
    values, num_bytes = _BLOCKS[kind]
    return sizes[-1] // values * num_bytes


def _num_bytes(sizes: tuple[int, ...], kind: str) -> int:
    return int(np.prod(sizes[:-1])) * _row_bytes(sizes, kind)


def _blocks(
    name: str, sizes: tuple[int, ...], kind: str, generator: np.random.Generator
) -> np.ndarray:
    """Random codes, with scales for numbers of a standard deviation of one over the root of K."""
    _, num_bytes = _BLOCKS[kind]
    places, spread = _SCALES[kind]
    blocks = np.frombuffer(generator.bytes(_num_bytes(sizes, kind)), np.uint8)
    blocks = blocks.reshape(-1, num_bytes).copy()
    std = 1.0 if name.startswith("token_embd") else sizes[-1] ** -0.5
    if any(part in name for part in ("attn_output", "ssm_out", "ffn_down")):
        std *= _OUTPUT_SCALE
    scale = np.frombuffer(np.float16(std / spread).tobytes(), np.uint8)
    for place in places:
        blocks[:, place : place + 2] = scale
    return blocks.reshape(*sizes[:-1], -1)


_QWEN36 = GgufShape(
    name="qwen3.6-35b-a3b-q4_k",
    num_layers=40,
    num_experts=256,
    top_k=8,
    model_width=2048,
    expert_width=512,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    rotated=64,
    linear_keys=16,
    linear_values=32,
    linear_dim=128,
    vocab_size=4096,
)
GGUF_SHAPES = {
    shape.name: shape
    for shape in (
        _QWEN36,
        replace(
            _QWEN36,
            name="qwen3.6-tiny-q4_k",
            num_layers=4,
            num_experts=8,
            top_k=2,
            model_width=256,
            expert_width=256,
            num_heads=2,
            num_kv_heads=1,
            linear_keys=1,
            linear_values=2,
            vocab_size=512,
        ),
    )
}


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
    """Writes the checkpoint of `shape` in folder `checkpoint` to the GGUF file `target`."""
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
    """Refuses what `write_gguf` would refuse."""
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
    """In bf16, or in fp32 where llama.cpp wants that; several stand for a stack of experts."""
    is_float32 = name.endswith(FLOAT32_PARTS)
    one = (*places[0].shape[:-1], len(range(*rows.indices(places[0].shape[-1]))))

    def read() -> np.ndarray:
        bits = np.stack([place.read_bits()[..., rows] for place in places])
        bits = np.ascontiguousarray(bits if len(places) > 1 else bits[0])
        if not is_float32:
            return bits.view(np.uint8)
        return _from_bf16(bits)

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
    import torch

    rows, cols = matrix.shape
    blocks = _from_bf16(scales.read_bits()).repeat(FP8_BLOCK, 0).repeat(FP8_BLOCK, 1)
    codes = torch.from_numpy(matrix.read_bits()).view(torch.float8_e4m3fn)
    return codes.float().numpy() * blocks[:rows, :cols]


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_q8_0(tensor: CopiedTensor, gguf: ModuleType) -> CopiedTensor:
    """A matrix in Q8_0; what llama.cpp wants in fp32 stays."""
    if tensor.name.endswith(FLOAT32_PARTS):
        return tensor

    def read() -> np.ndarray:
        values = tensor.read()
        if tensor.kind == "BF16":
            values = _from_bf16(values.view(np.uint16))
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
        each = zip(codes.read_bits(), scales.read_bits(), blocks, strict=True)
        for pairs, exponents, block in each:  # what is written out stays in the cache
            block[..., 0] = exponents[rows]
            low, high = pairs[rows, :, :half], pairs[rows, :, half:]
            block[..., 1::2] = low & 15 | high << 4
            block[..., 2::2] = low >> 4 | high & 0xF0
        return blocks.reshape(num_experts, num_rows, num_groups * BLOCK_BYTES)

    return CopiedTensor(name, "MXFP4", (num_experts, num_rows, num_groups * MXFP4_GROUP), read)


def _add_metadata(writer: Any, gguf: ModuleType, shape: ModelShape) -> None:
    kinds, settings = gguf.LlamaFileType, shape.config()
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
