"""The store of experts in slots of a device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from moe_runtime.memory.device.arrivals import Planned
from moe_runtime.memory.device.device import Device, Event
from moe_runtime.memory.device.device_lease import DeviceLease
from moe_runtime.memory.device.residents import Residents, Slots, SlotStacks, is_resident
from moe_runtime.memory.device.returning import LowerStore
from moe_runtime.memory.entries import Entry
from moe_runtime.memory.io_queue import Priority, Read
from moe_runtime.memory.tier_fetcher import TierFetcher
from moe_runtime.memory.tiers import TierStore
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")
R = TypeVar("R")
_MOST_UNCOUNTED = 64
"""Uses of residents that wait to be counted, of a layer or of a whole step each."""


class DeviceStore(TierStore[W]):
    """Experts in slots of a device.

    A lease is for work that is queued on the caller's current stream while the lease yields: it may
    be any stream, and may change from lease to lease.

    Attributes:
        device: whose slots they are.
        stacks: how kernels take them, if they do.
        recorded: a step that is replayed over these slots, which goes with them.
        host_tables: of experts that steps read in the host's memory, where they do.
    """

    def __init__(self, device: Device, fetcher: TierFetcher, *args: Any, **kwargs: Any) -> None:
        """Takes the device, and what ``ExpertStore`` takes."""
        super().__init__(fetcher, *args, **kwargs)
        self.device = device
        self.stacks: SlotStacks | None = None
        self.recorded: Any = None
        self.host_tables: Any = None
        self._residents: dict[int, Residents] = {}
        self._slots: dict[int, Slots] = {}  # by layers; of who is in a slot
        self._planned: deque[Planned] = deque()
        self._uncounted: deque[tuple[Event, Callable[[], Sequence[ExpertKey]]]] = deque()
        if isinstance(fetcher.lower, LowerStore):
            own = weakref.ref(self)
            fetcher.lower.is_above = lambda key: (above := own()) is not None and above.has(key)

    def has(self, key: ExpertKey) -> bool:
        """Whether an expert is in a slot, as a look without the lock has it."""
        return is_resident(self._entries.get(key))

    def lease(
        self, keys: Sequence[ExpertKey], *, streaming: bool = False, above: Read | None = None
    ) -> DeviceLease[W]:
        """As ``ExpertStore.lease``.

        Raises:
            MoERuntimeError: a copy failed that earlier work was queued behind.
        """
        self.fetcher.raise_failure()
        self.device.compute_here()
        self._count_uses(waits=True)
        return DeviceLease(self, keys, streaming=streaming, above=above)

    def use_resident(
        self, keys: Sequence[ExpertKey], use: Callable[[list[W]], R | None]
    ) -> R | None:
        """As ``ExpertStore.use_resident``, for work that is queued on the current stream.

        Raises:
            MoERuntimeError: a copy failed that earlier work was queued behind.
        """
        self.fetcher.raise_failure()
        self.device.compute_here()
        return super().use_resident(keys, use)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self._slab.slot_bytes

    @property
    def stream_batch(self) -> int:
        """Experts of a stream that are copied and computed together: those of half of its slots, so
        that the device computes them while others are copied."""
        return -(-self._stream_slots // 2)

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        """As ``ExpertStore.read_ahead``; what is resident below is copied together."""
        with self._changed:
            room = min(len(self._free), self._stream_slots - len(self._streamed))
            absent = [key for key in dict.fromkeys(keys) if key not in self._entries]
            del absent[max(0, room) :]
            for start in range(0, len(absent), self.stream_batch):
                batch = absent[start : start + self.stream_batch]
                for key in self.start_together(batch, (), passes=True, priority=Priority.READAHEAD):
                    self._entries[key].expected = True
            super().read_ahead(keys)
        self.fetcher.tell_ends()

    def has_stack(self, layer: int, dtype: torch.dtype) -> bool:
        """Whether kernels take the experts of a layer as one stack, for rows of this type."""
        return self.stacks is not None and self.stacks.takes(layer, dtype)

    def launch_residents(self, layer: int, launch: Callable[[Any], object]) -> Residents:
        """Queues work on all experts of a layer that are in their slots; nothing is waited for.

        Args:
            layer: one with a stack.
            launch: is given the stack, unless nobody is there; it must not wait.

        Raises:
            MoERuntimeError: a copy failed that earlier work was queued behind.
        """
        return self.with_residents(layer, lambda found: found.experts and launch(found.stack))

    def with_residents(self, layer: int, queue: Callable[[Residents], object]) -> Residents:
        """As ``launch_residents``, but the work is queued whoever is there.

        Nobody is evicted while it is queued, and what fills a slot later runs behind it.
        """
        self.fetcher.raise_failure()
        stream = self.device.compute_here()
        with self._changed:
            found = self._residents.get(layer)
            if found is None or found.stream != stream:
                found = self._residents[layer] = self._find_residents(layer, stream)
            queue(found)
            return found

    def with_same_residents(
        self, expected: Mapping[int, Residents], queue: Callable[[], object]
    ) -> bool:
        """As ``with_residents`` for several layers, if all are as they were found before.

        Returns:
            Whether they are; otherwise nothing is queued.
        """
        self.fetcher.raise_failure()
        stream = self.device.compute_here()
        with self._changed:
            for layer, found in expected.items():
                if self._residents.get(layer) is not found or found.stream != stream:
                    return False
            queue()
            return True

    def stack_of(self, keys: Sequence[ExpertKey], into: torch.Tensor | None = None) -> Any:
        """What kernels take of experts of one layer that a lease has just yielded.

        Args:
            keys: the experts.
            into: as of ``SlotStacks.stack``.
        """
        assert self.stacks is not None, "the layer has a stack"
        layer = keys[0].layer
        slots = np.full(self.stacks.num_experts(layer), -1, np.int32)
        with self._changed:
            for key in keys:
                slots[key.expert] = self._entries[key].slot
        return self.stacks.stack(layer, slots, into)

    def count_later(self, event: Event, used: Callable[[], Sequence[ExpertKey]]) -> None:
        """Counts the use of residents once the device has told who they were, and somebody looks.

        Args:
            event: when it has.
            used: says who, those wanted most last; called behind the event.
        """
        with self._changed:
            self._uncounted.append((event, used))
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self.count_one()

    def count_one(self) -> bool:
        """Counts what was to be counted later, the oldest first, for who has to wait anyway.

        Returns:
            Whether the device has told of it.
        """
        with self._changed:
            if not self._uncounted or not self._uncounted[0][0].query():
                return False
            # first: what an exception cuts short is not counted twice
            for key in self._uncounted.popleft()[1]():
                self._count_use(key)
            return True

    def count_behind(self, event: Event) -> None:
        """Counts what waits for an event that is about to be used anew, and all before it."""
        with self._changed:
            while any(waited_for is event for waited_for, _ in self._uncounted):
                self._uncounted[0][0].synchronize()
                self.count_one()

    def count_residents(
        self, residents: Residents, ids: Sequence[int], event: Event, keys: Callable[[], Any]
    ) -> bool:
        """Counts the use of what was launched with the residents, if that is all that a step wants.

        Then nothing has to be leased: nobody else takes a slot before the launched work has ended.

        Args:
            residents: of a layer, as ``with_residents`` returned them.
            ids: experts that are wanted.
            event: as of ``count_later``.
            keys: as ``used`` of ``count_later``.
        """
        if self._streamed or self.listener is not None or not residents.experts.issuperset(ids):
            return False
        self.count_later(event, keys)
        return True

    def bring(self, keys: Sequence[ExpertKey]) -> None:
        """Begins to copy experts behind all demands, and keeps them as if a lease had asked.

        For what was computed elsewhere and will perhaps be asked for again. Nobody waits for it,
        and what is leased stays. A policy that decides after a use is not asked: it gets nothing.
        """
        self._count_uses(waits=False)  # who was just used gives no slot
        with self._changed:
            for key in keys if not self.decides_later else ():
                if key in self._entries:
                    continue
                slot = self._take_slot(key, keep=True)
                if slot is None:
                    return
                self._start(key, slot, keep=True, priority=Priority.READAHEAD)

    def count_misses(
        self,
        copied: Sequence[ExpertKey],
        num_computed: int,
        seconds: float,
        begun_s: float,
        host_s: float,
    ) -> None:
        """Counts misses of a layer: what the CPU computed, and the time of those that were planned.

        Args:
            copied: those that a lease has just demanded.
            num_computed: those that the CPU computed.
            seconds: predicted for both; 0 if that was no plan.
            begun_s: when that began, of ``time.perf_counter``.
            host_s: when the CPU had done its part.
        """
        with self._changed:
            self._counters.misses += num_computed
            self._counters.computed_misses += num_computed
            if seconds:
                entries = (self._entries.get(key) for key in copied)
                reads = [entry.read for entry in entries if entry is not None]
                self._planned.append(Planned(seconds, begun_s, host_s, reads))
            self._count_plans()

    def stats(self) -> StoreStats:
        """As ``ExpertStore.stats``; waits for the device where it has not told who was used."""
        self._count_uses(waits=True)
        with self._changed:
            self._count_plans()
        return super().stats()

    def reset_stats(self) -> None:
        """As ``ExpertStore.reset_stats``."""
        self._count_uses(waits=True)
        self._planned.clear()
        super().reset_stats()

    def close(self) -> None:
        """As ``ExpertStore.close``; what kernels take lives on with who still has it."""
        self._residents.clear()
        self._slots.clear()
        self.stacks = self.recorded = self.host_tables = None
        super().close()

    def _count_uses(self, *, waits: bool) -> None:
        with self._changed:
            while self._uncounted:
                if waits:
                    self._uncounted[0][0].synchronize()
                if not self.count_one():
                    return

    # What follows is called with the lock held.

    def start_together(
        self,
        keys: Sequence[ExpertKey],
        keep: Collection[ExpertKey],
        *,
        passes: bool = False,
        priority: Priority = Priority.DEMAND,
    ) -> list[ExpertKey]:
        """Begins one copy of experts of a layer that are resident below, if there are slots.

        Args:
            keys: none of them is here or on its way.
            keep: those that the policy knows; the others pass through.
            passes: whether they are of a stream, which takes slots of its own.
            priority: of the copy, which stays what it is.

        Returns:
            Those that are on their way now.
        """
        slots: dict[ExpertKey, torch.Tensor] = {}
        read = Read(priority, partial(self._arrive_together, slots), passes=passes)
        for key in self.fetcher.resident_below(keys):
            slot = self._take_slot(key, keep=key in keep and not passes)
            if slot is None:
                break
            self._enter(key, slot, read, keep=key in keep)
            slots[key] = self._slab.slot(slot)
        if slots and not self.fetcher.copy_resident(slots, read):
            for key, memory in slots.items():
                own = Read(priority, partial(self._arrive, key), passes=passes)
                self._entries[key].read = own
                self.fetcher.fetch(key, memory, own)
        return [*slots]

    def _hasten(self, key: ExpertKey, entry: Entry[W], priority: Priority) -> None:
        if self.fetcher.can_hasten(entry.read):
            super()._hasten(key, entry, priority)

    def _arrive_together(self, keys: Iterable[ExpertKey], read: Read) -> None:
        with self._changed:
            for key in keys:
                self._arrive(key, read)

    def _count_plans(self) -> None:
        """Adds up plans whose copies have ended."""
        while self._planned and all(read.ended_s for read in self._planned[0].reads):
            plan = self._planned.popleft()
            ended_s = max([plan.host_s, *(read.ended_s for read in plan.reads)])
            self._counters.planned_s += plan.seconds
            self._counters.spent_s += ended_s - plan.begun_s

    def _count_use(self, key: ExpertKey) -> None:
        self._counters.hits += 1
        entry = self._entries.get(key)
        if entry is not None and entry.arrived:  # else it has left meanwhile
            self._counters.useful_guesses += entry.guessed
            entry.guessed = False
            if key not in self._streamed:
                self._policy.touch(key)

    def _find_residents(self, layer: int, stream: int) -> Residents:
        assert self.stacks is not None, "the layer has a stack"
        slots = self._slots.get(layer)
        if slots is None:
            slots = self._slots[layer] = np.full(self.stacks.num_experts(layer), -1, np.int32)
            for key, entry in self._entries.items():
                if key.layer == layer and is_resident(entry):
                    slots[key.expert] = entry.slot
        are_kept = not any(key.layer == layer for key in self._streamed)
        return Residents(layer, slots.copy(), self.stacks, stream, are_kept=are_kept)

    def _note(self, key: ExpertKey) -> None:
        """An expert has come or gone, or is kept now."""
        self._residents.pop(key.layer, None)
        slots = self._slots.get(key.layer)
        if slots is not None:
            slots[key.expert] = self._entries[key].slot if self.has(key) else -1

    def _arrive(self, key: ExpertKey, read: Read) -> None:
        with self._changed:
            self.fetcher.has_arrived(key)
            super()._arrive(key, read)
            self._note(key)

    def _keep(self, key: ExpertKey) -> None:
        super()._keep(key)
        self._note(key)

    def _drop(self, key: ExpertKey) -> None:
        if key not in self._streamed and self.has(key) and not self.is_closed:
            self.fetcher.give_back(key, self._slab.slot(self._entries[key].slot))
        super()._drop(key)
        self._note(key)

    def _mend(self) -> None:
        self._residents.clear()
        self._slots.clear()
        super()._mend()
