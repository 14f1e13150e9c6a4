"""The rows that each expert computes, and the gradients that a backward pass computes.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import RoutedExperts, StackedExperts, ids_in_slots
from moe_runtime.kernels.operands import ActivationSpec, check_like, check_shape
from moe_runtime.kernels.token_sort import token_sort


class SortedRows(NamedTuple):
    """Routed rows in the order of their experts.

    Attributes:
        order_R: Slot ``t * K + k`` of every sorted row; only the first ``offsets[-1]`` count. Empty
            if the rows of `x` are sorted already.
        offsets_E1: int64: expert ``e`` has rows ``offsets[e]`` to ``offsets[e + 1]``.
    """

    order_R: Tensor
    offsets_E1: Tensor


class Group(NamedTuple):
    """One expert's rows: sorted rows ``[first, last)`` through the parameters in `slot`."""

    slot: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True, eq=False)
class RoutedBatch:
    """The arguments of a layer's experts.

    `x_TD` are tokens, or rows ``[R, D]`` sorted by expert without gate weights, whose own outputs
    are wanted. `ids_TK` is None if `sorted_rows` is given.
    """

    x_TD: Tensor
    ids_TK: Tensor | None
    weights_TK: Tensor | None
    experts: RoutedExperts
    activation: ActivationSpec
    sorted_rows: SortedRows | None = None

    @cached_property
    def rows(self) -> SortedRows:
        """The rows of each expert; sorts the choices on first use."""
        if self.sorted_rows is not None:
            return self.sorted_rows
        assert self.ids_TK is not None, "rows are sorted, or there are choices to sort them by"
        experts = self.experts
        return sort_rows(ids_in_slots(self.ids_TK, experts.slot_of_expert), experts.num_experts)

    @property
    def num_choices(self) -> int:
        """K; 0 for rows that are sorted already."""
        return 0 if self.weights_TK is None else self.weights_TK.shape[1]

    @property
    def num_rows(self) -> int:
        """R, including rows without an expert."""
        return len(self.x_TD) if self.weights_TK is None else self.weights_TK.numel()


def sort_rows(ids_TK: Tensor, num_experts: int) -> SortedRows:
    """Sorts the dispatched slots by expert, stably; the others come last. No host sync."""
    # A compiler that traces this sees plain torch, which it can fuse.
    impl = "reference" if torch.compiler.is_compiling() else "auto"
    order = token_sort(ids_TK, num_experts, impl=impl)
    return SortedRows(order.order_R, order.offsets_E1)


def already_sorted(counts_E: Tensor) -> SortedRows:
    """Rows of `x` that are sorted by expert."""
    offsets_E1 = torch.zeros(len(counts_E) + 1, dtype=torch.int64, device=counts_E.device)
    torch.cumsum(counts_E, dim=0, out=offsets_E1[1:])
    return SortedRows(counts_E.new_empty(0, dtype=torch.int64), offsets_E1)


def groups(rows: SortedRows, experts: RoutedExperts) -> Iterator[Group]:
    """The experts that have rows, in order; copies the offsets to the host.

    Raises:
        ValueError: A slot is out of range.
    """
    slots = experts.slot_of_expert
    num_slots = experts.num_experts if slots is None else len(experts.tensors()[0])
    for group in groups_between(rows.offsets_E1, slots):
        if group.slot >= num_slots:
            raise ValueError(f"slot_of_expert must be below {num_slots}, got {group.slot}")
        yield group


def groups_between(offsets_E1: Tensor, slot_of_expert: Tensor | None) -> Iterator[Group]:
    """The experts that have rows between these offsets and a slot, in order."""
    bounds = offsets_E1.tolist()
    slots = range(len(bounds) - 1) if slot_of_expert is None else slot_of_expert.tolist()
    for slot, (first, last) in zip(slots, pairwise(bounds), strict=True):
        if first < last and slot >= 0:
            yield Group(slot, first, last)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParameterGradients:
    """Accumulates or restricts the gradients of `StackedExperts`.

    A fresh gradient of a layer is as large as the layer: writing it and adding it up costs more
    than the products if experts have few rows. Given earlier gradients, the backward pass adds to
    them. Not for `torch.compile`.

    Attributes:
        into: Tensors like the parameters gate_up, down, gate_up_bias, down_bias; None for one that
            needs no gradient. The backward pass adds to them, and autograd gets none of them. None:
            autograd gets all gradients.
        trains_E: `[E]` bool: only these experts get a gradient; that of others stays as it is, or
            is zero. None: all. Experts that share a slot must agree.
    """

    into: tuple[Tensor | None, ...] | None = None
    trains_E: Tensor | None = None

    def check(self, experts: StackedExperts) -> None:
        """Raises ValueError if a gradient is missing, or shapes, dtypes or devices do not fit."""
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
        names = experts.names
        if len(self.into) != len(names):
            raise ValueError(f"into must be {len(names)} tensors or None, got {len(self.into)}")
        for name, parameter, given in zip(names, experts.tensors(), self.into, strict=True):
            if given is None:
                if parameter is not None and parameter.requires_grad:
                    raise ValueError(f"into lacks the gradient of {name}, which needs one")
            elif parameter is None:
                raise ValueError(f"into has a gradient of {name}, and there is no such parameter")
            else:
                check_shape(f"into's {name}", given, parameter.shape)
                check_like(f"into's {name}", given, parameter, "the parameter")

    def trained_slots(self, experts: RoutedExperts) -> Tensor | None:
        """The slot table without the experts that do not train; None if it is the same."""
        if self.trains_E is None:
            return experts.slot_of_expert
        slots = experts.slot_of_expert
        if slots is None:
            slots = torch.arange(experts.num_experts, device=experts.device)
        return torch.where(self.trains_E, slots, -1)


EVERY_GRADIENT = ParameterGradients()
