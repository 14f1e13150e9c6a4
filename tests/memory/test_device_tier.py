"""Experts in a device's slots: used after their copy only, and not overwritten before."""

import contextlib
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from emulated_device import POISON, EmulatedDevice
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, FakeTier, content, keys, make_store

from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.memory.device import CudaDevice, Device, pin_in_parts
from moe_runtime.memory.io_queue import Priority
from moe_runtime.memory.slab import Slab, aligned_bytes
from moe_runtime.memory.tiers import DeviceStore, TierFetcher
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.types import ExpertKey

DEMAND, AHEAD = Priority.DEMAND, Priority.READAHEAD


class Interrupted(KeyboardInterrupt):
    """What the computation is cut short by."""


class Tiers:
    """An emulated device over host memory over a disk, and work that reads slots when it runs."""

    def __init__(self, *, on_device: int = 6, on_host: int = 7) -> None:
        self.disk, self.device = FakeTier(), EmulatedDevice()
        self.host = make_store(self.disk, on_host)
        self.device.pin(self.host._slab.bytes, SLOT_BYTES)
        self.store = DeviceStore(
            self.device,
            TierFetcher(self.host, self.device),
            Slab(on_device, SLOT_BYTES, allocate=self.device.allocate),
            LayerShares(LRU, even_shares(on_device, NUM_LAYERS)),
            lambda _, slot: slot,
            stream_slots=2,
        )
        self.seen: list[tuple[ExpertKey, list[int]]] = []

    def use(self, wanted: Sequence[ExpertKey], *, streaming: bool, cut_at: int = -1) -> None:
        """Queues work on each expert, which reads it when the device gets there."""
        is_done = False
        lease = self.store.lease(wanted, streaming=streaming)
        try:
            with lease:
                for group in lease:
                    for key, slot in group:
                        self.device.compute(partial(self._look, key, slot))
                        cut_at -= 1
                        if not cut_at:
                            raise Interrupted
            is_done = True
        finally:
            if not is_done:
                self.store.give_up(lease)

    def _look(self, key: ExpertKey, slot: torch.Tensor) -> None:
        self.seen.append((key, slot.unique().tolist()))

    def check(self) -> None:
        self.store.check()
        self.host.check()

    def close(self) -> None:
        self.store.close()
        self.check()
        self.device.finish()
        assert self.seen
        assert [found for found in self.seen if found[1] != [content(found[0])]] == []


def run_schedule(seed: int, num_steps: int) -> Tiers:
    """Leases, read-aheads, faults of the disk and of the link and interrupts, in any order."""
    drawn, tiers = random.Random(seed), Tiers()
    for _ in range(num_steps):
        layer = drawn.randrange(NUM_LAYERS)
        wanted = keys(layer, *drawn.sample(range(NUM_EXPERTS), drawn.randint(1, NUM_EXPERTS)))
        tiers.disk.broken = {wanted[0]} if drawn.random() < 0.15 else set()
        device, fault = tiers.device, MemoryError("as asked")
        kind = drawn.randrange(8)
        (device.faults if kind == 0 else device.late_faults if kind == 1 else []).append(fault)
        if drawn.random() < 0.2:
            tiers.store.read_ahead(wanted)
        else:
            streaming, cut_at = drawn.random() < 0.5, drawn.choice([-1, -1, 1, 2])
            with contextlib.suppress(MoERuntimeError, Interrupted):
                tiers.use(wanted, streaming=streaming, cut_at=cut_at)
        tiers.check()
        if drawn.random() < 0.2:
            tiers.device.finish()
    tiers.disk.broken = set()
    tiers.device.faults.clear()
    tiers.device.late_faults.clear()
    tiers.use(keys(0, 0), streaming=False)
    tiers.close()
    return tiers


def test_any_schedule_shows_work_the_right_bytes() -> None:
    for seed in range(25):
        run_schedule(seed, 12)


@pytest.mark.long
def test_ten_thousand_schedules_show_work_the_right_bytes() -> None:
    for seed in range(10_000):
        run_schedule(seed, 12)


def test_a_copy_waits_for_the_work_that_was_queued_before_its_slot_was_given_up() -> None:
    tiers = Tiers(on_device=3)  # one for each layer
    device, (first, second) = tiers.device, keys(0, 0, 1)
    with tiers.store.lease([first]) as lease:
        for group in lease:
            slot = group[0][1]
            work = device.compute(partial(tiers._look, first, slot), duration_s=5.0)
            assert not work.query()
    tiers.use([second], streaming=False)
    assert device.now_s > 5.0  # of the copy, which somebody waited for
    tiers.close()


def test_copies_run_beside_work_that_was_queued_after_they_were_asked_for() -> None:
    device = EmulatedDevice(bytes_per_s=1e6, latency_s=0.0)
    source, slots = torch.ones(1000, dtype=torch.uint8), device.allocate(2000).split(1000)
    device.pin(source, 1000)
    copies = []
    for slot in slots:
        after = device.vacate(slot)
        device.compute(lambda: None, duration_s=1e-3)
        copies.append(device.copy(source, slot, after, DEMAND))
    device.finish()
    # two copies and two pieces of work of a millisecond; the second copy waits for the first work
    assert [copy.time_s for copy in copies] == pytest.approx([1e-3, 2e-3])
    assert device.now_s == pytest.approx(2e-3)


def test_a_slot_is_poison_until_its_copy_is_done() -> None:
    device = EmulatedDevice()
    source, slot = torch.zeros(16, dtype=torch.uint8), device.allocate(16)
    device.pin(source, 16)
    device.copy(source, slot, device.vacate(slot), AHEAD).synchronize()
    assert slot.unique().tolist() == [0]
    after = device.vacate(slot)
    assert slot.unique().tolist() == [POISON]
    assert slot.view(torch.bfloat16).isnan().all()
    assert slot.view(torch.float32).isnan().all()
    copy = device.copy(source, slot, after, AHEAD)
    assert not copy.query()
    assert slot.unique().tolist() == [POISON]
    copy.synchronize()
    assert slot.unique().tolist() == [0]


@pytest.mark.parametrize("place", ["faults", "late_faults"])
def test_a_copy_that_fails_ends_its_read_and_writes_no_more(place: str) -> None:
    tiers, (wanted, other) = Tiers(), keys(0, 3, 4)
    getattr(tiers.device, place).append(MemoryError("no memory left"))
    with pytest.raises(MoERuntimeError, match="MemoryError: no memory left"):
        tiers.use([wanted], streaming=False)
    assert tiers.device.num_drains == 1
    tiers.check()
    tiers.use([wanted, other], streaming=False)
    tiers.close()


def test_a_disk_that_fails_ends_the_read_of_the_device() -> None:
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
def test_host_memory_is_pinned_in_parts_that_no_slot_crosses(
    slot_bytes: int, num_slots: int
) -> None:
    runtime, slab = FakeRuntime(), Slab(num_slots, slot_bytes)
    pin_in_parts(runtime, slab.bytes, slot_bytes, part_bytes=16_384)
    assert sum(runtime.held.values()) == num_slots * slot_bytes
    first = slab.slot(0).data_ptr()
    assert all((start - first) % slot_bytes == 0 for start in runtime.held)
    if slot_bytes != 5000:  # whose parts end with a page after 625 KB only
        assert runtime.largest <= 16_384


def test_host_memory_is_given_back_before_it_goes() -> None:
    runtime, memory = FakeRuntime(), aligned_bytes(65_536)
    pin_in_parts(runtime, memory, 4096, part_bytes=16_384)
    view = memory[:10]
    del memory
    assert len(runtime.held) == 4  # a view is left that a copy may read
    del view
    assert not runtime.held


def test_memory_that_may_not_be_locked_is_said_in_a_line_and_none_stays_locked() -> None:
    runtime, memory = FakeRuntime(limit=40_000), aligned_bytes(65_536)
    with pytest.raises(CapacityError, match=r"cannot lock 64 KiB .*ulimit -l"):
        pin_in_parts(runtime, memory, 4096, part_bytes=16_384)
    assert not runtime.held


@pytest.mark.gpu
def test_a_cuda_device_copies_behind_the_work_of_every_stream_that_computes() -> None:
    device: Device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    source = aligned_bytes(1 << 24)
    source.fill_(7)
    device.pin(source, 1 << 24)
    assert source.is_pinned()
    slot = device.allocate(1 << 24).fill_(1)
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        device.compute_here()
        torch.cuda._sleep(50_000_000)
        sums.append(slot.sum())
        after = device.vacate(slot)
    for priority in Priority:
        done = device.copy(source, slot, after, priority)
        assert priority is AHEAD or not done.query()
    done.synchronize()
    assert int(sums[0]) == 1 << 24
    assert bool((slot == 7).all())
    device.drain()
