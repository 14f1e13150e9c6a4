"""Which experts live in memory while a model is trained, and when they exchange tiers.

Tiers in memory are spread evenly at first; after a number of steps, experts on the disk that were
used more often take places in memory. The offloaded trainers use it as much as simulations.
Source: Hecate (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_runtime.types import ExpertKey

TIER_CHANGE_STEPS = 50
"""Steps over which uses of experts are counted before tiers are chosen again."""

TIER_CHANGE_MARGIN = 0.1
"""Difference in the share of steps from which an exchange of two tiers pays."""


class Exchange(NamedTuple):
    """Two experts that exchange tiers: one comes into memory, one goes to the disk."""

    arriving: ExpertKey
    leaving: ExpertKey


class UseCounts:
    """Counts in how many steps each expert is used."""

    def __init__(self, keys: Iterable[ExpertKey]) -> None:
        self._used = dict.fromkeys(keys, 0)
        self._steps = 0

    def after_step(
        self, used: Iterable[ExpertKey], is_resident: Callable[[ExpertKey], bool]
    ) -> list[Exchange]:
        """Counts a step; every `TIER_CHANGE_STEPS`, returns exchanges and starts a new count."""
        for key in used:
            self._used[key] += 1
        self._steps += 1
        if self._steps < TIER_CHANGE_STEPS:
            return []
        by_use = sorted(self._used, key=lambda key: (self._used[key], key))
        leaving = [key for key in by_use if is_resident(key)]
        arriving = [key for key in reversed(by_use) if not is_resident(key)]
        least = TIER_CHANGE_MARGIN * self._steps
        pairs = [Exchange(*pair) for pair in zip(arriving, leaving, strict=False)]
        found = [p for p in pairs if self._used[p.arriving] - self._used[p.leaving] >= least]
        self._used = dict.fromkeys(self._used, 0)
        self._steps = 0
        return found


def spread(keys: Sequence[ExpertKey], count: int) -> list[ExpertKey]:
    """`count` of the keys at equal distances: between two that are read lies one that is not."""
    total = len(keys)
    return [key for i, key in enumerate(keys) if (i + 1) * count // total > i * count // total]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierReplay:
    """How often the experts that steps asked for had their tier in memory."""

    uses: int
    spread: int
    by_use: int
    best: int
    exchanges: int


def replay_tiers(
    steps: Iterable[Collection[ExpertKey]], keys: Sequence[ExpertKey], count: int
) -> TierReplay:
    """Replays recorded steps with tiers of `count` experts in memory."""
    first = frozenset(spread(keys, count))
    tiers, counts = set(first), UseCounts(keys)
    totals = dict.fromkeys(keys, 0)
    at_first = by_use = exchanges = 0
    for used in steps:
        at_first += sum(key in first for key in used)
        by_use += sum(key in tiers for key in used)
        for key in used:
            totals[key] += 1
        for arriving, leaving in counts.after_step(used, tiers.__contains__):
            tiers.add(arriving)
            tiers.remove(leaving)
            exchanges += 1
    return TierReplay(
        uses=sum(totals.values()),
        spread=at_first,
        by_use=by_use,
        best=sum(sorted(totals.values(), reverse=True)[:count]),
        exchanges=exchanges,
    )
