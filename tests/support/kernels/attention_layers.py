"""Attention layers, the usual ones and others that look like them, each as a model of one layer."""

from typing import Any

import torch
from transformers import ExaoneMoeConfig, GptOssConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 1,
}


class Own(Qwen3MoeAttention):
    """A class of a program, which computes as its parent does."""


LAYERS: dict[str, Any] = {
    "olmoe": (OlmoeAttention, OlmoeConfig),
    "qwen2": (Qwen2MoeAttention, Qwen2MoeConfig),
    "qwen3": (Qwen3MoeAttention, Qwen3MoeConfig),
    "gpt_oss": (GptOssAttention, GptOssConfig),
    "clipped": (OlmoeAttention, OlmoeConfig),
    "own": (Own, Qwen3MoeConfig),
    "without angles": (ExaoneMoeAttention, ExaoneMoeConfig),
}


class Model(torch.nn.Module):
    """A model that is one attention layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer, config = LAYERS[kind]
        sizes = dict(SIZES)
        if config is not Qwen3MoeConfig:
            sizes["head_dim"] = 12
        if kind == "clipped":
            sizes["clip_qkv"] = 5.0
        if kind == "without angles":
            sizes |= {"sliding_window": 8, "layer_types": ["full_attention"]}
        self.config = config(**sizes)
        self.config._attn_implementation = "eager" if kind == "gpt_oss" else "sdpa"
        self.layer: Any = layer(self.config, layer_idx=0)
        # gpt-oss has an angle once for the two values of a pair
        self.num_angles = self.layer.head_dim // (2 if kind == "gpt_oss" else 1)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name
