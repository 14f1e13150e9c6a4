"""GGUF files of ggml's architecture `deepseek2`: DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash.

One name stands for two models of `transformers`: where gates are a softmax, DeepSeek-V2, where they
are a sigmoid with a correction, DeepSeek-V3. Files have `kv_b_proj` as it is, or, from the year
2025 on, apart: each head's keys, transposed, and each head's values. The two values that an angle
turns lie side by side, as in checkpoints of `transformers`.

Source: llama.cpp's converter and its `deepseek2` graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.gguf.architectures import (
    ATTENTION,
    CORRECTION,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    FIELDS,
    SHARED_EXPERTS,
    Architecture,
    refuse,
    unsupported,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped

if TYPE_CHECKING:
    from moe_runtime.checkpoints.transformers_private import WeightTransform

HEADS = ("self_attn.k_b_proj", "self_attn.v_b_proj")
"""Parts of `kv_b_proj`: `[heads, rank, width]` of keys, `[heads, width, rank]` of values."""

_PARTS = {
    **ATTENTION,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": HEADS[0],
    "attn_v_b": HEADS[1],
    "ffn_gate_inp": "mlp.gate",
    **EXPERTS,
    **DENSE,
    **SHARED_EXPERTS,
}
_FIELDS = {
    **{setting: key for setting, key in FIELDS.items() if "num_experts" not in setting},
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_SOFTMAX, _SIGMOID = 1, 2


def deepseek2(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file.

    Raises:
        CheckpointError: widths of heads are missing.
        UnsupportedModelError: it computes something that the two models do not.
    """
    value = header.value
    parts = {name.split(".")[2] for t in header.tensors if (name := t.name).startswith("blk.")}
    # files of GLM-4.7-Flash may not say it, but have a correction, as no softmax has
    otherwise = _SIGMOID if "exp_probs_b" in parts else _SOFTMAX
    gating = value("expert_gating_func", otherwise)
    is_normed, groups = bool(value("expert_weights_norm", False)), value("expert_group_count", 1)
    if gating not in (_SOFTMAX, _SIGMOID) or (gating == _SOFTMAX and is_normed):
        found = f"expert_gating_func {clipped(gating)}, expert_weights_norm {is_normed}"
        unsupported(file, "a softmax whose weights are not normalised, or a sigmoid", found)
    if temperature := value("attention.temperature_scale", 0.0):
        unsupported(file, "no attention.temperature_scale", clipped(temperature))
    _require_scaling(header, file)
    if len(parts & {"attn_kv_b", "attn_k_b"}) != 1 or ("attn_k_b" in parts) != (
        "attn_v_b" in parts
    ):
        found = ", ".join(sorted(parts & {"attn_kv_b", "attn_k_b", "attn_v_b"})) or "none"
        refuse(file, "either attn_kv_b, or attn_k_b and attn_v_b", found)
    width, of_values = (
        value(f"attention.{end}_length_mla", value(f"attention.{end}_length"))
        for end in ("key", "value")
    )
    rotated = value("rope.dimension_count", 0)
    if not all(type(size) is int for size in (width, of_values, rotated)) or width <= rotated:
        keys = "deepseek2.attention.key_length and value_length beyond rope.dimension_count"
        refuse(file, keys, clipped([width, of_values, rotated]))
    constants = {
        "num_key_value_heads": value("attention.head_count"),
        "q_lora_rank": value("attention.q_lora_rank") if "attn_q_a" in parts else None,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": of_values,
        "routed_scaling_factor": value("expert_weights_scale", 0.0) or 1.0,
        "n_group": groups,
        "topk_group": value("expert_group_used_count", 1),
        "norm_topk_prob": is_normed,
    }
    own = {"exp_probs_b": f"mlp.gate.{CORRECTION}", **_PARTS} if gating == _SIGMOID else _PARTS
    kind = "3" if gating == _SIGMOID else "2"
    if gating == _SOFTMAX:
        constants["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    else:
        constants |= {"rope_interleave": True, "num_mtp_layers": 0}
    return Architecture(
        f"deepseek_v{kind}",
        f"DeepseekV{kind}ForCausalLM",
        own,
        {"moe_intermediate_size": EXPERT_WIDTH, "intermediate_size": ("ffn_gate", -2)},
        constants,
        {setting: key for setting, key in _FIELDS.items() if setting != "num_key_value_heads"},
        _yarn(value),
        _joined_heads,
    )


def _require_scaling(header: GgufHeader, file: Path) -> None:
    """Refuses extended positions of which only llama.cpp scales the softmax."""
    lead = "rope.scaling."
    kind, scale = header.value(f"{lead}type", "linear"), header.value(f"{lead}attn_factor", 1.0)
    factor = header.value(f"{lead}factor", header.value("rope.scale_linear", 1.0))
    multiplier = header.value(f"{lead}yarn_log_multiplier", 0.0)
    if kind == "linear" and factor != 1:
        unsupported(file, f"{lead}type yarn or none", f"linear by {clipped(factor)}")
    if type(multiplier) is not float or (kind == "yarn" and not multiplier):
        unsupported(file, f"{lead}yarn_log_multiplier, a real number", clipped(multiplier))
    if scale != 1:
        unsupported(file, f"{lead}attn_factor 1", clipped(scale))


def _yarn(value: Any) -> Mapping[str, Any]:
    """Settings of extended positions: files have the scale of the softmax as a tenth of it."""
    named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {setting: value(f"rope.scaling.{key}") for setting, key in named.items()}
    scale = round(10 * value("rope.scaling.yarn_log_multiplier", 0.0), 6)
    found = {setting: number for setting, number in given.items() if number is not None}
    return {"attention_factor": 1.0, "mscale": scale, "mscale_all_dim": scale, **found}


def _joined_heads() -> list[WeightTransform]:
    """Keys and values of each head one below the other, as `kv_b_proj` has them."""

    class OfHeads(private.Concatenate):
        """Turns the keys' matrices, and joins each with its head's values."""

        def convert(self, input_dict: Any, source_patterns: Any, *rest: Any, **named: Any) -> Any:
            first, second = source_patterns
            keys, values = (
                tensors[0] if isinstance(tensors := input_dict[name], list) else tensors
                for name in (first, second)
            )
            parts = {first: [keys.transpose(1, 2)], second: [values]}
            found = super().convert(parts, source_patterns, *rest, **named)
            return {name: joined.flatten(0, 1) for name, joined in found.items()}

    sources = [f"{name}.weight" for name in HEADS]
    return [private.WeightConverter(sources, "self_attn.kv_b_proj.weight", [OfHeads(1)])]
