"""Random directions of zeroth-order training, and what a step does to one tensor along them.

A direction is drawn again from its seed wherever it is needed, so it takes no memory and an expert
that is away can be moved later. The seed names the step and the tensor, not the order in which
tensors come by: experts that nobody was routed to move as all others do.

Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO, 2023).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest, require_types

Untouched = Literal["dense_exact", "sparse_skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrder:
    """Settings of MeZO.

    Attributes:
        lr: learning rate of steps that name no other.
        eps: distance at which the loss is measured to both sides.
        weight_decay: decay of matrices; norms and biases do not decay.
        seed: of all directions.
        untouched: experts that no token of a step was routed to: `dense_exact` moves them as MeZO
            moves every parameter; `sparse_skip` leaves them as they are, so that a step reads and
            writes only what it computes with.
    """

    lr: float = 1e-7
    eps: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0
    untouched: Untouched = "dense_exact"

    def __post_init__(self) -> None:
        kinds = {**dict.fromkeys(("lr", "eps", "weight_decay"), (int, float)), "seed": (int,)}
        require_types(kinds, {name: getattr(self, name) for name in kinds})
        for name in ("lr", "weight_decay"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be positive, got {self.eps}")
        if self.untouched not in get_args(Untouched):
            hint = nearest(str(self.untouched), get_args(Untouched))
            raise ValueError(f"untouched is {self.untouched!r}; {hint}")


def direction(like: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """Normal numbers for one tensor in one step, in its shape, dtype and device."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # drawn on the host wherever the tensor is, so that a device gets the same numbers
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return drawn.to(like.device)


def perturb(tensor: Tensor, along: Tensor, distance: float) -> None:
    """Moves a tensor, in two roundings, as they are in any layout of its elements."""
    tensor.add_(along * distance)


def descend(tensor: Tensor, along: Tensor, slope: float, *, rate: float, decay: float) -> None:
    """The update: `tensor -= rate * (slope * along + decay * tensor)`.

    Args:
        tensor: a parameter.
        along: its direction.
        slope: the projected gradient.
        rate: learning rate.
        decay: weight decay.
    """
    move = along * slope
    if decay:
        move.add_(tensor * decay)
    tensor.sub_(move.mul_(rate))
