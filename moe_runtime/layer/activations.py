"""Activations by the names that model code uses."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """A gated activation is `kind(gate) * up`, one without a gate `kind(up)`."""

    kind: str
    has_gate: bool


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "swiglu": Activation("silu", True),
        "geglu": Activation("gelu", True),
        "geglu_tanh": Activation("gelu_tanh", True),
        "reglu": Activation("relu", True),
        "silu": Activation("silu", False),
        "gelu": Activation("gelu", False),
        "gelu_tanh": Activation("gelu_tanh", False),
        "relu": Activation("relu", False),
        "relu2": Activation("relu2", False),
    }
)


def activation_named(name: str) -> Activation:
    """Looks a name up.

    Raises:
        ValueError: The name is unknown; the nearest one is named.
    """
    if name not in ACTIVATIONS:
        near = get_close_matches(name, ACTIVATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ACTIVATIONS)}"
        raise ValueError(f"unknown activation {name!r}: {hint}")
    return ACTIVATIONS[name]


def apply_activation(activation: Activation, hidden: Tensor) -> Tensor:
    """The activation of `[..., 2F]` (gate, then up) or `[..., F]`, giving `[..., F]`."""
    if activation.has_gate:
        gate, up = hidden.chunk(2, dim=-1)
        return _apply(activation.kind, gate) * up
    return _apply(activation.kind, hidden)


def _apply(kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square() if kind == "relu2" else F.relu(x)
