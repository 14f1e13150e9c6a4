"""GGUF files of random blocks with a model's layers, for programs that read nothing else.

The architecture is Qwen3.5 MoE's: three of four layers of linear attention. Types are those of a
Q4_K_M file: experts in Q4_K and Q6_K, other matrices in Q8_0. Names and metadata are those that
llama.cpp's converter writes (`convert_hf_to_gguf.py`). Token embeddings outweigh what layers add,
so that routing depends on the token and rounding seldom decides which token is likeliest.
"""

import importlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.benchmarks.synthetic.model_shapes import with_layers
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
        """Of all matrices."""
        return sum(_num_bytes(sizes, kind) for _, sizes, kind in self._matrices())

    def write(self, folder: Path) -> None:
        """Writes file and tokenizer.

        Raises:
            UnsupportedModelError: the `gguf` package is missing.
            OSError: they cannot be written.
        """
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
    """Refuses to go on without the package.

    Raises:
        UnsupportedModelError: it is missing.
    """
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
    """Random codes, with scales for numbers of a standard deviation of one over the root of K.

    What layers add to the residual is smaller, and embeddings are as large as what norms give.
    """
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
