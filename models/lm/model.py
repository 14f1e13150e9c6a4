"""The language model: embedding, blocks of attention and (routed) feed-forward, output projection.

Computes what `Qwen3MoeForCausalLM` computes, and `Qwen3ForCausalLM` where no layer is routed.

Shapes: B sequences, C tokens of context, T = B * C tokens, D model width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_runtime.layer import LayerAux, MoELayer
from moe_runtime.models.lm.attention import RotaryTable, SequencePart
from moe_runtime.models.lm.blocks import Block, ShortcutBlocks, make_blocks
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.layers import RMSNorm, linear_cross_entropies
from moe_runtime.routing import Reinforce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a batch, and the load of the experts."""

    cross_entropy: Tensor  # mean over the tokens, nats; a scalar
    auxiliary: Tensor  # the gates' losses with their coefficients, mean over the routed layers
    max_load: Tensor | None = None  # the busiest expert's demand over the mean, mean over layers
    dropped_share: Tensor | None = None  # choices dropped by the capacity, mean over layers

    def detach(self) -> "Losses":
        known = {name: loss.detach() for name, loss in vars(self).items() if loss is not None}
        return replace(self, **known)


class LanguageModel(nn.Module):
    """A decoder-only language model; `recompute` keeps each block's input instead of its
    activations.

    Attributes:
        replicas: processes that train copies of the gates on other tokens; None for this alone
        part: which part of each sequence this process has; None for all of it
        is_whole: False where other processes have parts of the parameters
        num_routed: routed layers, those that other processes have included
    """

    def __init__(self, config: LanguageModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be known to build the model, got None")
        self.config = config
        self.recompute = recompute
        self.replicas: ProcessGroup | None = None
        self.part: SequencePart | None = None
        self.is_whole = True
        self.num_routed = sum(map(config.is_routed, range(config.num_layers)))
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.head_dim, config.max_positions, config.rope_theta)
        self.blocks = nn.ModuleList(make_blocks(config))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights as in Qwen3; gates keep their own initial values."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and ".gate." not in name and not name.endswith("bias"):
                parameter.normal_(std=self.config.init_std)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compiles each block in place with `torch.compile`."""
        for block in self.own_blocks():
            block.compile(backend=backend)

    def embed(self, ids_BC: Tensor) -> Tensor:
        """The residual stream `[B, C, D]`, or this process's part of it, before the first block."""
        if ids_BC.shape[1] > self.config.max_positions:
            raise ValueError(
                f"expected at most {self.config.max_positions} tokens a sequence, "
                f"got {ids_BC.shape[1]}"
            )
        return self.embedding(ids_BC if self.part is None else self.part.own(ids_BC))

    def through_blocks(
        self, x: Tensor, ids_BC: Tensor, previous_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream `[B, C, D]` after the blocks here, and the last gate's scores or
        None."""
        for block in self.own_blocks():
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, self.rotary, ids_BC, previous_logits, use_reentrant=False)
            else:
                x = block(x, self.rotary, ids_BC, previous_logits)
            assert isinstance(x, Tensor)
            if block.routed is not None and block.routed.aux is not None:
                previous_logits = block.routed.aux.routing.logits_TE
        return x, previous_logits

    def hidden_states(self, ids_BC: Tensor) -> Tensor:
        """Last hidden states `[B, C, D]` of token ids `[B, C]`, or this process's part, normed."""
        return self.norm(self.through_blocks(self.embed(ids_BC), ids_BC)[0])

    def forward(self, ids_BC: Tensor) -> Tensor:
        """Logits `[B, C, V]` of token ids `[B, C]`."""
        return self.output(self.hidden_states(ids_BC))

    def losses(self, ids_BC: Tensor, targets_BC: Tensor) -> Losses:
        """Cross-entropy of the targets, and the gates' losses, for token ids `[B, C]`."""
        x, _ = self.through_blocks(self.embed(ids_BC), ids_BC)
        return self.losses_after(x, targets_BC)

    def losses_after(self, x: Tensor, targets_BC: Tensor) -> Losses:
        """The second half of `losses`, from the residual stream after the last block."""
        if self.part is not None:
            targets_BC = self.part.own(targets_BC)
        cross_entropy, of_token_T = linear_cross_entropies(
            self.norm(x).flatten(0, 1), self.output.weight, targets_BC.reshape(-1)
        )
        samplers = [layer for layer in self.routed_layers() if isinstance(layer.gate, Reinforce)]
        if samplers and self.part is not None:
            of_token_T = self.part.gather(of_token_T.view(targets_BC.shape)).flatten()
        losses = self.gate_losses(cross_entropy)
        for layer in samplers:
            loss = _policy_loss(layer, -of_token_T)
            losses = replace(losses, auxiliary=losses.auxiliary + loss / self.num_routed)
        return losses

    def gate_losses(self, cross_entropy: Tensor) -> Losses:
        """The gates' losses of the layers here, as shares of the means over all routed layers."""
        layers = self.layer_aux()
        zero = torch.zeros_like(cross_entropy)
        if not self.num_routed:
            return Losses(cross_entropy, zero)
        if not layers:
            return Losses(cross_entropy, zero, zero, zero)
        columns = zip(*((aux.loss, aux.max_load, aux.dropped_share) for aux in layers), strict=True)
        shares = (torch.stack(column).sum() / self.num_routed for column in columns)
        return Losses(cross_entropy, *shares)

    def after_step(self, *, skipped: bool = False) -> None:
        """Updates gates after an optimizer step: selection bias, temperature."""
        for layer in self.routed_layers():
            layer.after_step(self.replicas, skipped=skipped)

    def routed_layers(self) -> Iterator[MoELayer]:
        for block in self.own_blocks():
            if block.routed is not None:
                yield block.routed

    def layer_aux(self) -> list[LayerAux]:
        """Auxiliary results of the routed layers in the last call, in order."""
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

    def own_blocks(self) -> Iterator[Block | ShortcutBlocks]:
        """The blocks here in order; other pipeline stages have others."""
        for block in self.blocks:
            if isinstance(block, Block | ShortcutBlocks):
                yield block


def _policy_loss(layer: MoELayer, rewards_T: Tensor) -> Tensor:
    assert isinstance(layer.gate, Reinforce), "other gates do not sample"
    policy = None if layer.aux is None else layer.aux.routing.policy
    if policy is None:
        return torch.zeros_like(rewards_T).sum()
    return layer.gate.policy_weight * layer.gate.policy_loss(policy, rewards_T)
