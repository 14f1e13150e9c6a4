"""Writes the weights of a synthetic checkpoint as a bf16 GGUF file, one tensor in memory at a time.

Tensor names, types and the stacking of experts are those that llama.cpp's own converter gives an
OLMoE model: matrices in bf16, norms and routers in fp32, the experts of a layer in one tensor. The
file has no vocabulary, because the benchmark feeds token ids.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from harness.safetensors_files import TensorPlace, locate_tensors
from harness.shapes import Shape

TABLES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
FLOAT32_PARTS = ("_norm.weight", "ffn_gate_inp.weight")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the GGUF file and the checkpoint's tensors that it is made of."""

    name: str
    sources: tuple[TensorPlace, ...]
    stacked: bool

    @property
    def is_float32(self) -> bool:
        return self.name.endswith(FLOAT32_PARTS)

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.sources[0].shape
        return (len(self.sources), *one) if self.stacked else one

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources) * (2 if self.is_float32 else 1)

    def load(self) -> np.ndarray:
        """The tensor's values as the bytes that the file holds."""
        bits = np.stack([source.read_bfloat16_bits() for source in self.sources])
        bits = bits.reshape(self.shape)
        if not self.is_float32:
            return bits.view(np.uint8)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def write_gguf(
    shape: Shape,
    checkpoint: Path,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the checkpoint of `shape` in folder `checkpoint` to the GGUF file `target`.

    The file gets its name when it is complete. Needs the `gguf` package (extra `peers`).

    Args:
        progress: called with bytes written and bytes in all after each tensor.
    """
    gguf = importlib.import_module("gguf")
    tensors = list(_plan(shape, locate_tensors(checkpoint)))
    total = sum(tensor.num_bytes for tensor in tensors)
    unfinished = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(unfinished, "olmoe")
    _add_metadata(writer, gguf, shape)
    for tensor in tensors:
        kind = "F32" if tensor.is_float32 else "BF16"
        stored = tensor.shape if tensor.is_float32 else (*tensor.shape[:-1], 2 * tensor.shape[-1])
        writer.add_tensor_info(
            tensor.name,
            stored,
            np.dtype(np.float32 if tensor.is_float32 else np.uint8),
            tensor.num_bytes,
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for tensor in tensors:
        writer.write_tensor_data(tensor.load())
        done += tensor.num_bytes
        if progress is not None:
            progress(done, total)
    writer.close()
    unfinished.rename(target)


def _plan(shape: Shape, places: dict[str, TensorPlace]) -> Iterator[GgufTensor]:
    for key, name in TABLES.items():
        yield GgufTensor(name, (places[key],), stacked=False)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for key, name in BLOCK_PARTS.items():
            place = places[f"{prefix}.{key}.weight"]
            yield GgufTensor(f"blk.{layer}.{name}.weight", (place,), stacked=False)
        for key, name in EXPERT_PARTS.items():
            experts = tuple(
                places[f"{prefix}.mlp.experts.{expert}.{key}.weight"]
                for expert in range(shape.num_experts)
            )
            yield GgufTensor(f"blk.{layer}.{name}.weight", experts, stacked=True)


def _add_metadata(writer: Any, gguf: ModuleType, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.model_width)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
