"""Routed experts as two stacked weights, with the experts interface of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from moe_runtime.checkpoints.transformers_private import (
    batched_mm_experts_forward,
    use_experts_implementation,
)

# T tokens, K top-k, D model, F hidden, E experts


class _Stacked(torch.nn.Module):
    def __init__(
        self,
        config: Any,
        act_fn: torch.nn.Module,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        may_be_padded: bool = False,
    ) -> None:
        """Takes over weights.

        Args:
            config: of the model; its `_experts_implementation` says who computes.
            act_fn: between the two products, on the first half of the first one's result.
            gate_up: `[E, 2F, D]`, or transposed `[E, D, 2F]`.
            down: `[E, D, F]`, or transposed `[E, F, D]`.
            may_be_padded: whether a checkpoint may stack more than E experts, of which no token
                is sent to those beyond.
        """
        super().__init__()
        self.may_be_padded = may_be_padded
        self.num_experts = len(down)
        self.act_fn = act_fn
        self.gate_up_proj = torch.nn.Parameter(gate_up)
        self.down_proj = torch.nn.Parameter(down)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, D]`, from hidden states `[T, D]`, expert ids `[T, K]` and gate weights `[T, K]`."""
        return batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


@use_experts_implementation
class StackedExpertsModule(_Stacked):
    """Weights as `[E, out, in]`."""


@use_experts_implementation(is_transposed=True)
class TransposedExperts(_Stacked):
    """Weights as `[E, in, out]`."""
