"""The pocket model's architecture, its dense twin, and a faster experts forward for training.

Shapes: T tokens, D model, F hidden, E experts, K top-k, R routed rows (= T*K).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 4096
CONTEXT = 512
NUM_EXPERTS = 16
TOP_K = 2
# One expert: 3 * 256 * 128 bf16 numbers = 192 KiB, 48 pages of 4 KiB.
EXPERT_HIDDEN = 128
AUX_LOSS_COEF = 0.01

_SORTED_EXPERTS = "pocket_sorted_rows"


def _shared_settings(eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Everything in which the Mixture-of-Experts model and its dense twin agree."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "use_cache": True,
    }


def build_moe(eos_token_id: int, pad_token_id: int) -> "PreTrainedModel":
    """A freshly initialised Qwen3-MoE of pocket size: every layer a mixture, embeddings tied."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_shared_settings(eos_token_id, pad_token_id),
        intermediate_size=TOP_K * EXPERT_HIDDEN,
        moe_intermediate_size=EXPERT_HIDDEN,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=AUX_LOSS_COEF,
    )
    return Qwen3MoeForCausalLM(config)


def build_dense(eos_token_id: int, pad_token_id: int) -> "PreTrainedModel":
    """The dense baseline: the same network with one MLP of the size that the top-k experts have."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_shared_settings(eos_token_id, pad_token_id),
        intermediate_size=TOP_K * EXPERT_HIDDEN,
    )
    return Qwen3ForCausalLM(config)


def active_parameters(model: "PreTrainedModel") -> int:
    """Parameters that one token passes through, embeddings counted once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    )
    return total - routed + routed * TOP_K // NUM_EXPERTS


def use_sorted_experts(model: "PreTrainedModel") -> None:
    """Run the model's experts through `sorted_experts_forward`; for training on a CPU."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_SORTED_EXPERTS, sorted_experts_forward)
    model.config._experts_implementation = _SORTED_EXPERTS


def sorted_experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts over rows sorted by expert: one gather and one scatter in all, not one per expert.

    Args:
        experts: a `transformers` experts module with `gate_up_proj` (E, 2F, D) and `down_proj`
            (E, D, F).
        hidden_states: (T, D).
        top_k_index: (T, K) expert ids.
        top_k_weights: (T, K) gate weights.

    Returns:
        (T, D), the weighted sum of each token's experts.
    """
    num_tokens, top_k = top_k_index.shape
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=NUM_EXPERTS).tolist()
    rows = hidden_states[order // top_k]
    gate_ups = [
        F.linear(part, weight)
        for part, weight in zip(rows.split(counts), experts.gate_up_proj.unbind(), strict=True)
    ]
    gate, up = torch.cat(gate_ups).chunk(2, dim=-1)
    hidden = F.silu(gate) * up
    outputs = torch.cat(
        [
            F.linear(part, weight)
            for part, weight in zip(hidden.split(counts), experts.down_proj.unbind(), strict=True)
        ]
    )
    outputs = outputs * top_k_weights.reshape(-1)[order, None]
    inverse = torch.argsort(order)
    return outputs[inverse].view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)
