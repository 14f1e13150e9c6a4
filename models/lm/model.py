"""The language model: embedding, blocks of attention and (routed) feed-forward, output projection.

Computes what `Qwen3MoeForCausalLM` computes, and `Qwen3ForCausalLM` where no layer is routed.

Shapes: B sequences, C tokens of context, T = B * C tokens, D model width, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import nearest
from moe_runtime.layer import LayerAux, MoELayer
from moe_runtime.models.lm.attention import Attention, RotaryTable
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.loss import linear_cross_entropy
from moe_runtime.models.lm.norm import RMSNorm
from moe_runtime.routing import ZeroExpertCounts


@dataclass(frozen=True, eq=False)
class Losses:
    """What a batch is trained on, and how its tokens spread over the experts.

    Attributes:
        cross_entropy: mean over the tokens, nats; a scalar.
        auxiliary: the gates' losses with their coefficients, mean over the routed layers.
        max_load: demand of the busiest expert over the mean, mean over the routed layers; None in
            a dense model.
        dropped_share: share of the choices that capacity took away, mean likewise.
    """

    cross_entropy: Tensor
    auxiliary: Tensor
    max_load: Tensor | None = None
    dropped_share: Tensor | None = None

    def detach(self) -> "Losses":
        """The same numbers without their graphs."""
        return Losses(
            self.cross_entropy.detach(),
            self.auxiliary.detach(),
            None if self.max_load is None else self.max_load.detach(),
            None if self.dropped_share is None else self.dropped_share.detach(),
        )


class DenseFeedForward(nn.Module):
    """SwiGLU feed-forward of a layer without experts.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: LanguageModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = _feed_forward(config, layer)

    def forward(
        self, x: Tensor, rotary: RotaryTable, token_ids: Tensor, previous_logits: Tensor | None
    ) -> Tensor:
        """`[B, C, D]` to `[B, C, D]`.

        Args:
            x: the residual stream.
            rotary: positions.
            token_ids: `[B, C]`, for gates that route by token.
            previous_logits: scores of the previous routed layer's gate, for gates that read them.
        """
        x = x + self.attention(self.attention_norm(x), rotary)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MoELayer):
            return x + self.feed_forward(
                normed, token_ids=token_ids, previous_logits=previous_logits
            )
        return x + self.feed_forward(normed)

    @property
    def gate_logits(self) -> Tensor | None:
        """`[T, E]` scores of the last call's gate; None in a dense block."""
        aux = self.feed_forward.aux if isinstance(self.feed_forward, MoELayer) else None
        return None if aux is None else aux.routing.logits_TE


def _feed_forward(config: LanguageModelConfig, layer: int) -> nn.Module:
    if config.moe is None or not config.is_routed(layer):
        assert config.intermediate_size is not None  # the configuration checks it
        return DenseFeedForward(config.hidden_size, config.intermediate_size)
    settings: dict[str, Any] = {
        field.name: getattr(config.moe, field.name) for field in dataclasses.fields(config.moe)
    }
    if config.moe.zero_experts is not None:
        settings["zero_experts"] = _zero_experts(config.moe.zero_experts)
    return MoELayer(config.hidden_size, name=f"layer {layer}", **settings)


def _zero_experts(counts: Mapping[str, int]) -> ZeroExpertCounts:
    kinds = {field.name for field in dataclasses.fields(ZeroExpertCounts)}
    for kind in counts:
        if kind not in kinds:
            raise ValueError(f"zero_experts has no kind {kind!r}; {nearest(kind, kinds)}")
    return ZeroExpertCounts(**counts)


class LanguageModel(nn.Module):
    """A decoder-only language model.

    Args:
        config: its shape; `vocab_size` must be known.
        recompute: keep each block's input instead of its activations, and compute it twice.

    Raises:
        ValueError: the vocabulary is not known, or a size does not fit.
    """

    def __init__(self, config: LanguageModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be known to build the model, got None")
        self.config = config
        self.recompute = recompute
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.head_dim, config.max_positions, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights as in Qwen3; gates keep the initial values that they chose themselves."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and ".gate." not in name and not name.endswith("bias"):
                parameter.normal_(std=self.config.init_std)

    def hidden_states(self, ids_BC: Tensor) -> Tensor:
        """Last hidden states `[B, C, D]` of token ids `[B, C]`, normed.

        Raises:
            ValueError: the sequences are longer than the positions.
        """
        if ids_BC.shape[1] > self.config.max_positions:
            raise ValueError(
                f"expected at most {self.config.max_positions} tokens a sequence, "
                f"got {ids_BC.shape[1]}"
            )
        x = self.embedding(ids_BC)
        previous_logits: Tensor | None = None
        for block in self._blocks():
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, self.rotary, ids_BC, previous_logits, use_reentrant=False)
            else:
                x = block(x, self.rotary, ids_BC, previous_logits)
            assert isinstance(x, Tensor)
            if block.gate_logits is not None:
                previous_logits = block.gate_logits
        return self.norm(x)

    def forward(self, ids_BC: Tensor) -> Tensor:
        """Logits `[B, C, V]` of token ids `[B, C]`."""
        return self.output(self.hidden_states(ids_BC))

    def losses(self, ids_BC: Tensor, targets_BC: Tensor) -> Losses:
        """Cross-entropy of the targets, and the gates' losses.

        Args:
            ids_BC: token ids `[B, C]`.
            targets_BC: the token after each.
        """
        hidden = self.hidden_states(ids_BC)
        cross_entropy = linear_cross_entropy(
            hidden.flatten(0, 1), self.output.weight, targets_BC.reshape(-1)
        )
        layers = self.layer_aux()
        if not layers:
            return Losses(cross_entropy, torch.zeros_like(cross_entropy))
        return Losses(
            cross_entropy,
            torch.stack([aux.loss for aux in layers]).mean(),
            torch.stack([aux.max_load for aux in layers]).mean(),
            torch.stack([aux.dropped_share for aux in layers]).mean(),
        )

    def after_step(self) -> None:
        """What gates do between optimizer steps: move a selection bias, anneal a temperature."""
        for layer in self.routed_layers():
            layer.after_step()

    def routed_layers(self) -> Iterator[MoELayer]:
        """The routed layers from first to last."""
        for block in self._blocks():
            if isinstance(block.feed_forward, MoELayer):
                yield block.feed_forward

    def layer_aux(self) -> list[LayerAux]:
        """What the routed layers say about the last call, from first to last."""
        return [layer.aux for layer in self.routed_layers() if layer.aux is not None]

    def num_parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Parameters that one token passes through, embeddings counted once."""
        total = self.num_parameters()
        for layer in self.routed_layers():
            routed = sum(parameter.numel() for parameter in layer.experts.parameters())
            total -= routed - routed * layer.gate.top_k // layer.gate.num_experts
        return total

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block
