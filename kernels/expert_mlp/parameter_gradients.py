"""Gradients of the parameters added to those there are, or computed for some experts alone.

A fresh gradient of a layer of experts is as large as the layer; to write it and to add it up costs
more than the products where experts have few rows. Given the gradients of earlier micro-batches,
the backward pass adds to them as it writes. Not for `torch.compile`: what is added to is no result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import RoutedExperts, StackedExperts
from moe_runtime.kernels.operands import check_like, check_shape

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParameterGradients:
    """What becomes of the gradients of `StackedExperts`.

    Attributes:
        into: Tensors in the shapes, dtype and on the device of the parameters, in the order
            gate_up, down, gate_up_bias, down_bias; None for one that needs no gradient. The
            backward pass adds to them and autograd gets no gradient of a parameter. None: autograd
            gets them, as usual.
        trains_E: `[E]` bool: experts whose parameters get a gradient; the others' stays as it is,
            or zero, and costs nothing. None: all. Experts that share a slot must agree.
    """

    into: tuple[Tensor | None, ...] | None = None
    trains_E: Tensor | None = None

    def check(self, experts: StackedExperts) -> None:
        """Checks that these are gradients of those parameters.

        Raises:
            ValueError: A gradient is missing, or shapes, dtypes or devices do not fit.
        """
        if torch.compiler.is_compiling():
            raise ValueError("gradients= cannot be used inside torch.compile; leave it out there")
        trains_E = self.trains_E
        if trains_E is not None and (
            trains_E.dtype != torch.bool
            or list(trains_E.shape) != [experts.num_experts]
            or trains_E.device != experts.device
        ):
            raise ValueError(
                f"trains_E must be [{experts.num_experts}] of bool on {experts.device}, got "
                f"{list(trains_E.shape)} of {trains_E.dtype} on {trains_E.device}"
            )
        if self.into is None:
            return
        if len(self.into) != len(NAMES):
            raise ValueError(f"into must be {len(NAMES)} tensors or None, got {len(self.into)}")
        for name, parameter, given in zip(NAMES, experts.tensors(), self.into, strict=True):
            if given is None:
                if parameter is not None and parameter.requires_grad:
                    raise ValueError(f"into lacks the gradient of {name}, which needs one")
            elif parameter is None:
                raise ValueError(f"into has a gradient of {name}, and there is no such parameter")
            else:
                check_shape(f"into's {name}", given, parameter.shape)
                check_like(f"into's {name}", given, parameter, "the parameter")

    def trained_slots(self, experts: RoutedExperts) -> Tensor | None:
        """The slot table with the experts that do not train left out; None if it is the same."""
        if self.trains_E is None:
            return experts.slot_of_expert
        slots = experts.slot_of_expert
        if slots is None:
            slots = torch.arange(experts.num_experts, device=experts.device)
        return torch.where(self.trains_E, slots, -1)


EVERY_GRADIENT = ParameterGradients()
"""Autograd gets the gradients of all experts."""
