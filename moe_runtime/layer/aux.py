"""Losses and load of a layer's last call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.routing import Routing


@dataclass(frozen=True, eq=False)
class LayerAux:
    """Losses and load statistics of one call. Tensors stay on the device: nothing waits for it.

    Attributes:
        losses: Auxiliary losses by name, without coefficients.
        loss: Their sum with the gate's coefficients, a scalar to add to the training loss.
    """

    routing: Routing
    losses: Mapping[str, Tensor]
    loss: Tensor

    @property
    def counts_E(self) -> Tensor:
        """`[E]` int64: choices dispatched to each expert."""
        return self.routing.counts_E

    @property
    def demand_E(self) -> Tensor:
        """`[E]` int64: choices of each expert before capacity took any away."""
        demand_E = self.routing.demand_E
        return self.routing.counts_E if demand_E is None else demand_E

    @property
    def dropped_share(self) -> Tensor:
        """Share of the choices that capacity took away, a scalar."""
        demand = self.demand_E.sum()
        return 1 - self.counts_E.sum() / demand.clamp(min=1)

    @property
    def load_variation(self) -> Tensor:
        """Coefficient of variation of the demand: standard deviation over mean; 0 is uniform."""
        demand_E = self.demand_E.to(torch.float32)
        return demand_E.std(correction=0) / demand_E.mean().clamp(min=1e-20)

    @property
    def max_load(self) -> Tensor:
        """Demand of the busiest expert over the mean; 1 is uniform, `E` is collapse."""
        demand_E = self.demand_E.to(torch.float32)
        return demand_E.max() / demand_E.mean().clamp(min=1e-20)


class AttachLoss(torch.autograd.Function):
    """Passes `out` through; in the backward pass the loss gets the gradient `scale`
    (Megatron-Core).

    It works where pipelines or reentrant checkpoints cut the way from an auxiliary loss to the
    training loss.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.loss_dtype = loss.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, gradient.new_full((), ctx.scale, dtype=ctx.loss_dtype), None


def weighted_loss(
    losses: Mapping[str, Tensor], weights: Mapping[str, float], like: Tensor
) -> Tensor:
    """The sum of the losses with their coefficients, a scalar of fp32 or more."""
    wide = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=like.device)
    for name, loss in losses.items():
        total = total + weights[name] * loss
    return total
