"""Calls of the C kernel for experts whose rows are too many for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights
from moe_runtime.kernels.linear import ROWS_PER_CALL


def portions(
    experts: Sequence[ExpertWeights], counts: Sequence[int]
) -> Iterator[tuple[Sequence[ExpertWeights], Sequence[int]]]:
    """Cuts a call where its rows would take much memory to pack, inside an expert if need be."""
    some: list[ExpertWeights] = []
    some_counts: list[int] = []
    room = ROWS_PER_CALL
    for weights, count in zip(experts, counts, strict=True):
        while count:
            taken = min(count, room)
            some.append(weights)
            some_counts.append(taken)
            count, room = count - taken, room - taken
            if not room:
                yield some, some_counts
                some, some_counts, room = [], [], ROWS_PER_CALL
    if some:
        yield some, some_counts
