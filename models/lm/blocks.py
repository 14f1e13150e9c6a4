"""The blocks of a language model: attention and feed-forward, dense or routed.

Shapes: B sequences of C tokens, D model width, T = B * C tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.layer import MoELayer, ScMoEBlock, ScMoEParts, SharedExperts
from moe_runtime.layer.activations import activation_named
from moe_runtime.models.lm.attention import Attention, RotaryTable
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.layers import Linear, RMSNorm


class DenseFeedForward(nn.Module):
    """SwiGLU feed-forward of a layer without experts (Shazeer, "GLU Variants", 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward with norms and residual connections."""

    def __init__(self, config: LanguageModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = _feed_forward(config, layer)

    def forward(
        self, x: Tensor, rotary: RotaryTable, token_ids: Tensor, previous_logits: Tensor | None
    ) -> Tensor:
        """`[B, C, D]` to `[B, C, D]`; token ids `[B, C]` are for gates that route by token."""
        x = x + self.attention(self.attention_norm(x), rotary)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MoELayer):
            return x + self.feed_forward(
                normed, token_ids=token_ids, previous_logits=previous_logits
            )
        return x + self.feed_forward(normed)

    @property
    def routed(self) -> MoELayer | None:
        return self.feed_forward if isinstance(self.feed_forward, MoELayer) else None


class ShortcutBlocks(nn.Module):
    """A dense block and one with experts whose routed part reads an earlier representation.

    Counts as two layers; see `ScMoEBlock`.
    """

    def __init__(self, config: LanguageModelConfig, moe: ExpertsConfig, layer: int) -> None:
        super().__init__()
        assert moe.shortcut is not None  # the caller checks it
        assert config.intermediate_size is not None  # the configuration checks it
        settings: dict[str, Any] = {**_layer_settings(moe), "shared_experts": 0}
        self.pair = ScMoEBlock(
            ScMoEParts(
                first_attention=Attention(config),
                mlp=DenseFeedForward(config.hidden_size, config.intermediate_size),
                second_attention=Attention(config),
                shared=SharedExperts(
                    config.hidden_size,
                    moe.shared_experts * moe.intermediate_size,
                    activation=moe.activation,
                    bias=moe.bias,
                ),
                routed=MoELayer(config.hidden_size, name=f"layer {layer + 1}", **settings),
                make_norm=lambda: RMSNorm(config.hidden_size, config.norm_eps),
            ),
            shortcut=moe.shortcut,
        )

    def forward(
        self, x: Tensor, rotary: RotaryTable, token_ids: Tensor, previous_logits: Tensor | None
    ) -> Tensor:
        return self.pair(x, token_ids=token_ids, previous_logits=previous_logits, rotary=rotary)

    @property
    def routed(self) -> MoELayer:
        return self.pair.routed


def check_experts(config: LanguageModelConfig) -> None:
    """Checks the settings of routed layers before anything large is made."""
    if config.moe is None:
        return
    try:
        settings = _layer_settings(config.moe) | {"shared_experts": 0, "experts": nn.Identity()}
        activation_named(config.moe.activation)
        MoELayer(config.hidden_size, name="model.moe", **settings)
    except ValueError as error:
        raise ValueError(f"model.moe: {error}") from None


def make_blocks(config: LanguageModelConfig) -> Iterator[Block | ShortcutBlocks]:
    """The blocks of a model in order."""
    if config.moe is not None and config.moe.shortcut is not None:
        for layer in range(0, config.num_layers, 2):
            yield ShortcutBlocks(config, config.moe, layer)
    else:
        for layer in range(config.num_layers):
            yield Block(config, layer)


def _feed_forward(config: LanguageModelConfig, layer: int) -> nn.Module:
    if config.moe is None or not config.is_routed(layer):
        assert config.intermediate_size is not None  # the configuration checks it
        return DenseFeedForward(config.hidden_size, config.intermediate_size)
    return MoELayer(config.hidden_size, name=f"layer {layer}", **_layer_settings(config.moe))


def _layer_settings(moe: ExpertsConfig) -> dict[str, Any]:
    return {
        field.name: getattr(moe, field.name)
        for field in dataclasses.fields(moe)
        if field.name != "shortcut"
    }
