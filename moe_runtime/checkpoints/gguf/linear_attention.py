"""GGUF files of ggml's architecture `qwen35moe`: Qwen3.5 and 3.6 with experts.

Three of four layers are of linear attention. Files have their value heads in another order than
transformers: those of the same place within the groups of all keys side by side, not those of one
key; norms have one added to their weights, and decays are numbers, not logarithms.

Source: llama.cpp's converter, and its `qwen35moe` graph.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

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

_PARTS = {
    **{own: name for own, name in ATTENTION.items() if own != "ffn_norm"},
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
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

    def size(key: str) -> int:
        found = header.metadata.get(f"qwen35moe.{key}")
        if type(found) is not int or found < 1:
            refuse(file, f"qwen35moe.{key} of at least 1 among its metadata", clipped(found))
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
    heads = functools.partial(_of_one_key, num_keys=num_keys, num_values=num_values)
    of_values = functools.partial(heads, begin=2 * num_keys * width)
    moved = ValueChange(heads, moves_rows=True)
    return Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _PARTS,
        {
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("ffn_gate_shexp", -2),
        },
        {
            "linear_value_head_dim": all_widths // num_values,
            "layer_types": layer_types,
        },
        {**FIELDS, **_SIZES, "head_dim": "attention.key_length"},
        rotated=rotated / head_dim,
        changes={
            **dict.fromkeys(_NORMS, ValueChange(_less_one)),
            _PARTS["attn_qkv"]: ValueChange(of_values, moves_rows=True),
            **{_PARTS[own]: moved for own in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")},
            _PARTS["ssm_a"]: ValueChange(lambda decay: heads(decay.float().neg().log())),
            _PARTS["ssm_conv1d"]: ValueChange(of_values, shape=_of_convolution),
            _PARTS["ssm_out"]: ValueChange(
                lambda out: heads(out.T).T.contiguous(), moved_columns=all_widths // num_values
            ),
        },
    )


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
