"""Experts divided among ranks of different size: how many each holds, and which."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from moe_runtime.policies.placement.algorithms import replicate

Holders = list[list[list[int]]]
"""The ranks that hold an expert, by layer and expert."""

ROOM_TOLERANCE, SPEED_TOLERANCE = Fraction(1, 10), Fraction(1, 4)
"""Ranks whose numbers differ by less than this share of the largest count as equal."""


def shares_of_ranks(
    room: Sequence[int], speeds: Sequence[int], num_slots: int
) -> Sequence[int | Fraction]:
    """How many experts each rank holds, as parts of any sum.

    If not all fit, as many for each slot of memory, so that all ranks miss alike. Otherwise as many
    for each unit of speed as memory allows.

    Args:
        room: experts that fit in each rank's memory.
        speeds: of each rank's products, in any unit.
        num_slots: experts and copies to place.
    """
    if are_alike(room, ROOM_TOLERANCE):
        room = [max(room)] * len(room)
    if sum(room) <= num_slots:
        return room
    if are_alike(speeds, SPEED_TOLERANCE):
        speeds = [1] * len(speeds)
    shares = [Fraction(0)] * len(room)
    left, open_ranks = num_slots, {*range(len(room))}
    while open_ranks:
        each = Fraction(left, sum(speeds[rank] for rank in open_ranks))
        full = {rank for rank in open_ranks if room[rank] <= each * speeds[rank]}
        for rank in full or open_ranks:
            shares[rank] = Fraction(room[rank]) if full else each * speeds[rank]
        left -= sum(room[rank] for rank in full)
        open_ranks = open_ranks - full if full else set()
    return shares


def are_alike(numbers: Sequence[int], tolerance: Fraction) -> bool:
    return min(numbers) >= (1 - tolerance) * max(numbers)


def hold_by_shares(
    experts_of_layer: Sequence[int],
    shares: Sequence[int | Fraction],
    loads_LE: np.ndarray | None = None,
    num_copies: int = 0,
) -> Holders:
    """Divides the experts of each layer by shares, which the layers together meet.

    Args:
        loads_LE: ``[L, E]`` loads, to balance; without them ranks hold runs of experts.
        num_copies: of hot experts, in each layer; only with loads.
    """
    num_ranks, whole = len(shares), sum(shares)
    owed, holders = [Fraction(0)] * num_ranks, []
    for layer, num_experts in enumerate(experts_of_layer):
        num_slots = num_experts + min(num_copies, num_experts * (num_ranks - 1))
        owed = [
            owed[rank] + Fraction(num_slots * shares[rank]) / whole for rank in range(num_ranks)
        ]
        room = [0] * num_ranks
        for _ in range(num_slots):
            open_ranks = [rank for rank in range(num_ranks) if room[rank] < num_experts]
            rank = max(open_ranks, key=lambda r: (owed[r], -r))
            room[rank] += 1
            owed[rank] -= 1
        if loads_LE is None:
            holders.append([[rank] for rank, number in enumerate(room) for _ in range(number)])
        else:
            holders.append(_hold_by_load(loads_LE[layer, :num_experts], room, shares))
    return holders


def _hold_by_load(
    loads_E: np.ndarray, room: list[int], shares: Sequence[int | Fraction]
) -> list[list[int]]:
    """EPLB's copies and greedy packing, for packs of different size."""
    experts_1S, copies_1E = replicate(loads_E[None].astype(np.float64), sum(room))
    per_slot_S = (loads_E / copies_1E[0])[experts_1S[0]]
    left, loads = [*room], [0.0] * len(room)
    held: list[list[int]] = [[] for _ in loads_E]
    for slot in np.argsort(-per_slot_S, kind="stable").tolist():
        holders = held[experts_1S[0, slot]]
        free = [rank for rank, number in enumerate(left) if number and rank not in holders]
        if not free:
            continue  # only ranks that hold this expert have room: no further copy
        rank = min(free, key=lambda r: ((loads[r] + per_slot_S[slot]) / float(shares[r] or 1), r))
        left[rank] -= 1
        loads[rank] += float(per_slot_S[slot])
        holders.append(rank)
    return [sorted(ranks) for ranks in held]
