"""Writes a synthetic Mixture-of-Experts checkpoint, one tensor in memory at a time.

The files are laid out as Hugging Face publishes OLMoE: safetensors shards with one key per expert
matrix, `model.safetensors.index.json`, `config.json`. Routing depends on the token: attention
output and expert outputs are scaled down and token embeddings up, so that the residual stream
keeps the direction of the token's embedding and text with repeated tokens repeats its experts.
A plain random model would route nearly all tokens alike and flatter every cache.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.shapes import BF16_BYTES, Shape

WEIGHT_STD = 0.02
OUTPUT_SCALE = 1e-3
EMBEDDING_SCALE = 50.0
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write; `std` None stands for a tensor of ones (normalisation weights)."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BF16_BYTES


def plan_tensors(shape: Shape) -> Iterator[TensorPlan]:
    """Every tensor of the checkpoint in the order of its layers."""
    width, hidden = shape.model_width, shape.expert_width
    small = WEIGHT_STD * OUTPUT_SCALE
    table = (shape.vocab_size, width)
    yield TensorPlan("model.embed_tokens.weight", table, WEIGHT_STD * EMBEDDING_SCALE)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
        for expert in range(shape.num_experts):
            stem = f"{prefix}.mlp.experts.{expert}"
            yield TensorPlan(f"{stem}.down_proj.weight", (width, hidden), small)
            yield TensorPlan(f"{stem}.gate_proj.weight", (hidden, width), WEIGHT_STD)
            yield TensorPlan(f"{stem}.up_proj.weight", (hidden, width), WEIGHT_STD)
        yield TensorPlan(f"{prefix}.mlp.gate.weight", (shape.num_experts, width), WEIGHT_STD)
        yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
        for part, std in (("q", WEIGHT_STD), ("k", WEIGHT_STD), ("v", WEIGHT_STD), ("o", small)):
            yield TensorPlan(f"{prefix}.self_attn.{part}_proj.weight", (width, width), std)
        yield TensorPlan(f"{prefix}.self_attn.q_norm.weight", (width,), None)
        yield TensorPlan(f"{prefix}.self_attn.k_norm.weight", (width,), None)
    yield TensorPlan("model.norm.weight", (width,), None)
    yield TensorPlan("lm_head.weight", table, WEIGHT_STD)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds finite fp32 values to the nearest bf16 (ties to even); returns the bits as uint16."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def make_tensor(plan: TensorPlan, seed: int) -> np.ndarray:
    """The bits of one bf16 tensor; a function of seed and name only, whatever the order."""
    if plan.std is None:
        return to_bfloat16_bits(np.ones(plan.shape, dtype=np.float32))
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(plan.name.encode())]))
    values = generator.standard_normal(plan.shape, dtype=np.float32)
    values *= np.float32(plan.std)
    return to_bfloat16_bits(values)


def write_checkpoint(
    shape: Shape, folder: Path, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the checkpoint of `shape` into `folder`; the index comes last, so it marks the end.

    Args:
        progress: called with bytes written and bytes in all after each tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split_into_shards(list(plan_tensors(shape)), shape.shard_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for number, plans in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            file.write(_safetensors_header(plans))
            for plan in plans:
                file.write(make_tensor(plan, seed).data)
                weight_map[plan.name] = file_name
                done += plan.num_bytes
                if progress is not None:
                    progress(done, shape.total_bytes)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"do_sample": False})
    _write_json(
        folder / INDEX_NAME,
        {"metadata": {"total_size": shape.total_bytes, "seed": seed}, "weight_map": weight_map},
    )


def is_complete(shape: Shape, folder: Path, *, seed: int = 0) -> bool:
    """Whether `folder` already holds this checkpoint, whole and made from the same seed."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return False
    content = json.loads(index.read_text())
    if content["metadata"] != {"total_size": shape.total_bytes, "seed": seed}:
        return False
    files = [folder / name for name in set(content["weight_map"].values())]
    return all(file.is_file() for file in files) and (
        sum(file.stat().st_size for file in files) >= shape.total_bytes
    )


def _split_into_shards(plans: list[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.num_bytes
    return shards


def _safetensors_header(plans: list[TensorPlan]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        end = offset + plan.num_bytes
        entries[plan.name] = {
            "dtype": "BF16",
            "shape": list(plan.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # As the safetensors library does: pad with spaces to a multiple of eight bytes and no more,
    # so that tensors start where they start in published checkpoints, not at a disk block.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": shape.vocab_size - 1,
        "hidden_act": "silu",
        "hidden_size": shape.model_width,
        "initializer_range": WEIGHT_STD,
        "intermediate_size": shape.expert_width,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": shape.num_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_heads,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
