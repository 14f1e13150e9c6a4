"""Rows of GGUF architectures whose files differ: what a file's tensors and metadata decide.

Source: llama.cpp's converter, and its graphs of these architectures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.gguf.architectures import (
    A_LOG,
    ATTENTION,
    CORRECTION,
    DENSE,
    DT_BIAS,
    EXPERT_WIDTH,
    EXPERTS,
    FIELDS,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    Architecture,
    ValueChange,
    num_layers_of,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.transformers_private import WeightTransform

_SOFTMAX, _SIGMOID = 1, 2
_SIZES = {"moe_intermediate_size": EXPERT_WIDTH, "intermediate_size": ("ffn_gate", -2)}
_COMMON = {setting: key for setting, key in FIELDS.items() if "num_experts" not in setting}
_ROUTED = {
    **_COMMON,
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
}
_GATED = {**ATTENTION, "ffn_gate_inp": "mlp.gate", **EXPERTS, **DENSE, **SHARED_EXPERTS}


def glm4moe(header: GgufHeader) -> Architecture:
    """The row of a file of GLM-4.5 to 4.7, or of Solar Open."""
    parts, value, head_dim = header.parts, header.value, _head_dim(header)
    rotated = _rotated(header, head_dim)
    _require_sigmoid(header, otherwise=_SIGMOID)
    has_biases = "attn_q.bias" in parts
    if not has_biases and rotated != 1:  # GLM's have biases
        expected = f"glm4moe.rope.dimension_count {head_dim} without biases, as Solar Open is"
        header.unsupported(expected, f"{rotated} of it: convert it again, or set the key")
    constants = {
        "head_dim": head_dim,
        "attention_bias": has_biases,
        "use_qk_norm": "attn_q_norm.weight" in parts,
        "first_k_dense_replace": value("leading_dense_block_count", 0),
        **_choice_of_groups(header),
        "num_nextn_predict_layers": 0,
    }
    own = {
        **_GATED,
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b": f"mlp.gate.{CORRECTION}",
    }
    row = ("glm4_moe", "Glm4MoeForCausalLM", own, _SIZES, constants, _ROUTED)
    return Architecture(*row, rotated=rotated)


def ernie4_5_moe(header: GgufHeader) -> Architecture:
    """The row of a file of ERNIE 4.5."""
    parts, head_dim = header.parts, _head_dim(header)
    if (rotated := _rotated(header, head_dim)) != 1:
        header.unsupported("positions that turn all values of a head", f"{rotated} of them")
    width, shared = (_rows_of(header, f"ffn_gate_{end}.weight") for end in ("exps", "shexp"))
    constants = {
        "head_dim": head_dim,
        "use_bias": "attn_q.bias" in parts,
        "moe_layer_start_index": header.value("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": shared // max(1, width),
    }
    fields = {
        **_COMMON,
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    }
    own = {**_GATED, "exp_probs_b": f"mlp.moe_statics.{CORRECTION}"}
    return Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", own, _SIZES, constants, fields)


def minimax_m2(header: GgufHeader) -> Architecture:
    """The row of a file of MiniMax-M2."""
    head_dim = _head_dim(header)
    _require_sigmoid(header, otherwise=None)
    own = {
        **ATTENTION,
        **HEAD_NORMS,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": f"block_sparse_moe.{CORRECTION}",
        **MIXTRAL_EXPERTS,
    }
    return Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        own,
        {"intermediate_size": EXPERT_WIDTH},
        {"head_dim": head_dim},
        {
            **_COMMON,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        rotated=_rotated(header, head_dim),
    )


def deepseek2(header: GgufHeader) -> Architecture:
    """The row of a file of DeepSeek-V2 or V3, Kimi-K2, or GLM-4.7-Flash."""
    value, parts = header.value, {name.partition(".")[0] for name in header.parts}
    # files of GLM-4.7-Flash may not say it, but have a correction, as no softmax has
    otherwise = _SIGMOID if "exp_probs_b" in parts else _SOFTMAX
    gating = value("expert_gating_func", otherwise)
    is_normed = bool(value("expert_weights_norm", False))
    if gating not in (_SOFTMAX, _SIGMOID) or (gating == _SOFTMAX and is_normed):
        found = f"expert_gating_func {clipped(gating)}, expert_weights_norm {is_normed}"
        header.unsupported("a softmax whose weights are not normalised, or a sigmoid", found)
    if temperature := value("attention.temperature_scale", 0.0):
        header.unsupported("no attention.temperature_scale", clipped(temperature))
    _require_scaling(header)
    apart = parts & {"attn_kv_b", "attn_k_b", "attn_v_b"}
    if apart not in ({"attn_kv_b"}, {"attn_k_b", "attn_v_b"}):
        found = ", ".join(sorted(apart)) or "none"
        header.refuse("either attn_kv_b, or attn_k_b and attn_v_b", found)
    width, of_values = (
        value(f"attention.{end}_length_mla", value(f"attention.{end}_length"))
        for end in ("key", "value")
    )
    rotated = value("rope.dimension_count", 0)
    if not all(type(size) is int for size in (width, of_values, rotated)) or width <= rotated:
        keys = "deepseek2.attention.key_length and value_length beyond rope.dimension_count"
        header.refuse(keys, clipped([width, of_values, rotated]))
    constants = {
        "num_key_value_heads": value("attention.head_count"),
        "q_lora_rank": value("attention.q_lora_rank") if "attn_q_a" in parts else None,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": of_values,
        **_choice_of_groups(header),
    }
    own = {
        **_GATED,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": _HEADS[0],
        "attn_v_b": _HEADS[1],
    }
    if gating == _SIGMOID:
        own["exp_probs_b"] = f"mlp.gate.{CORRECTION}"
        constants |= {"rope_interleave": True, "num_mtp_layers": 0}
    else:
        is_grouped = constants["n_group"] != 1
        constants["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    fields = {
        **_ROUTED,
        "first_k_dense_replace": "leading_dense_block_count",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
    }
    del fields["num_key_value_heads"]
    kind = "3" if gating == _SIGMOID else "2"
    row = (f"deepseek_v{kind}", f"DeepseekV{kind}ForCausalLM", own, _SIZES, constants, fields)
    return Architecture(*row, rope=_yarn(value), conversions=_joined_heads)


def qwen35moe(header: GgufHeader) -> Architecture:
    """The row of a file of Qwen3.5 or 3.6."""
    row = _linear_attention(header, "qwen35moe")
    num_keys, num_values = (header.value(f"ssm.{e}") for e in ("group_count", "time_step_rank"))
    width = row.constants["linear_value_head_dim"]
    heads = functools.partial(_of_one_key, num_keys=num_keys, num_values=num_values)
    of_values = functools.partial(heads, begin=2 * num_keys * header.value("ssm.state_size"))
    moved = ValueChange(heads, moves_rows=True)
    parts = {
        **row.parts,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    }
    changes = {
        **row.changes,
        parts["attn_qkv"]: ValueChange(of_values, moves_rows=True),
        **{parts[own]: moved for own in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")},
        parts["ssm_a"]: ValueChange(lambda decay: heads(_logarithm(decay))),
        parts["ssm_conv1d"]: ValueChange(of_values, shape=_of_convolution),
        parts["ssm_out"]: ValueChange(lambda out: heads(out.T).T.contiguous(), moved_columns=width),
    }
    return replace(row, parts=parts, changes=changes)


def qwen3next(header: GgufHeader) -> Architecture:
    """The row of a file of Qwen3-Next."""
    row = _linear_attention(header, "qwen3next")
    names = {tensor.name.removesuffix(".weight") for tensor in header.tensors}
    projections = ["attn_qkv", "attn_gate"]
    is_split = not any(name.endswith(".ssm_in") for name in names)
    expected = projections if is_split else ["ssm_in"]
    for layer, kind in enumerate(row.constants["layer_types"]):
        found = [part for part in (*projections, "ssm_in") if f"blk.{layer}.{part}" in names]
        if kind == "linear_attention" and found != expected:
            wanted = f"blk.{layer}.ssm_in as in other layers, or attn_qkv and attn_gate in all"
            header.refuse(wanted, " and ".join(found) or "none")
    return replace(
        row,
        model_type="qwen3_next",
        model_class="Qwen3NextForCausalLM",
        parts={
            **row.parts,
            "attn_qkv": "linear_attn.in_proj_qkvz.qkv",
            "attn_gate": "linear_attn.in_proj_qkvz.z",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        constants={**row.constants, "norm_topk_prob": True, "decoder_sparse_step": 1},
        adapt=_split_projections if is_split else row.adapt,
    )


def _rows_of(header: GgufHeader, name: str) -> int:
    """Rows of the matrices of this name; 0 where there are none."""
    tensor = header.parts.get(name)
    return 0 if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]


def _head_dim(header: GgufHeader) -> int:
    """Values of a head: all of the queries' by how many heads there are."""
    rows, heads = _rows_of(header, "attn_q.weight"), header.value("attention.head_count")
    if type(heads) is not int or heads < 1 or not rows or rows % heads:
        header.refuse("a matrix attn_q with as many rows for each head", clipped(heads))
    return rows // heads


def _rotated(header: GgufHeader, head_dim: int) -> float:
    """The share of a head's values that positions turn."""
    turned = header.value("rope.dimension_count", head_dim)
    if type(turned) is not int or not 0 < turned <= head_dim:
        header.refuse(f"rope.dimension_count of 1 to {head_dim}", clipped(turned))
    return turned / head_dim


def _require_sigmoid(header: GgufHeader, otherwise: int | None) -> None:
    """Refuses other gates; `otherwise` is what a file has that does not say it."""
    gating = header.value("expert_gating_func", otherwise)
    if gating != _SIGMOID:
        header.unsupported(f"expert_gating_func {_SIGMOID}, a sigmoid", clipped(gating))


def _choice_of_groups(header: GgufHeader) -> dict[str, Any]:
    """Settings of gates that choose groups of experts first."""
    value = header.value
    return {
        "routed_scaling_factor": value("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(value("expert_weights_norm", False)),
        "n_group": value("expert_group_count", 1),
        "topk_group": value("expert_group_used_count", 1),
    }


_HEADS = ("self_attn.k_b_proj", "self_attn.v_b_proj")
"""Parts of `kv_b_proj`: `[heads, rank, width]` of keys, `[heads, width, rank]` of values."""


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

    sources = [f"{name}.weight" for name in _HEADS]
    return [private.WeightConverter(sources, "self_attn.kv_b_proj.weight", [OfHeads(1)])]


def _require_scaling(header: GgufHeader) -> None:
    """Refuses extended positions of which only llama.cpp scales the softmax."""
    lead = "rope.scaling."
    kind, scale = header.value(f"{lead}type", "linear"), header.value(f"{lead}attn_factor", 1.0)
    factor = header.value(f"{lead}factor", header.value("rope.scale_linear", 1.0))
    multiplier = header.value(f"{lead}yarn_log_multiplier", 0.0)
    if kind == "linear" and factor != 1:
        header.unsupported(f"{lead}type yarn or none", f"linear by {clipped(factor)}")
    if type(multiplier) is not float or (kind == "yarn" and not multiplier):
        header.unsupported(f"{lead}yarn_log_multiplier, a real number", clipped(multiplier))
    if scale != 1:
        header.unsupported(f"{lead}attn_factor 1", clipped(scale))


def _yarn(value: Any) -> Mapping[str, Any]:
    """Settings of extended positions: files have the scale of the softmax as a tenth of it."""
    named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {setting: value(f"rope.scaling.{key}") for setting, key in named.items()}
    scale = round(10 * value("rope.scaling.yarn_log_multiplier", 0.0), 6)
    found = {setting: number for setting, number in given.items() if number is not None}
    return {"attention_factor": 1.0, "mscale": scale, "mscale_all_dim": scale, **found}


def _linear_attention(header: GgufHeader, name: str) -> Architecture:
    """What `qwen3next` and `qwen35moe` have in common."""

    def size(key: str) -> int:
        found = header.value(key)
        if type(found) is not int or found < 1:
            header.refuse(f"{name}.{key} of at least 1 among its metadata", clipped(found))
        return found

    num_keys, num_values = size("ssm.group_count"), size("ssm.time_step_rank")
    _, all_widths = size("ssm.state_size"), size("ssm.inner_size")
    if num_values % num_keys or all_widths % num_values:
        expected = "ssm.inner_size in whole heads, ssm.time_step_rank, for each of ssm.group_count"
        header.refuse(expected, clipped([all_widths, num_values, num_keys]))
    head_dim, rotated = size("attention.key_length"), size("rope.dimension_count")
    if rotated > head_dim or rotated % 2:
        header.refuse(f"an even rope.dimension_count up to {head_dim}", clipped(rotated))
    linear = {tensor.name for tensor in header.tensors if tensor.name.endswith(".ssm_a")}
    num_layers = num_layers_of(header) or size("block_count")
    if num_layers > len(header.tensors):
        header.refuse("no more than as many layers as it has tensors", clipped(num_layers))
    kinds = ("full_attention", "linear_attention")
    layer_types = [kinds[f"blk.{i}.ssm_a" in linear] for i in range(num_layers)]
    if kinds[0] not in layer_types:
        header.refuse(f"full attention in one of {num_layers} layers", "ssm_a in each")
    parts = {
        **{own: part for own, part in ATTENTION.items() if own != "ffn_norm"},
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": DT_BIAS,
        "ssm_a": A_LOG,
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ffn_gate_inp": "mlp.gate",
        **EXPERTS,
        **SHARED_EXPERT,
    }
    norms = ["model.norm", *(parts[n] for n in ("attn_norm", "post_attention_norm", *HEAD_NORMS))]
    return Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        parts,
        {
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("ffn_gate_shexp", -2),
        },
        {"linear_value_head_dim": all_widths // num_values, "layer_types": layer_types},
        {
            **FIELDS,
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": "ssm.time_step_rank",
            "head_dim": "attention.key_length",
        },
        rotated=rotated / head_dim,
        changes={
            **dict.fromkeys(norms, ValueChange(lambda weight: weight.float() - 1)),
            A_LOG: ValueChange(_logarithm),
            parts["ssm_conv1d"]: ValueChange(lambda weight: weight, shape=_of_convolution),
        },
    )


def _of_one_key(rows: Tensor, *, num_keys: int, num_values: int, begin: int = 0) -> Tensor:
    """Rows of value heads, from `begin` on, with those of one key side by side."""
    if (len(rows) - begin) % num_values:
        return rows
    in_file = rows[begin:].unflatten(0, (num_values // num_keys, num_keys, -1))
    moved = rows.clone()
    moved[begin:] = in_file.transpose(0, 1).flatten(0, 2)
    return moved


def _of_convolution(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:1], 1, *sizes[1:])


def _logarithm(decay: Tensor) -> Tensor:
    return decay.float().neg().log()


class SplitProjection(nn.Module):
    """`in_proj_qkvz` as two projections: of queries, keys and values of all heads, and of gates.

    What it gives is in the order of transformers, one key head after the other.
    """

    def __init__(self, attention: Any) -> None:
        """Takes the sizes of a layer of linear attention."""
        super().__init__()
        dim = attention.hidden_size
        self.num_keys = attention.num_k_heads
        self.widths = (attention.key_dim, attention.key_dim, attention.value_dim)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.z = nn.Linear(dim, attention.value_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., 2 * keys + 2 * values]`."""
        parts = (*self.qkv(x).split(self.widths, -1), self.z(x))
        heads = [part.unflatten(-1, (self.num_keys, -1)) for part in parts]
        return torch.cat(heads, -1).flatten(-2)


def _split_projections(model: PreTrainedModel) -> None:
    for module in list(model.modules()):
        if hasattr(module, "in_proj_qkvz"):
            module.in_proj_qkvz = SplitProjection(module)
