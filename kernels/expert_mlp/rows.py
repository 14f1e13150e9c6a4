"""Which rows an expert computes, and what a backward pass is asked for.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import StackedExperts


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


def sort_rows(ids_TK: Tensor, num_experts: int) -> SortedRows:
    """Sorts the dispatched slots by expert, stably; the others come last. No host sync."""
    ids_R = ids_TK.flatten()
    ids_R = torch.where((ids_R < 0) | (ids_R > num_experts), num_experts, ids_R)
    sorted_R, order_R = torch.sort(ids_R, stable=True)
    bounds = torch.arange(num_experts + 1, device=ids_TK.device, dtype=sorted_R.dtype)
    return SortedRows(order_R, torch.searchsorted(sorted_R, bounds))


def already_sorted(counts_E: Tensor) -> SortedRows:
    """Rows that lie in `x` in the order of their experts."""
    offsets_E1 = torch.zeros(len(counts_E) + 1, dtype=torch.int64, device=counts_E.device)
    torch.cumsum(counts_E, dim=0, out=offsets_E1[1:])
    return SortedRows(counts_E.new_empty(0, dtype=torch.int64), offsets_E1)


def groups(rows: SortedRows, experts: StackedExperts) -> Iterator[Group]:
    """The experts that have rows, in order; copies the offsets to the host."""
    offsets = rows.offsets_E1.tolist()
    for expert, slot in enumerate(experts.slots()):
        if offsets[expert] < offsets[expert + 1]:
            yield Group(slot, offsets[expert], offsets[expert + 1])
