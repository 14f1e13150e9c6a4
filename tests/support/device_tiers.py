"""An emulated device over host memory over a disk, with work that looks at slots when it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from emulated_device import POISON, EmulatedDevice
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, FakeTier, content

from moe_runtime.memory.device.device_store import DeviceStore, use_arriving
from moe_runtime.memory.source import Slab
from moe_runtime.memory.tiers import LowerStore, ReturningSource, TierFetcher
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.types import ExpertKey


class Interrupted(KeyboardInterrupt):
    """What the computation is cut short by."""


class Slots:
    """Kernels that take the slots of a layer's experts, or below 0 for none."""

    def takes(self, layer: int, dtype: torch.dtype) -> bool:
        return True

    def num_experts(self, layer: int) -> int:
        return NUM_EXPERTS

    def stack(self, layer: int, slots: Sequence[int]) -> Sequence[int]:
        return slots


class Tiers:
    """An emulated device over host memory over a disk, and work that reads slots when it runs."""

    def __init__(self, *, on_device: int = 6, on_host: int = 7, stream_slots: int = 2) -> None:
        self.disk, self.device = FakeTier(), EmulatedDevice()
        self.host = LowerStore(
            ReturningSource(self.disk, self.device),
            Slab(on_host, SLOT_BYTES),
            LayerShares(LRU, even_shares(on_host, NUM_LAYERS)),
            lambda _, slot: slot,
            stream_slots=2,
        )
        self.host._slab.bytes.fill_(POISON)
        self.device.pin(self.host._slab.bytes, SLOT_BYTES)
        self.store = DeviceStore(
            self.device,
            TierFetcher(self.host, self.device),
            Slab(on_device, SLOT_BYTES, allocate=self.device.allocate),
            LayerShares(LRU, even_shares(on_device, NUM_LAYERS)),
            lambda _, slot: slot,
            stream_slots=stream_slots,
        )
        self.store.stacks = Slots()
        self.seen: list[tuple[ExpertKey, list[int]]] = []

    def use(self, wanted: Sequence[ExpertKey], *, streaming: bool, cut_at: int = -1) -> None:
        """Queues work on each expert, which reads it when the device gets there."""
        given = list[ExpertKey]()
        with self.store.lease(wanted, streaming=streaming) as lease:
            for group in lease:
                for key, slot in group:
                    given.append(key)
                    self.device.compute(partial(self._look, key, slot))
                    cut_at -= 1
                    if not cut_at:
                        raise Interrupted
        assert sorted(given) == sorted(wanted)

    def use_residents(self, layer: int) -> None:
        """Queues work on whoever is in a slot now."""

        def launch(slots: Sequence[int]) -> None:
            for expert, slot in enumerate(slots):
                if slot >= 0:
                    memory = self.store._slab.slot(slot)
                    self.device.compute(partial(self._look, ExpertKey(layer, expert), memory))

        self.store.launch_residents(layer, launch)

    def use_step(self, wanted: Sequence[ExpertKey], *, is_cut: bool = False) -> list[ExpertKey]:
        """What a decode step does: residents at once, what is missing behind one copy, and what
        cannot be had so by a lease. Returns those that were leased."""
        store = self.store

        def queue(keys: Sequence[ExpertKey]) -> None:
            for key in keys:
                memory = store._slab.slot(store._entries[key].slot)
                self.device.compute(partial(self._look, key, memory))
                if is_cut:
                    raise Interrupted

        found = store.with_residents(
            wanted[0].layer,
            lambda found: queue([key for key in wanted if key.expert in found.experts]),
        )
        left = [*use_arriving(store, wanted, found, queue)]
        if left:
            self.use(left, streaming=False)
        return left

    def _look(self, key: ExpertKey, slot: torch.Tensor) -> None:
        self.seen.append((key, slot.unique().tolist()))

    def settle(self) -> None:
        """Waits until the host knows that all reads have ended."""
        while self.store._link.under_way or self.host._link.under_way:
            time.sleep(1e-4)
        for store in (self.store, self.host):
            with store._monitor:  # delivers what ended
                pass

    def check(self) -> None:
        self.store.check()
        self.host.check()
        for layer in range(0 if self.store.is_closed else NUM_LAYERS):
            self.check_residents(layer)

    def check_residents(self, layer: int) -> None:
        """Compares what kernels are told of a layer with what its entries say."""
        store = self.store
        with store._monitor:
            here = {
                key: entry.slot
                for key, entry in store._entries.items()
                if key.layer == layer and entry.arrived and entry.read.error is None
            }
            slots = [here.get(ExpertKey(layer, expert), -1) for expert in range(NUM_EXPERTS)]
            are_all = len(here) == NUM_EXPERTS and not here.keys() & store._unadmitted
            made = store._find_residents(layer, 0)  # from what was noted since it was first asked
            for found in (store._residents.setdefault(layer, made), made):
                assert found.slots.tolist() == slots
                assert found.experts == {key.expert for key in here}
                assert found.are_all == are_all

    def close(self) -> None:
        self.store.close()
        self.check()
        self.device.finish()
        assert self.seen
        assert [found for found in self.seen if found[1] != [content(found[0])]] == []
