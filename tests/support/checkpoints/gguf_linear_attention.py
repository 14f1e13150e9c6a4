"""Qwen3.5's files as llama.cpp's converter writes them: values that it changes, and metadata."""

from __future__ import annotations

from typing import Any

import torch
from moe_families import Family

LINEAR = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM",
    {
        **{"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 4},
        **{"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
    },
)


def as_in_files(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Weights by the names that llama.cpp's converter maps, as it writes them."""
    found = {}
    for name, tensor in tensors.items():
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
    for name, tensor in tensors.items():
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
    """Value heads by their place among those of a key first, or by the key first."""
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


def add_linear_attention(writer: Any, config: Any) -> None:
    """The metadata of a model."""
    positions = config.rope_parameters
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(positions["partial_rotary_factor"] * config.head_dim))
    writer.add_rope_dimension_sections([*positions["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32("qwen35moe.full_attention_interval", 4)
    writer.add_expert_count(config.num_experts)
