"""Activations by the names that model code uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from moe_runtime.config import nearest
from moe_runtime.kernels.expert_mlp import ActivationSpec


class Activation(NamedTuple):
    """A formula, and whether it has a gate (twice the rows in the first product) or not."""

    spec: ActivationSpec
    has_gate: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[..., F]` for `[..., 2F]` (gate, then up), or for `[..., F]` without a gate."""
        if not self.has_gate:
            return self.spec(None, hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return self.spec(gate, up)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "swiglu": Activation(ActivationSpec("silu"), True),
        "geglu": Activation(ActivationSpec("gelu"), True),
        "geglu_tanh": Activation(ActivationSpec("gelu_tanh"), True),
        "reglu": Activation(ActivationSpec("relu"), True),
        "swiglu_clamped": Activation(
            ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0), True
        ),
        "silu": Activation(ActivationSpec("silu"), False),
        "gelu": Activation(ActivationSpec("gelu"), False),
        "gelu_tanh": Activation(ActivationSpec("gelu_tanh"), False),
        "relu": Activation(ActivationSpec("relu"), False),
        "relu2": Activation(ActivationSpec("relu2"), False),
    }
)


def activation_named(name: str | Activation) -> Activation:
    """Looks a name up; an `Activation` stays as it is."""
    if isinstance(name, Activation):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
