"""Experts that pass through a device's slots: several in one copy, while others are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from device_tiers import Tiers
from fake_tier import keys

from moe_runtime.memory.reads import Priority
from moe_runtime.types import ExpertKey


def in_memory(expert_slots: int = 9, stream_slots: int = 4, **others: int) -> Tiers:
    """Tiers whose host has the experts of the first layers, and the device others."""
    tiers = Tiers(on_device=expert_slots, on_host=18, stream_slots=stream_slots, **others)
    for layer in (0, 1, 2):
        for key in keys(layer, *range(6)):
            tiers.use([key], streaming=False)
    settle(tiers)
    return tiers


def settle(tiers: Tiers) -> None:
    tiers.device.finish()
    tiers.settle()
    while tiers.host._link.under_way:
        time.sleep(1e-4)


class Copies:
    """How many parts each copy to the device had, and as what it was asked for."""

    def __init__(self, tiers: Tiers) -> None:
        self.found: list[tuple[int, Priority]] = []
        self._copy = tiers.device.copy
        self.patch = patch.object(tiers.device, "copy", self)

    def __call__(self, parts: Any, after: Any, priority: Priority) -> Any:
        self.found.append((len(parts), priority))
        return self._copy(parts, after, priority)


def groups_of(tiers: Tiers, wanted: Sequence[ExpertKey]) -> list[int]:
    """Sizes of the groups of a streaming lease, whose experts are looked at."""
    sizes = []
    with tiers.store.lease(wanted, streaming=True) as lease:
        for group in lease:
            sizes.append(len(group))
            for key, slot in group:
                tiers.device.compute(lambda key=key, slot=slot: tiers._look(key, slot))
    return sizes


def test_half_of_the_slots_are_one_copy_and_one_group() -> None:
    tiers = in_memory(expert_slots=4, stream_slots=4)
    copies = Copies(tiers)
    tiers.store.reset_stats()
    with copies.patch:
        sizes = groups_of(tiers, keys(0, *range(6)))
        settle(tiers)
    assert max(sizes) == 2
    assert sum(sizes) == 6
    assert sum(number for number, _ in copies.found) == tiers.store.stats().misses > 2
    assert max(number for number, _ in copies.found) == 2
    tiers.close()


def test_what_is_read_ahead_comes_in_one_copy_that_no_demand_hastens() -> None:
    tiers = in_memory(stream_slots=6)
    with tiers.store._changed:
        for key in [*tiers.store._entries]:
            tiers.store._drop(key)
    copies = Copies(tiers)
    with copies.patch:
        tiers.store.read_ahead(keys(0, 0, *range(5), 4))  # who is named twice takes one slot
        tiers.store.check()
        assert copies.found == [(3, Priority.READAHEAD), (2, Priority.READAHEAD)]
        assert sum(groups_of(tiers, keys(0, *range(6)))) == 6
        settle(tiers)
    assert copies.found[2:] == [(1, Priority.DEMAND)]
    stats = tiers.store.stats()
    assert stats.readahead_bytes > 0
    assert tiers.store._link._demands == 0
    tiers.close()


def test_what_the_disk_has_to_read_is_asked_for_beside_the_copies() -> None:
    tiers = Tiers(on_device=6, on_host=9, stream_slots=4)
    for key in keys(0, 0, 1, 2):
        tiers.use([key], streaming=False)
    settle(tiers)
    for key in keys(1, *range(4)):
        tiers.use([key], streaming=False)
    settle(tiers)
    assert sum(groups_of(tiers, keys(0, *range(6)))) == 6
    settle(tiers)
    tiers.close()
