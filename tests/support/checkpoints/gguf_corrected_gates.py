"""Families whose gates add a correction to scores as they choose, and metadata of their files."""

from __future__ import annotations

from typing import Any

import gguf
from moe_families import Family

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32}


def turned(share: float) -> dict[str, Any]:
    """Positions that turn a share of a head's values."""
    positions = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    return {"rope_parameters": positions}


CORRECTED = {
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        SIZES
        | turned(0.5)
        | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2}
        | {"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", SIZES | {"moe_num_shared_experts": 2}
    ),
    "minimax-m2": Family("minimax_m2", "MiniMaxM2ForCausalLM", SIZES | turned(0.5)),
}
"""By ggml's name of the architecture."""


def add_corrected_gates(writer: Any, config: Any) -> None:
    """The metadata of a model, as llama.cpp's converter writes them."""
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        shared = config.moe_num_shared_experts
        writer.add_expert_shared_count(shared)
        writer.add_expert_shared_feed_forward_length(shared * config.moe_intermediate_size)
        return
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * head_dim))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "minimax_m2":
        writer.add_expert_count(config.num_local_experts)
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    if config.model_type == "glm4_moe":
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
