"""Which Hugging Face architecture computes the same as a model of ours, and its configuration.

Three have our blocks: Qwen3 (no experts), Qwen3-MoE (softmax gate) and GLM-4-MoE (sigmoid gate,
selection bias, expert groups, shared experts).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.routing import Gate, GroupLimitedTopK, SigmoidTopK, SoftmaxTopK, make_gate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Family = Literal["qwen3", "qwen3_moe", "glm4_moe"]


def hugging_face_family(config: LanguageModelConfig) -> Family:
    """The architecture that computes the same."""
    if config.moe is None:
        return "qwen3"
    gate = _gate(config, config.moe)
    family: Family = "qwen3_moe" if type(gate) is SoftmaxTopK else "glm4_moe"
    obstacles = list(_obstacles(config, config.moe, gate))
    if obstacles:
        raise UnsupportedModelError(
            f"no Hugging Face architecture expresses this model ({family} is the nearest): "
            f"{'; '.join(obstacles)}"
        )
    return family


def hugging_face_config(
    config: LanguageModelConfig, special_tokens: Mapping[str, int | None], dtype: torch.dtype
) -> "PreTrainedConfig":
    """The configuration under which `transformers` builds the same model."""
    from transformers import Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

    family = hugging_face_family(config)
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        },
        **special_tokens,
    }
    if config.intermediate_size is not None:
        common["intermediate_size"] = config.intermediate_size
    if config.moe is None:
        return Qwen3Config(**common)
    # The others want a width even where no layer is dense.
    common.setdefault("intermediate_size", config.moe.top_k * config.moe.intermediate_size)
    common |= {
        "moe_intermediate_size": config.moe.intermediate_size,
        "num_experts_per_tok": config.moe.top_k,
    }
    gate = _gate(config, config.moe)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**common, **_qwen3_moe(config, config.moe, gate))
    return Glm4MoeConfig(**common, **_glm4_moe(config, config.moe, gate))


def _gate(config: LanguageModelConfig, moe: ExpertsConfig) -> Gate:
    """A gate of the model's kind, to read its settings from."""
    return make_gate(moe.gate, config.hidden_size, moe.num_experts, moe.top_k, **moe.gate_options)


def _obstacles(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> Iterator[str]:
    """What the nearest architecture cannot express."""
    if moe.activation != "swiglu":
        yield f"its experts compute swiglu, not {moe.activation}"
    if moe.zero_experts is not None:
        yield "it has no zero-computation experts (zero_experts)"
    if moe.bias:
        yield "its experts have no biases"
    if moe.shortcut is not None:
        yield "its experts read their own block's representation (shortcut)"
    if moe.capacity_factor is not None or gate.capacity is not None:
        yield "it never drops tokens, so capacity_factor must be omitted"
    if moe.shared_expert_gate:
        yield "its shared experts have no gate (shared_expert_gate)"
    if type(gate) is SoftmaxTopK:
        if gate.bias_update_rate:
            yield "its softmax gate has no selection bias (use sigmoid_topk)"
        if gate.scale != 1.0:
            yield "its gate has no scale"
        if moe.shared_experts:
            yield "it has no shared experts (use sigmoid_topk)"
        return
    if not isinstance(gate, SigmoidTopK | GroupLimitedTopK):
        yield f"it has no gate {moe.gate!r} (softmax_topk, sigmoid_topk and group_limited_topk are)"
        return
    if isinstance(gate, GroupLimitedTopK):
        if gate.score != "sigmoid":
            yield f"its gate scores with sigmoid, not {gate.score}"
        if gate.group_score_experts != 2 and gate.num_expert_groups > 1:
            yield "its groups are scored by their two best experts (group_score_experts)"
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        yield f"its dense layers are the first ones, not {list(config.dense_layers)}"


def _qwen3_moe(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> dict[str, Any]:
    assert isinstance(gate, SoftmaxTopK)
    return {
        "num_experts": moe.num_experts,
        # Softmax over the chosen scores alone is the same as renormalising.
        "norm_topk_prob": gate.renormalize or gate.softmax == "after",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "router_aux_loss_coef": (moe.loss_weights or {}).get("load_balance", 0.0),
    }


def _glm4_moe(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> dict[str, Any]:
    assert isinstance(gate, SigmoidTopK | GroupLimitedTopK)
    is_grouped = isinstance(gate, GroupLimitedTopK)
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": len(config.dense_layers),
        "norm_topk_prob": gate.renormalize,
        "routed_scaling_factor": gate.scale,
        "n_group": gate.num_expert_groups if is_grouped else 1,
        "topk_group": gate.num_limited_groups if is_grouped else 1,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
