"""Qwen3-Next's and Qwen3.5's files as llama.cpp's converter writes them: values that it changes,
and metadata."""

from __future__ import annotations

from typing import Any

import torch
from moe_families import Family

_SIZES = {
    **{"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 4},
    **{"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SECTIONS = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
LINEAR = Family(
    "qwen3_5_moe", "Qwen3_5MoeForCausalLM", _SIZES | {"rope_parameters": _POSITIONS | _SECTIONS}
)
NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _SIZES | {"rope_parameters": _POSITIONS, "norm_topk_prob": True},
)


def as_in_files(
    tensors: dict[str, torch.Tensor], config: Any, *, is_split: bool
) -> dict[str, torch.Tensor]:
    """Weights by the names that llama.cpp's converter maps, as it writes them."""
    found = {}
    for name, tensor in (_apart(tensors, config) if is_split else tensors).items():
        part = name.rpartition("linear_attn.")[2]
        if part == "A_log":
            tensor = -tensor.exp()
        elif part == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
        elif part == "conv1d.weight":
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and part == name:
            tensor = tensor + 1
        found[name] = _reordered(part, tensor, config, to_file=True)
    return found


def as_in_models(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The way back."""
    found = {}
    for name, tensor in _together(tensors, config).items():
        name = name.replace("dt_proj.bias", "dt_bias")
        part = name.rpartition("linear_attn.")[2]
        tensor = _reordered(part, tensor, config, to_file=False)
        if part == "A_log":
            tensor = (-tensor).log()
        elif part == "conv1d.weight":
            tensor = tensor.unsqueeze(1)
        elif name.endswith("norm.weight") and part == name:
            tensor = tensor - 1
        found[name] = tensor.contiguous()
    return found


def _reordered(part: str, tensor: torch.Tensor, config: Any, *, to_file: bool) -> torch.Tensor:
    """Qwen3.5's value heads by their place among those of a key first, or by the key first."""
    if config.model_type == "qwen3_next":
        return tensor
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    begin = 2 * keys * config.linear_key_head_dim
    dim = {"out_proj.weight": 1}.get(part, 0)
    first = {"in_proj_qkv.weight": begin, "conv1d.weight": begin}.get(part, 0)
    moved = ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias", "dt_proj", "out_proj")
    if not first and not part.startswith(moved):
        return tensor
    shape = (keys, values // keys) if to_file else (values // keys, keys)
    kept, rest = tensor.split([first, tensor.shape[dim] - first], dim)
    rows = rest.unflatten(dim, (*shape, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat((kept, rows), dim)


def _apart(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Qwen3-Next's `in_proj_qkvz` as two matrices: all queries, keys and values, and all gates."""
    found = {}
    for name, tensor in tensors.items():
        if "in_proj_qkvz" not in name:
            found[name] = tensor
            continue
        *qkv, gates = map(torch.cat, zip(*_of_keys(tensor, config), strict=True))
        found[name.replace("qkvz", "qkv")] = torch.cat(qkv)
        found[name.replace("qkvz", "z")] = gates
    return found


def _together(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The way back: every row goes where `_apart` took it from."""
    if config.model_type != "qwen3_next":
        return tensors
    found = {}
    for name, tensor in tensors.items():
        if "in_proj_qkv." in name:
            both = torch.cat((tensor, tensors[name.replace("qkv", "z")]))
            places = torch.arange(len(both))
            parts = zip(*_of_keys(places, config), strict=True)
            whole = torch.empty_like(both)
            whole[torch.cat([row for part in parts for row in part])] = both
            found[name.replace("qkv", "qkvz")] = whole
        elif "in_proj_z." not in name:
            found[name] = tensor
    return found


def _of_keys(rows: torch.Tensor, config: Any) -> list[tuple[torch.Tensor, ...]]:
    """Rows of queries, keys, values and gates of each key's head."""
    keys = config.linear_num_key_heads
    width = config.linear_key_head_dim
    of_values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    return [head.split([width, width, of_values, of_values]) for head in rows.chunk(keys)]


def add_linear_attention(writer: Any, config: Any) -> None:
    """The metadata of a model."""
    positions = config.rope_parameters
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(positions["partial_rotary_factor"] * config.head_dim))
    if "mrope_section" in positions:
        writer.add_rope_dimension_sections([*positions["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 4)
    writer.add_expert_count(config.num_experts)
