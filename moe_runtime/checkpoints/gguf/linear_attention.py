"""GGUF files of ggml's architectures `qwen3next` and `qwen35moe`: Qwen3-Next, Qwen3.5 and 3.6.

Three of four layers are of linear attention. In both, norms have one added to their weights, and
decays are numbers, not logarithms. Qwen3.5's files have their value heads in another order than
transformers: those of the same place within the groups of all keys side by side, not those of one
key. Qwen3-Next's have the model's order; its projection of queries, keys, values and gates, in
transformers one key head after the other, is two tensors, `attn_qkv` and `attn_gate`, or, until the
year 2026, as it is, `ssm_in`.

Source: llama.cpp's converter, and its `qwen3next` and `qwen35moe` graphs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.gguf.architectures import (
    A_LOG,
    ATTENTION,
    DT_BIAS,
    EXPERT_WIDTH,
    EXPERTS,
    FIELDS,
    HEAD_NORMS,
    SHARED_EXPERT,
    Architecture,
    ValueChange,
    num_layers_of,
    refuse,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped

if TYPE_CHECKING:
    from torch import Tensor

    from moe_runtime.checkpoints.transformers_private import WeightTransform

_PARTS = {
    **{own: name for own, name in ATTENTION.items() if own != "ffn_norm"},
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": DT_BIAS,
    "ssm_a": A_LOG,
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    **EXPERTS,
    **SHARED_EXPERT,
}
_NORMS = ("model.norm", *(_PARTS[own] for own in ("attn_norm", "post_attention_norm", *HEAD_NORMS)))
_PROJECTIONS = ("attn_qkv", "attn_gate")
_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}


def qwen35moe(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file.

    Raises:
        CheckpointError: sizes are missing, or are none.
    """
    row, sizes = _row(header, file, "qwen35moe")
    heads = functools.partial(_of_one_key, num_keys=sizes.num_keys, num_values=sizes.num_values)
    of_values = functools.partial(heads, begin=2 * sizes.num_keys * sizes.key_width)
    moved = ValueChange(heads, moves_rows=True)
    parts = {
        **row.parts,
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    }
    return replace(
        row,
        parts=parts,
        changes={
            **row.changes,
            parts["attn_qkv"]: ValueChange(of_values, moves_rows=True),
            **{parts[own]: moved for own in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")},
            parts["ssm_a"]: ValueChange(lambda decay: heads(_logarithm(decay))),
            parts["ssm_conv1d"]: ValueChange(of_values, shape=_of_convolution),
            parts["ssm_out"]: ValueChange(
                lambda out: heads(out.T).T.contiguous(), moved_columns=sizes.value_width
            ),
        },
    )


def qwen3next(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file.

    Raises:
        CheckpointError: sizes are missing, or are none.
    """
    row, _ = _row(header, file, "qwen3next")
    names = {tensor.name.removesuffix(".weight") for tensor in header.tensors}
    for layer, kind in enumerate(row.constants["layer_types"]):
        block = f"blk.{layer}."
        found = [part for part in (*_PROJECTIONS, "ssm_in") if block + part in names]
        if kind == "linear_attention" and found not in ([*_PROJECTIONS], ["ssm_in"]):
            refuse(file, f"{block}ssm_in, or attn_qkv and attn_gate", ", ".join(found) or "none")
    return replace(
        row,
        model_type="qwen3_next",
        model_class="Qwen3NextForCausalLM",
        parts={
            **row.parts,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        constants={**row.constants, "norm_topk_prob": True, "decoder_sparse_step": 1},
        conversions=_joined_projections,
    )


class _Heads(NamedTuple):
    """How many heads there are, and how wide they are."""

    num_keys: int
    num_values: int
    key_width: int
    value_width: int


def _row(header: GgufHeader, file: Path, name: str) -> tuple[Architecture, _Heads]:
    """What both architectures have, and the heads of linear attention."""

    def size(key: str) -> int:
        found = header.metadata.get(f"{name}.{key}")
        if type(found) is not int or found < 1:
            refuse(file, f"{name}.{key} of at least 1 among its metadata", clipped(found))
        return found

    num_keys, num_values = size("ssm.group_count"), size("ssm.time_step_rank")
    width, all_widths = size("ssm.state_size"), size("ssm.inner_size")
    if num_values % num_keys or all_widths % num_values:
        expected = "ssm.inner_size in whole heads, ssm.time_step_rank, for each of ssm.group_count"
        refuse(file, expected, clipped([all_widths, num_values, num_keys]))
    head_dim, rotated = size("attention.key_length"), size("rope.dimension_count")
    if rotated > head_dim:
        refuse(file, f"rope.dimension_count of 1 to {head_dim}", clipped(rotated))
    linear = {tensor.name for tensor in header.tensors if tensor.name.endswith(".ssm_a")}
    num_layers = num_layers_of(header) or size("block_count")
    if num_layers > len(header.tensors):
        refuse(file, "no more than as many layers as it has tensors", clipped(num_layers))
    kinds = ("full_attention", "linear_attention")
    layer_types = [kinds[f"blk.{i}.ssm_a" in linear] for i in range(num_layers)]
    if kinds[0] not in layer_types:
        refuse(file, f"full attention in one of {num_layers} layers", "ssm_a in each")
    heads = _Heads(num_keys, num_values, width, all_widths // num_values)
    row = Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _PARTS,
        {
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("ffn_gate_shexp", -2),
        },
        {"linear_value_head_dim": heads.value_width, "layer_types": layer_types},
        {**FIELDS, **_SIZES, "head_dim": "attention.key_length"},
        rotated=rotated / head_dim,
        changes={
            **dict.fromkeys(_NORMS, ValueChange(_less_one)),
            _PARTS["ssm_a"]: ValueChange(_logarithm),
            _PARTS["ssm_conv1d"]: ValueChange(lambda weight: weight, shape=_of_convolution),
        },
    )
    return row, heads


def _of_one_key(rows: Tensor, *, num_keys: int, num_values: int, begin: int = 0) -> Tensor:
    """Rows of value heads, from `begin` on, with those of one key side by side.

    A damaged file's, which are no whole heads, stay as they are: the model refuses their number.
    """
    if (len(rows) - begin) % num_values:
        return rows
    in_file = rows[begin:].unflatten(0, (num_values // num_keys, num_keys, -1))
    moved = rows.clone()
    moved[begin:] = in_file.transpose(0, 1).flatten(0, 2)
    return moved


def _of_convolution(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:1], 1, *sizes[1:])


def _less_one(weight: Tensor) -> Tensor:
    return weight.float() - 1


def _logarithm(decay: Tensor) -> Tensor:
    return decay.float().neg().log()


def _joined_projections() -> list[WeightTransform]:
    """Queries, keys, values and gates of each key head together, as `in_proj_qkvz` has them."""

    class OfKeyHeads(private.Concatenate):
        """Joins the rows of each key head."""

        def convert(
            self, input_dict: Any, source_patterns: Any, target_patterns: Any, **named: Any
        ) -> Any:
            config = named["config"].get_text_config()
            qkv, z = (
                tensors[0] if isinstance(tensors := input_dict[name], list) else tensors
                for name in source_patterns
            )
            num_keys = config.linear_num_key_heads
            keys = num_keys * config.linear_key_head_dim
            parts = [*qkv.split([keys, keys, len(qkv) - 2 * keys]), z]
            heads = [part.unflatten(0, (num_keys, -1)) for part in parts]
            return {target_patterns[0]: torch.cat(heads, 1).flatten(0, 1)}

    sources = [f"{_PARTS[own]}.weight" for own in _PROJECTIONS]
    target = "linear_attn.in_proj_qkvz.weight"
    return [private.WeightConverter(sources, target, [OfKeyHeads(0)])]
