"""What a backward pass of `heterogeneous_mlp` is asked for, and what it gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Needs(NamedTuple):
    """Which gradients are wanted; the others are not even allocated."""

    x: bool
    weights: bool
    gate: bool
    up: bool
    down: bool
    gate_bias: bool
    up_bias: bool


class Gradients(NamedTuple):
    """The gradients of `Needs`; None where none is wanted."""

    x: Tensor | None = None
    weights: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
