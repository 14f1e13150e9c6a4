"""Attention layers, the usual ones and others that look like them, each as a model of one layer."""

import math
from typing import Any

import torch
from transformers import GptOssConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTERED
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    apply_rotary_pos_emb,
)

ALL_ATTENTION_FUNCTIONS: Any = REGISTERED
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 1,
}


class Turned(Qwen3MoeAttention):
    """As its parent; a class of the tests whose ``forward`` can be varied."""

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask,
        past_key_values=None,
        **kwargs,
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        mixed, others = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), others


class WithoutRotation(Turned):
    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        mixed, others = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), others


class LongerIsSofter(Turned):
    """Depends on the length of the cache: no comparison at one length could show it."""

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if past_key_values is not None:
            length = past_key_values.get_seq_length(self.layer_idx)
            hidden_states = hidden_states * (1 if length < 100 else math.log(length))
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )


class AsksForPositions(Turned):
    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask,
        past_key_values=None,
        position_ids=None,
        **kwargs,
    ):
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )


class LooksIntoTheCache(Turned):
    """And would do as its parent does if it could not: errors alone do not show it."""

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        scale = 0.5 if hasattr(past_key_values, "layers") else 1
        arguments = (position_embeddings, attention_mask, past_key_values)
        return Turned.forward(self, hidden_states * scale, *arguments, **kwargs)


class IgnoresTheMask(Turned):
    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        arguments = (position_embeddings, None, past_key_values)
        return Turned.forward(self, hidden_states, *arguments, **kwargs)


class HasAFactor(Turned):
    """A tensor of its own, which may be another one in the next step."""

    factor = torch.tensor(1.0)

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        arguments = (position_embeddings, attention_mask, past_key_values)
        return Turned.forward(self, hidden_states * self.factor, *arguments, **kwargs)


class UsesPositions(Turned):
    """Where it is told positions."""

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        position = kwargs.get("position_ids")
        scale = 1 if position is None else position
        arguments = (position_embeddings, attention_mask, past_key_values)
        return Turned.forward(self, hidden_states * scale, *arguments, **kwargs)


LAYERS: dict[str, Any] = {
    "olmoe": (OlmoeAttention, OlmoeConfig),
    "qwen2": (Qwen2MoeAttention, Qwen2MoeConfig),
    "qwen3": (Qwen3MoeAttention, Qwen3MoeConfig),
    "gpt_oss": (GptOssAttention, GptOssConfig),
    "clipped": (OlmoeAttention, OlmoeConfig),
    "turned": (Turned, Qwen3MoeConfig),
    "without rotation": (WithoutRotation, Qwen3MoeConfig),
    "longer is softer": (LongerIsSofter, Qwen3MoeConfig),
    "asks for positions": (AsksForPositions, Qwen3MoeConfig),
    "looks into the cache": (LooksIntoTheCache, Qwen3MoeConfig),
    "ignores the mask": (IgnoresTheMask, Qwen3MoeConfig),
    "has a factor": (HasAFactor, Qwen3MoeConfig),
    "uses positions": (UsesPositions, Qwen3MoeConfig),
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
        self.config = config(**sizes)
        self.config._attn_implementation = "eager" if kind == "gpt_oss" else "sdpa"
        self.layer: Any = layer(self.config, layer_idx=0)
        # gpt-oss has an angle once for the two values of a pair
        self.num_angles = self.layer.head_dim // (2 if kind == "gpt_oss" else 1)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name
