"""Switch Transformer's gate (Fedus et al. 2021): one expert, chosen by the highest probability."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext


class Switch(Gate):
    """Top-1: `p = softmax(logits)`, `e = argmax p`, weight `p[e]` (not renormalised).

    In training the gate's input is multiplied by noise from `U(1 - jitter, 1 + jitter)`.

    Args:
        top_k: Must be 1.
        jitter: 0.01 in the paper.

    Raises:
        ValueError: `top_k` is not 1, or the jitter is not in [0, 1).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        jitter: float = 0.01,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        require_top_k(self, 1)
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {jitter}")
        self.jitter = jitter

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        if self.training and self.jitter:
            noise = torch.rand(
                x_TD.shape, dtype=x_TD.dtype, device=x_TD.device, generator=context.generator
            )
            x_TD = x_TD * (1 - self.jitter + 2 * self.jitter * noise)
        return super().logits(x_TD, context)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        weights_T1, ids_T1 = probs_TE.max(dim=-1, keepdim=True)
        return Choice(ids_T1, weights_T1, logits_TE, probs_TE)


def require_top_k(gate: Gate, top_k: int) -> None:
    """Refuses another number of experts than the one the gate's formula has.

    Raises:
        ValueError: `gate.top_k` is another.
    """
    if gate.top_k != top_k:
        raise ValueError(f"{type(gate).__name__} routes with top_k={top_k}, got {gate.top_k}")
