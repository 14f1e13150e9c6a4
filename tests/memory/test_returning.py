"""What leaves the device goes back to the host's memory, so that both hold different experts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from device_tiers import Tiers
from emulated_device import EmulatedDevice
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, FakeTier, content, keys

from moe_runtime.memory.device.device_layout import CopyPart
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.memory.tiers import Return, ReturningSource
from moe_runtime.types import ExpertKey

ALL = [ExpertKey(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]


def use_one_after_another(tiers: Tiers, rounds: int) -> None:
    drawn = random.Random(rounds)
    for _ in range(rounds):
        for layer in range(NUM_LAYERS):
            tiers.use(keys(layer, drawn.randrange(NUM_EXPERTS)), streaming=False)
            rest(tiers)
            tiers.check()


def test_nothing_is_read_again_where_both_together_have_room_for_all():
    # of six experts of a layer three are on the device and three in the host's memory, and there is
    # one place to change through
    tiers = Tiers(on_device=3 * NUM_LAYERS, on_host=4 * NUM_LAYERS)
    use_one_after_another(tiers, 60)
    tiers.close()
    assert sorted(tiers.disk.fetched) == ALL
    assert tiers.host.stats().bytes_read == len(ALL) * SLOT_BYTES


def test_what_is_on_the_device_leaves_the_host_first():
    tiers = Tiers(on_device=2, on_host=3)
    for expert in (0, 1, 2, 3):
        tiers.use(keys(0, expert), streaming=False)
        tiers.device.finish()
        tiers.settle()
    assert {*tiers.store._entries} == {*keys(0, 2, 3)}
    # the oldest stays, since the device has 2
    assert {*tiers.host._entries} == {*keys(0, 0, 1, 3)}
    tiers.close()


def test_a_policy_that_decides_later_gets_nothing(monkeypatch):
    tiers = Tiers(on_device=NUM_LAYERS, on_host=4)
    monkeypatch.setattr(type(tiers.host), "decides_later", property(lambda _: True))
    monkeypatch.setattr(tiers.device, "copy_back", None)
    use_one_after_another(tiers, 5)
    tiers.close()


class Refusing(EmulatedDevice):
    """A device that copies nothing back."""

    def copy_back(self, parts: Any) -> Any:
        raise RuntimeError("as asked")


def returned(
    device: EmulatedDevice, disk: FakeTier
) -> tuple[torch.Tensor, Transfer, ReturningSource]:
    """An expert on its way from a slot of the device, and where it goes."""
    source, ends = ReturningSource(disk, device), list[Transfer]()
    memory, slot = (torch.full((SLOT_BYTES,), byte, dtype=torch.uint8) for byte in (7, 255))
    device.pin(slot, SLOT_BYTES)
    key, half = ExpertKey(0, 0), SLOT_BYTES // 2
    swapped = [CopyPart(0, half, half), CopyPart(half, 0, half)]
    memory[:half] = content(key)
    read = Return(ends.append, memory, swapped)
    source.fetch(key, slot, read)
    while source.is_under_way(read) or not ends:
        assert not source.cancel(read)
    source.close()
    return slot, read, source


def test_bytes_go_where_they_lie_in_the_host():
    disk = FakeTier()
    slot, read, _ = returned(EmulatedDevice(), disk)
    assert slot.tolist() == [7] * (SLOT_BYTES // 2) + [content(ExpertKey(0, 0))] * (SLOT_BYTES // 2)
    assert (disk.fetched, read.num_bytes, read.error) == ([], 0, None)
    assert read.priority is Priority.READAHEAD


def test_what_the_device_does_not_copy_is_read():
    disk, device = FakeTier(), Refusing()
    slot, read, source = returned(device, disk)
    assert slot.tolist() == [content(ExpertKey(0, 0))] * SLOT_BYTES
    assert (disk.fetched, read.num_bytes) == ([ExpertKey(0, 0)], SLOT_BYTES)
    assert device.num_drains == 1
    assert source.leaving([slot]) == []


def test_a_slot_is_overwritten_behind_what_leaves_it():
    tiers = Tiers(on_device=NUM_LAYERS, on_host=2 * NUM_LAYERS)
    for expert in (0, 1, 2):  # each takes the place of the one before, which is at home in no tier
        tiers.use(keys(0, expert), streaming=False)
    tiers.settle()
    tiers.device.finish()
    for expert in (2, 1, 0):
        tiers.use(keys(0, expert), streaming=False)
    tiers.close()


def filled(on_device: int, on_host: int, number: int) -> Tiers:
    """Tiers whose experts of the first layer were used one after another."""
    tiers = Tiers(on_device=on_device, on_host=on_host)
    for expert in range(number):
        use(tiers, expert)
        rest(tiers)
    return tiers


def use(tiers: Tiers, expert: int) -> None:
    tiers.use(keys(0, expert), streaming=False)


def rest(tiers: Tiers) -> None:
    tiers.device.finish()
    tiers.settle()
    while tiers.host._link.under_way:
        time.sleep(1e-4)


def returning(tiers: Tiers) -> list[threading.Thread]:
    """Threads that wait for what comes back."""
    return tiers.host._fetcher._returns._threads


def test_a_return_that_is_waited_for_leaves_no_demand():
    tiers, gate = filled(2, 2, 4), threading.Event()
    threads = returning(tiers)
    tiers.device.hesitate = lambda: threading.current_thread() in threads and gate.wait(600)
    use(tiers, 4)
    (key,) = [key for key, entry in tiers.host._entries.items() if not entry.arrived]
    asks = threading.Thread(target=use, args=(tiers, key.expert))
    asks.start()
    while not tiers.host.stats().late_hits:
        pass
    gate.set()
    asks.join()
    rest(tiers)
    assert tiers.host._link._demands == 0
    tiers.close()


def test_a_host_that_has_an_expert_holds_no_memory_of_the_device():
    tiers = filled(2, 3, 5)
    reads = [entry.read for entry in tiers.host._entries.values()]
    assert any(isinstance(read, Return) for read in reads)
    assert all(read.offer is None for read in reads if isinstance(read, Return))
    tiers.close()


def in_memory(expert_slots: int = 9, stream_slots: int = 4, **others: int) -> Tiers:
    """Tiers whose host has the experts of the first layers, and the device others."""
    tiers = Tiers(on_device=expert_slots, on_host=18, stream_slots=stream_slots, **others)
    for layer in (0, 1, 2):
        for key in keys(layer, *range(6)):
            tiers.use([key], streaming=False)
    rest(tiers)
    return tiers


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


def test_half_of_the_slots_are_one_copy_and_one_group():
    tiers = in_memory(expert_slots=4, stream_slots=4)
    copies = Copies(tiers)
    tiers.store.reset_stats()
    with copies.patch:
        sizes = groups_of(tiers, keys(0, *range(6)))
        rest(tiers)
    assert max(sizes) == 2
    assert sum(sizes) == 6
    assert sum(number for number, _ in copies.found) == tiers.store.stats().misses > 2
    assert max(number for number, _ in copies.found) == 2
    tiers.close()


def test_what_is_read_ahead_comes_in_one_copy_that_no_demand_hastens():
    tiers = in_memory(stream_slots=6)
    with tiers.store._monitor:
        for key in [*tiers.store._entries]:
            tiers.store._drop(key)
    copies = Copies(tiers)
    with copies.patch:
        tiers.store.read_ahead(keys(0, 0, *range(5), 4))  # who is named twice takes one slot
        tiers.store.check()
        assert copies.found == [(3, Priority.READAHEAD), (2, Priority.READAHEAD)]
        assert sum(groups_of(tiers, keys(0, *range(6)))) == 6
        rest(tiers)
    assert copies.found[2:] == [(1, Priority.DEMAND)]
    stats = tiers.store.stats()
    assert stats.readahead_bytes > 0
    assert tiers.store._link._demands == 0
    tiers.close()


def test_what_the_disk_has_to_read_is_asked_for_beside_the_copies():
    tiers = Tiers(on_device=6, on_host=9, stream_slots=4)
    for key in keys(0, 0, 1, 2):
        tiers.use([key], streaming=False)
    rest(tiers)
    for key in keys(1, *range(4)):
        tiers.use([key], streaming=False)
    rest(tiers)
    assert sum(groups_of(tiers, keys(0, *range(6)))) == 6
    rest(tiers)
    tiers.close()
