"""The pocket model's architecture and its dense twin."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 4096
CONTEXT = 512
NUM_EXPERTS = 16
TOP_K = 2
# One expert: 3 * 256 * 128 bf16 numbers = 192 KiB, 48 pages of 4 KiB.
EXPERT_HIDDEN = 128
AUX_LOSS_COEF = 0.01


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
