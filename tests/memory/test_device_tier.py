"""Experts in a device's slots: used after their copy only, and not overwritten before."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from device_tiers import Interrupted, Tiers
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, keys
from injection import KINDS, struck

from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.memory import reads
from moe_runtime.memory.device.cuda_device import CudaCopy, CudaDevice, pin_in_parts
from moe_runtime.memory.device.recent_uses import RecentUses
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.source import Slab, aligned_bytes
from moe_runtime.types import ExpertKey

DEMAND, AHEAD = Priority.DEMAND, Priority.READAHEAD


def run_schedule(seed: int, num_steps: int) -> Tiers:
    """Leases, read-aheads, faults of the disk and of the link, exceptions in any call of the
    stores, and interrupts, in any order."""
    drawn = random.Random(seed)
    on_device, on_host, streams = (drawn.choice(pair) for pair in ((6, 9), (7, 18), (2, 5)))
    tiers, uses = Tiers(on_device=on_device, on_host=on_host, stream_slots=streams), RecentUses()
    naps = random.Random(seed)  # other threads draw from it
    tiers.device.hesitate = lambda: time.sleep(naps.choice((0.0, 0.0, 3e-4)))
    for _ in range(num_steps):
        layer = drawn.randrange(NUM_LAYERS)
        wanted = keys(layer, *drawn.sample(range(NUM_EXPERTS), drawn.randint(1, NUM_EXPERTS)))
        tiers.disk.broken = {wanted[0]} if drawn.random() < 0.15 else set()
        device, fault = tiers.device, MemoryError("as asked")
        kind = drawn.randrange(8)
        (device.faults if kind == 0 else device.late_faults if kind == 1 else []).append(fault)
        strike = contextlib.nullcontext()
        if drawn.random() < 0.3:
            strike = struck(drawn.randint(1, 120), drawn.choice(KINDS), "memory/")
        action, here = drawn.random(), tiers.device.stream(drawn.randrange(3))
        with contextlib.suppress(MoERuntimeError, *KINDS), strike, here:
            if action < 0.1:
                tiers.store.read_ahead(wanted)
            elif action < 0.2:
                uses.count(layer, [key.expert for key in wanted[:2]])
                tiers.store.bring(wanted[:2], uses)
            elif action < 0.4:
                tiers.use_residents(layer)
            else:
                cut_at, streaming = drawn.choice([-1, -1, 1, 2]), drawn.random() < 0.5
                if action < 0.6:
                    tiers.use_step(wanted[:3], is_cut=cut_at == 1)
                else:
                    tiers.use(wanted, streaming=streaming, cut_at=cut_at)
        tiers.store.end_leases()
        tiers.check()
        if drawn.random() < 0.2:
            tiers.device.finish()
    tiers.disk.broken = set()
    tiers.device.faults.clear()
    tiers.device.late_faults.clear()
    tiers.settle()
    with contextlib.suppress(MoERuntimeError):  # of a copy whose failure was not told so far
        tiers.store.lease(keys(0, 0))
    tiers.use(keys(0, 0), streaming=False)
    tiers.close()
    return tiers


def test_any_schedule_shows_work_the_right_bytes():
    for seed in range(15):
        run_schedule(seed, 12)


@pytest.mark.long
def test_ten_thousand_schedules_show_work_the_right_bytes():
    for seed in range(10_000):
        run_schedule(seed, 12)


def test_a_copy_waits_for_the_work_that_was_queued_before_its_slot_was_given_up():
    tiers = Tiers(on_device=3)  # one for each layer
    device, (first, second) = tiers.device, keys(0, 0, 1)
    with tiers.store.lease([first]) as lease:
        for group in lease:
            slot = group[0][1]
            work = device.compute(partial(tiers._look, first, slot), duration_s=5.0)
            assert not work.query()
    tiers.use([second], streaming=False)
    tiers.settle()
    assert device.now_s > 5.0  # of the copy, which somebody waited for
    # the link's own time: its latency and the bytes, not the work that was waited for
    link_s = 1e-5 + SLOT_BYTES / 1e9
    assert tiers.store.fetcher.speed.seconds_per_byte == pytest.approx(link_s / SLOT_BYTES)
    tiers.close()


def test_of_copies_at_once_each_has_the_time_after_the_one_before():
    """On CUDA, whose events tell milliseconds between any two."""
    times_ms = {"a": (0.0, 4.0), "b": (1.0, 6.0), "c": (8.0, 9.0)}

    class At:
        def __init__(self, time_ms: float) -> None:
            self.time_ms = time_ms

        def elapsed_time(self, end: "At") -> float:
            return end.time_ms - self.time_ms

    copies = [CudaCopy(At(begun), At(done)) for begun, done in times_ms.values()]
    pairs = zip([None, *copies], copies, strict=False)
    assert [copy.seconds_after(before) for before, copy in pairs] == pytest.approx(
        [4e-3, 2e-3, 1e-3]
    )
    assert copies[0].seconds_after(copies[1]) == 0.0  # it ended first, whoever says so first


class HeldWaits:
    """Waits for copies that do not begin until they are let, on the threads that copy."""

    def __init__(self, tiers: Tiers) -> None:
        tiers.settle()
        self._may_go = threading.Event()
        tiers.device.hesitate = self._may_go.wait
        self.let_go = self._may_go.set


def test_work_is_queued_behind_copies_that_the_host_does_not_wait_for():
    tiers, (resident, *arriving) = Tiers(), keys(0, 0, 1)
    tiers.use([resident], streaming=False)
    waits = HeldWaits(tiers)
    order, num_waits = [], tiers.device.num_waits
    with tiers.device.stream(2), tiers.store.lease([resident, *arriving]) as lease:
        for group in lease:
            for key, slot in group:
                order.append(key)
                tiers.device.compute(partial(tiers._look, key, slot))
            tiers.store.check()
    assert order == [resident, *arriving]  # whose read has not ended
    assert tiers.device.num_waits == num_waits + 1
    entries = tiers.store._entries
    assert not entries[arriving[0]].arrived
    waits.let_go()
    tiers.close()


def test_a_slot_is_not_taken_from_an_expert_whose_copy_is_only_queued():
    tiers = Tiers(on_device=3)  # one slot for each layer
    tiers.use(keys(1, 0), streaming=False)
    tiers.use(keys(2, 0), streaming=False)
    waits, (first, second) = HeldWaits(tiers), keys(0, 0, 1)
    tiers.use([first], streaming=False)
    lease = tiers.store.lease([second])
    with lease:
        slot = tiers.store._entries[second].slot
        assert slot != tiers.store._entries[first].slot
    waits.let_go()
    tiers.close()


def test_what_failed_behind_queued_work_is_told_to_the_next_lease_once():
    tiers, (wanted, other) = Tiers(), keys(0, 0, 1)
    waits = HeldWaits(tiers)
    tiers.device.late_faults.append(MemoryError("no memory left"))
    tiers.use([wanted], streaming=False)
    waits.let_go()
    tiers.settle()
    assert tiers.device.num_drains == 1
    with pytest.raises(MoERuntimeError, match=r"MemoryError: no memory left; .* is void"):
        tiers.use([other], streaming=False)
    tiers.use([wanted, other], streaming=False)
    tiers.close()


def test_work_on_resident_experts_holds_their_slots_on_any_stream():
    tiers, (first, second) = Tiers(on_device=3), keys(0, 0, 1)
    for key in (*keys(1, 0), *keys(2, 0), first):  # all slots
        tiers.use([key], streaming=False)
    tiers.settle()

    def look(found: list[torch.Tensor]) -> bool:
        tiers.device.compute(partial(tiers._look, first, found[0]), duration_s=5.0)
        return True

    with tiers.device.stream(1):
        assert tiers.store.use_resident([first], look)
    tiers.use([second], streaming=False)
    tiers.close()


@pytest.mark.parametrize("place", ["faults", "late_faults"])
def test_a_copy_that_fails_ends_its_read_and_writes_no_more(place):
    tiers, (wanted, other) = Tiers(), keys(0, 3, 4)
    getattr(tiers.device, place).append(MemoryError("no memory left"))
    if place == "late_faults":
        tiers.store.read_ahead([wanted])  # nobody computes behind it
        tiers.settle()
        assert wanted not in tiers.store._entries
    else:
        with pytest.raises(MoERuntimeError, match="MemoryError: no memory left"):
            tiers.use([wanted], streaming=False)
    assert tiers.device.num_drains == 1
    tiers.check()
    tiers.use([wanted, other], streaming=False)
    tiers.close()


def test_a_disk_that_fails_ends_the_read_of_the_device():
    tiers, (wanted,) = Tiers(), keys(1, 2)
    tiers.disk.broken = {wanted}
    with pytest.raises(CheckpointError, match="broken"):
        tiers.use([wanted], streaming=False)
    tiers.disk.broken = set()
    tiers.use([wanted], streaming=False)
    tiers.close()


class FakeRuntime:
    """Registers host memory as CUDA does: nothing twice, no page twice, and only so much."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.largest = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.held.values()) + size > self.limit:
            return 2
        assert not any(start < address + size and address < start + n for start, n in self.spans())
        self.held[address] = size
        self.largest = max(self.largest, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.held.pop(address)
        return 0

    def spans(self) -> list[tuple[int, int]]:
        return [(start // 4096 * 4096, n + start % 4096) for start, n in self.held.items()]


@pytest.mark.parametrize(
    ("slot_bytes", "num_slots"), [(4096, 9), (1024, 40), (6144, 11), (5000, 7)]
)
def test_host_memory_is_pinned_in_parts_that_no_slot_crosses(slot_bytes, num_slots):
    runtime, slab = FakeRuntime(), Slab(num_slots, slot_bytes)
    pin_in_parts(runtime, slab.bytes, slot_bytes, part_bytes=16_384)
    assert sum(runtime.held.values()) == num_slots * slot_bytes
    first = slab.slot(0).data_ptr()
    assert all((start - first) % slot_bytes == 0 for start in runtime.held)
    if slot_bytes != 5000:  # whose parts end with a page after 625 KB only
        assert runtime.largest <= 16_384


def test_host_memory_is_given_back_before_it_goes():
    runtime, memory = FakeRuntime(), aligned_bytes(65_536)
    pin_in_parts(runtime, memory, 4096, part_bytes=16_384)
    view = memory[:10]
    del memory
    assert len(runtime.held) == 4  # a view is left that a copy may read
    del view
    assert not runtime.held


def test_the_gpu_that_reads_host_memory_is_waited_for_before_it_goes():
    """Which need not be the current one."""
    waited: list[Any] = []
    memory, place = aligned_bytes(4096), torch.device("cuda", 1)
    with (
        patch.object(torch.cuda, "is_initialized", lambda: True),
        patch.object(torch.cuda, "synchronize", waited.append),
    ):
        pin_in_parts(FakeRuntime(), memory, 4096, place=place)
        del memory
    assert waited == [place]


def test_memory_that_may_not_be_locked_is_said_in_a_line_and_none_stays_locked():
    runtime, memory = FakeRuntime(limit=40_000), aligned_bytes(65_536)
    with pytest.raises(CapacityError, match=r"cannot lock 64 KiB .*ulimit -l"):
        pin_in_parts(runtime, memory, 4096, part_bytes=16_384)
    assert not runtime.held


@pytest.mark.gpu
def test_a_cuda_device_copies_behind_the_work_of_every_stream_that_computes():
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    source = aligned_bytes(1 << 24)
    source.fill_(7)
    device.pin(source, 1 << 24)
    assert device.reads_host(source)  # it is pinned
    slot = device.allocate(1 << 24).fill_(1)
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        device.compute_here()
        torch.cuda._sleep(50_000_000)
        sums.append(slot.sum())
        after = device.vacate(slot)
    copies = []
    for priority in Priority:
        done = device.copy([(source, slot)], after, priority)
        assert priority is AHEAD or not done.query()
        copies.append(done)
    with torch.cuda.stream(torch.cuda.Stream()):
        device.compute_here()
        device.wait_here(done)  # and the host does not
        sums.append(slot.sum())
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == [1 << 24, 7 << 24]
    assert bool((slot == 7).all())
    # what the copies waited for, tens of milliseconds, is not part of their time
    waited_s = copies[0].begun.elapsed_time(copies[0].done) / 1e3
    assert 0 < copies[0].seconds_after(None) == waited_s < 0.02
    device.drain()


def test_work_on_residents_looks_at_nobody_who_was_evicted():
    tiers, (first, second) = Tiers(on_device=3), keys(0, 0, 1)  # one slot for each layer
    for layer in (1, 2, 0):
        tiers.use(keys(layer, 0), streaming=False)
    tiers.settle()
    tiers.use_residents(0)
    waits, lease = HeldWaits(tiers), tiers.store.lease([second])
    with lease:
        for _ in lease:  # its copy is queued, and has not ended
            tiers.use_residents(0)
    tiers.use_residents(0)
    waits.let_go()
    tiers.settle()
    tiers.use_residents(0)
    tiers.close()
    assert {first, second} < {key for key, _ in tiers.seen}


def ready(*on_device: int) -> Tiers:
    """Six experts of a layer in the host's memory, of which these two are on the device too, beside
    the last one of the others."""
    tiers = Tiers(on_device=3, on_host=18)
    for expert in (*(e for e in range(6) if e not in on_device), *on_device):
        tiers.use(keys(0, expert), streaming=False)
    tiers.settle()
    tiers.store.reset_stats()
    return tiers


def test_experts_that_are_resident_below_are_one_copy_and_no_lease():
    tiers = ready(0, 1)
    copies, copy = list[int](), tiers.device.copy
    with patch.object(tiers.device, "copy", lambda *a: copies.append(len(a[0])) or copy(*a)):
        assert tiers.use_step(keys(0, 1, 4)) == []
        tiers.check()
        stats = tiers.store.stats()
        assert (stats.hits, stats.misses, stats.evictions) == (1, 1, 1)
        tiers.settle()
        assert tiers.use_step(keys(0, 4, 1)) == []  # the used one was not evicted
        assert (tiers.store.stats().hits, tiers.store.stats().misses) == (3, 1)
        assert tiers.use_step(keys(0, 2, 3)) == []
    assert copies == [1, 2]
    tiers.close()


def test_what_cannot_be_had_so_is_left_to_a_lease():
    tiers = ready(0, 1)
    assert tiers.use_step(keys(1, 0)) == keys(1, 0)  # it lies on the disk
    tiers.settle()
    tiers.use(keys(0, 0), streaming=False)
    tiers.settle()
    tiers.store.reset_stats()
    assert tiers.use_step(keys(0, 0, 2, 3, 4)) == keys(0, 4)  # for which there is no slot
    stats = tiers.store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (1, 0, 3)
    tiers.close()


def test_copies_that_are_refused_together_are_made_one_by_one_or_by_threads():
    for num_faults, left in ((1, []), (2, keys(0, 3, 4)), (3, keys(0, 3, 4))):
        tiers = ready(0, 1)
        tiers.device.faults.extend(MemoryError("as asked") for _ in range(num_faults))
        assert tiers.use_step(keys(0, 0, 3, 4)) == left
        assert not tiers.device.faults
        tiers.settle()
        tiers.close()


def test_a_copy_that_fails_is_told():
    tiers = ready(0, 1)
    tiers.device.late_faults.append(OSError("unplugged"))
    with pytest.raises(MoERuntimeError, match="unplugged"):  # noqa: PT012
        assert tiers.use_step(keys(0, 4)) == []
        tiers.store.fetcher.finish_used()
    tiers.seen = [found for found in tiers.seen if found[0] not in keys(0, 4)]  # what is void
    tiers.use_step(keys(0, 4))
    tiers.close()


def lacks_a_slot(tiers: Tiers, number: int) -> bool:
    """Whether so many leases of the host's tier wait for a slot."""
    with tiers.host._monitor:
        return sum(not lease.all_started for lease in tiers.host._leases) == number


def test_reads_that_wait_for_slots_below_do_not_wait_for_copies_that_hold_them():
    tiers = Tiers(on_device=9, on_host=1)
    held, *missing = keys(0, 0, 1, 2, 3)
    with tiers.host.lease([held]) as lease:
        next(iter(lease))
        with tiers.store.lease(missing) as absent:
            while not lacks_a_slot(tiers, len(missing)):  # all threads that read
                time.sleep(1e-4)
            with tiers.store.lease([held]) as resident:  # its copy is queued at once
                lease.__exit__()
                assert [key for group in resident for key, _ in group] == [held]
            assert {key for group in absent for key, _ in group} == {*missing}
    tiers.use([held], streaming=False)
    tiers.settle()
    tiers.close()


RESIDENT_BELOW = [ExpertKey(0, expert) for expert in range(3)]
PATIENCE_S = 600
"""What hangs fails after this."""


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    with patch.object(reads, "PATIENCE_S", None):  # who is not woken sleeps for ever
        tiers = Tiers()
        with tiers.host.lease(RESIDENT_BELOW) as lease:
            assert sum(map(len, lease)) == len(RESIDENT_BELOW)
        tiers.use([ExpertKey(1, 0)], streaming=False)
        yield tiers
        tiers.close()


def returns(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def leave_at_once(tiers: Tiers) -> None:
    with tiers.store.lease(RESIDENT_BELOW[:2]):
        pass


def leave_first_group(tiers: Tiers) -> None:
    with tiers.store.lease(RESIDENT_BELOW[:2]) as lease:
        assert next(iter(lease))


def fail(tiers: Tiers) -> None:
    with suppress(Interrupted):
        tiers.use(RESIDENT_BELOW[:2], streaming=False, cut_at=1)


@pytest.mark.parametrize("leave", [leave_at_once, leave_first_group, fail])
def test_copies_of_a_lease_that_is_left_end(tiers, leave):
    leave(tiers)
    if leave is not fail:
        assert returns(tiers.store.fetcher.finish_used)
    assert returns(tiers.settle)
    tiers.check()


def test_who_was_just_used_is_counted_before_somebody_makes_room(tiers):
    """Also where nobody has leased since: what the CPU computed is brought behind it, if it was
    used more."""
    store = tiers.store
    for layer in range(NUM_LAYERS):  # which have two slots each
        tiers.use([ExpertKey(layer, expert) for expert in range(2)], streaming=False)
    tiers.device.finish()
    tiers.settle()
    used, other, brought = RESIDENT_BELOW
    residents = store.with_residents(0, lambda _: None)
    _, event = tiers.device.download(torch.tensor([used.expert]))
    event.synchronize()
    assert store.count_residents(residents, [used.expert], event, lambda: [used])
    uses = RecentUses()
    store.bring([brought], uses)
    tiers.settle()
    assert not store.has(brought)  # it was used no more than those that stay
    for _ in range(3):
        uses.count(0, [brought.expert])
    store.bring([brought], uses)
    tiers.settle()
    assert (store.has(used), store.has(other), store.has(brought)) == (True, False, True)
    tiers.check()
