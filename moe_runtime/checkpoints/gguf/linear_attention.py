"""GGUF files of ggml's architectures `qwen3next` and `qwen35moe`: Qwen3-Next, Qwen3.5 and 3.6.

Three of four layers are of linear attention. In both, norms have one added to their weights, and
decays are numbers, not logarithms. Qwen3.5's files have their value heads in another order than
transformers: those of the same place within the groups of all keys side by side, not those of one
key. Qwen3-Next's have the model's order; its projection of queries, keys, values and gates, in
transformers one key head after the other, is two tensors, `attn_qkv` and `attn_gate`, or, in older
files, as it is, `ssm_in`.

Source: llama.cpp's converter, and its `qwen3next` and `qwen35moe` graphs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

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
    from transformers import PreTrainedModel

_PARTS = {
    **{own: name for own, name in ATTENTION.items() if own != "ffn_norm"},
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
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
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
    every = (*_PROJECTIONS, "ssm_in")
    is_split = not any(name.endswith(".ssm_in") for name in names)
    expected = [*_PROJECTIONS] if is_split else ["ssm_in"]
    for layer, kind in enumerate(row.constants["layer_types"]):
        found = [part for part in every if f"blk.{layer}.{part}" in names]
        if kind == "linear_attention" and found != expected:
            wanted = f"blk.{layer}.ssm_in as in other layers, or attn_qkv and attn_gate in all"
            refuse(file, wanted, " and ".join(found) or "none")
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


class _Heads(NamedTuple):
    """How many heads there are, and how wide they are."""

    num_keys: int
    num_values: int
    key_width: int
    value_width: int


def _row(header: GgufHeader, file: Path, name: str) -> tuple[Architecture, _Heads]:
    """What both architectures have, and the heads of linear attention."""

    def size(key: str) -> int:
        found = header.value(key)
        if type(found) is not int or found < 1:
            refuse(file, f"{name}.{key} of at least 1 among its metadata", clipped(found))
        return found

    num_keys, num_values = size("ssm.group_count"), size("ssm.time_step_rank")
    width, all_widths = size("ssm.state_size"), size("ssm.inner_size")
    if num_values % num_keys or all_widths % num_values:
        expected = "ssm.inner_size in whole heads, ssm.time_step_rank, for each of ssm.group_count"
        refuse(file, expected, clipped([all_widths, num_values, num_keys]))
    head_dim, rotated = size("attention.key_length"), size("rope.dimension_count")
    if rotated > head_dim or rotated % 2:
        refuse(file, f"an even rope.dimension_count up to {head_dim}", clipped(rotated))
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
