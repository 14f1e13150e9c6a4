"""What GGUF files of DeepSeek have that others have not, as llama.cpp's converter writes it.

Keys and values of each head apart, the former transposed; the metadata of both ways.
"""

from __future__ import annotations

from typing import Any

import gguf
from torch import Tensor, cat

NUM_HEADS, KEY_ROWS = 4, 32


def heads_apart(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """`kv_b_proj` as two stacks."""
    found = {}
    for name, tensor in stored.items():
        if "kv_b_proj" in name:
            heads = tensor.unflatten(0, (NUM_HEADS, -1))
            keys, values = heads[:, :KEY_ROWS].transpose(1, 2), heads[:, KEY_ROWS:]
            found[name.replace("kv_b", "k_b")] = keys.contiguous()
            found[name.replace("kv_b", "v_b")] = values.contiguous()
        else:
            found[name] = tensor
    return found


def heads_together(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `heads_apart` took apart."""
    found = {}
    for name, tensor in values.items():
        if ".k_b_proj" in name:
            whole = cat((tensor.transpose(1, 2), values[name.replace("k_b", "v_b")]), dim=1)
            found[name.replace("k_b", "kv_b")] = whole.flatten(0, 1).contiguous()
        elif ".v_b_proj" not in name:
            found[name] = tensor
    return found


def add_latent_attention(writer: Any, config: Any) -> None:
    """The metadata of a model: with the widths of compressed heads where these lie apart."""
    is_sigmoid = config.model_type == "deepseek_v3"
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if is_sigmoid:
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_key_length(width)
        writer.add_value_length(config.v_head_dim)
    positions = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(positions["factor"])
    writer.add_rope_scaling_orig_ctx_len(positions["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * positions["mscale_all_dim"])
