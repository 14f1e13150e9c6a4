"""Small language models of every architecture that leaves as a Hugging Face checkpoint."""

from typing import Any

import torch

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel

VOCAB = 67


def shape(**changes: Any) -> LanguageModelConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "max_positions": 40,
        "vocab_size": VOCAB,
        "init_std": 0.1,
        "rope_theta": 500.0,
    }
    return LanguageModelConfig(**(sizes | changes))


def experts(**changes: Any) -> ExpertsConfig:
    sizes: dict[str, Any] = {"num_experts": 8, "top_k": 3, "intermediate_size": 20}
    return ExpertsConfig(**(sizes | changes))


def build(config: LanguageModelConfig, *, seed: int = 0) -> LanguageModel:
    """A model none of whose parameters and buffers has its initial value by chance."""
    torch.manual_seed(seed)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(std=0.3)
    return model


# Family and changes of the shape, by a word on the case.
EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"intermediate_size": 30}),
    "untied": ("qwen3_moe", {"moe": experts(), "tie_embeddings": False}),
    "renormalised after": ("qwen3_moe", {"moe": experts(gate_options={"softmax": "after"})}),
    "not renormalised, a dense layer": (
        "qwen3_moe",
        {
            "moe": experts(gate_options={"renormalize": False}),
            "dense_layers": (1,),
            "intermediate_size": 30,
        },
    ),
    "sigmoid, shared": ("glm4_moe", {"moe": experts(gate="sigmoid_topk", shared_experts=2)}),
    "groups, bias, scale, a dense layer": (
        "glm4_moe",
        {
            "moe": experts(
                gate="group_limited_topk",
                gate_options={"num_expert_groups": 4, "num_limited_groups": 2, "scale": 2.5},
            ),
            "dense_layers": (0,),
            "intermediate_size": 30,
            "tie_embeddings": False,
        },
    ),
}
