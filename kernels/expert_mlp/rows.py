"""Which rows an expert computes, and what a backward pass is asked for.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.token_sort import token_sort


class SortedRows(NamedTuple):
    """Routed rows in the order of their experts.

    Attributes:
        order_R: Flat position ``t * K + k`` of every sorted row; only the first ``offsets[-1]``
            count. Empty when the rows of `x` are sorted already.
        offsets_E1: ``[E + 1]`` int64: expert ``e`` has rows ``offsets[e]`` to ``offsets[e + 1]``.
    """

    order_R: Tensor
    offsets_E1: Tensor


class Needs(NamedTuple):
    """Which gradients a backward pass computes; the others are not even allocated."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """The gradients of `Needs`, empty tensors where none is needed."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor


class Group(NamedTuple):
    """One expert's rows: sorted rows ``[first, last)`` through the parameters in `slot`."""

    slot: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


def sort_rows(ids_TK: Tensor, num_experts: int) -> SortedRows:
    """Sorts the dispatched slots by expert, stably; the others come last. No host sync."""
    # A compiler that traces this sees plain torch, which it can fuse.
    impl = "reference" if torch.compiler.is_compiling() else "auto"
    order = token_sort(ids_TK, num_experts, impl=impl)
    return SortedRows(order.order_R, order.offsets_E1)


def already_sorted(counts_E: Tensor) -> SortedRows:
    """Rows that lie in `x` in the order of their experts."""
    offsets_E1 = torch.zeros(len(counts_E) + 1, dtype=torch.int64, device=counts_E.device)
    torch.cumsum(counts_E, dim=0, out=offsets_E1[1:])
    return SortedRows(counts_E.new_empty(0, dtype=torch.int64), offsets_E1)


def groups(rows: SortedRows, experts: StackedExperts) -> Iterator[Group]:
    """The experts that have rows, in order; copies the offsets to the host."""
    return groups_between(rows.offsets_E1, experts.slot_of_expert)


def groups_between(offsets_E1: Tensor, slot_of_expert: Tensor | None) -> Iterator[Group]:
    """As `groups`, for the experts whose rows lie between these offsets."""
    bounds = offsets_E1.tolist()
    slots = range(len(bounds) - 1) if slot_of_expert is None else slot_of_expert.tolist()
    for slot, (first, last) in zip(slots, pairwise(bounds), strict=True):
        if first < last:
            yield Group(slot, first, last)
