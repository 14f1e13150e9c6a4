"""The store of experts in slots of a device, its leases, and the stacks that kernels read."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.memory.device.cuda_device import CudaDevice, Event
from moe_runtime.memory.device.recent_uses import RecentUses
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.memory.store import Entry, Lease, is_resident
from moe_runtime.memory.tiers import LowerStore, TierFetcher, TierStore
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")
R = TypeVar("R")

_MOST_UNCOUNTED = 64
"""Most uses of residents that wait to be counted."""
BROUGHT_MARGIN = 1.0
"""A missing expert is brought if it has so many more uses than its victim; from replayed routes."""

Slots = npt.NDArray[np.int32]
"""``[E]``: the slot of each expert of a layer, below 0 for none."""


class Residents:
    """The experts of a layer that are in slots of a device.

    Attributes:
        are_all: they are the whole layer, and the policy keeps them.
        stream: the stream of kernels that may use them.
    """

    def __init__(
        self, layer: int, slots: Slots, stacks: Any, stream: int, *, are_kept: bool
    ) -> None:
        self.slots, self.stream = slots, stream
        self.experts = frozenset(np.flatnonzero(slots >= 0).tolist())
        self.are_all = are_kept and len(self.experts) == len(slots)
        self._make_stack = partial(stacks.stack, layer, slots)

    @cached_property
    def stack(self) -> Any:
        """The stack for kernels; None without residents."""
        return self._make_stack() if self.experts else None


class Planned(NamedTuple):
    """Misses of a layer whose copies may still be under way.

    Attributes:
        seconds: predicted.
        begun_s: time at which the copies were demanded.
        host_s: time at which the CPU had computed its part.
    """

    seconds: float
    begun_s: float
    host_s: float
    reads: Sequence[Transfer]


class DeviceLease(Lease[W]):
    """A hold on experts of a device, which yields them once their copies are queued.

    The caller's current stream waits for the copies. The host waits too if the policy decides after
    the use.
    """

    _store: DeviceStore[W]  # pyright: ignore[reportIncompatibleVariableOverride]
    _awaited: Transfer | None = None  # the stream waits for it already

    def _next_group(self) -> list[tuple[ExpertKey, W]]:
        if self._held and not self._arriving:  # the caller has queued all its work
            self._store.fetcher.wake_ends()
        group = super()._next_group()
        if group:
            self._store.fetcher.raise_failure()
        return group

    def __exit__(self, *_: object) -> None:
        self._store.fetcher.wake_ends()
        super().__exit__()

    @property
    def _batch_size(self) -> int:
        """Experts of one copy and of one launch."""
        return self._store.stream_batch if self._streaming else len(self._keys)

    def _demand_missing(self) -> None:
        """Copies experts that are resident below together, unless they stream to a tier above."""
        if self._missing:
            self._store.lower.asked = frozenset(self._missing)
        while len(self._missing) > 1 and self._above is None:
            batch = [
                self._missing.popleft() for _ in range(min(self._batch_size, len(self._missing)))
            ]
            others, self._missing = self._missing, deque(self._start_together(batch))
            super()._demand_missing()
            is_full = bool(self._missing)
            self._missing.extend(others)
            if is_full:
                return
        super()._demand_missing()

    def _start_together(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Demands keys that are resident below; returns the others."""
        store = self._store
        absent = [key for key in keys if key not in store._entries]
        started = store.start_together(absent, self._keep, passes=self._streaming)
        for key in started:
            store._entries[key].pins += 1
            self._arriving.append(key)
        return [key for key in keys if key not in set(started)]

    def _take_ready(self) -> list[ExpertKey]:
        """Residents first, then experts whose copies are queued. When streaming, the experts of one
        copy are computed while the next are copied."""
        found = super()._take_ready()
        while self._streaming and self._resident and 0 < len(found) < self._batch_size:
            found.append(self._resident.popleft())
        if not found and not self._admits_after_use:
            found = self._take_queued()
        if not found:  # they are waited for
            self._store.fetcher.wake_ends()
        return found

    def _take_queued(self) -> list[ExpertKey]:
        queued, entries = self._store.fetcher.queued, self._store._entries
        found = [key for key in self._arriving if entries[key].read in queued]
        if self._streaming and found:
            first = entries[found[0]].read
            found = [key for key in found if entries[key].read is first]
        for key in found:
            queued[entries[key].read].has_users = True
            self._arriving.remove(key)
        return found

    def _bind_held(self) -> list[tuple[ExpertKey, W]]:
        store = self._store
        for key in self._held:
            read = store._entries[key].read
            copy = store.fetcher.queued.get(read)
            if copy is not None and read is not self._awaited:
                store.device.wait_here(copy.event)
                self._awaited = read
        return super()._bind_held()


class DeviceStore(TierStore[W]):
    """Experts in slots of a device.

    A lease is for work that is queued on the caller's current stream while the lease yields.

    Attributes:
        lower: the store of host memory below.
        stacks: makes stacks of slots for kernels; None if there are none.
        recorded: a step that is replayed over these slots.
        host_tables: tables of experts that steps read from host memory.
        miss_costs: returns the cost of misses, if the CPU may compute some.
        recorded_bytes: memory of recorded steps, counted after the last recording.
        recorded_reserve_bytes: the part of the budget that is reserved for them.
    """

    def __init__(self, device: CudaDevice, fetcher: TierFetcher, *args: Any, **kwargs: Any) -> None:
        super().__init__(fetcher, *args, **kwargs)
        assert isinstance(fetcher.lower, LowerStore)
        self.device, self.lower = device, fetcher.lower
        self.stacks: Any = None
        self.recorded: Any = None
        self.host_tables: Any = None
        self.miss_costs: Callable[[], Any] | None = None
        self.recorded_bytes = self.recorded_reserve_bytes = 0
        self._residents: dict[int, Residents] = {}
        self._slots: dict[int, Slots] = {}  # of each layer's experts
        self._planned: deque[Planned] = deque()
        self._brought: list[Transfer] = []
        self._uncounted: deque[tuple[Event, Callable[[], Sequence[ExpertKey]]]] = deque()
        own = weakref.ref(self)
        self.lower.is_above = lambda key: (above := own()) is not None and above.has(key)

    def has(self, key: ExpertKey) -> bool:
        """Whether an expert is resident; without the lock, this may be outdated."""
        return is_resident(self._entries.get(key))

    def lease(
        self, keys: Sequence[ExpertKey], *, streaming: bool = False, above: Transfer | None = None
    ) -> DeviceLease[W]:
        """As ``ExpertStore.lease``; raises MoERuntimeError if a copy failed that work was queued
        after."""
        self.fetcher.raise_failure()
        self.device.compute_here()
        self._count_uses(waits=True)
        return DeviceLease(self, keys, streaming=streaming, above=above)

    def use_resident(
        self, keys: Sequence[ExpertKey], use: Callable[[list[W]], R | None]
    ) -> R | None:
        self.fetcher.raise_failure()
        self.device.compute_here()
        return super().use_resident(keys, use)

    @property
    def slot_bytes(self) -> int:
        return self._slab.slot_bytes

    @property
    def stream_batch(self) -> int:
        """Half of the stream's slots: the device computes these while the others are filled."""
        return -(-self._stream_slots // 2)

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        with self._monitor:
            room = min(len(self._free), self._stream_slots - len(self._unadmitted))
            absent = [key for key in dict.fromkeys(keys) if key not in self._entries]
            del absent[max(0, room) :]
            for start in range(0, len(absent), self.stream_batch):
                batch = absent[start : start + self.stream_batch]
                for key in self.start_together(batch, (), passes=True, priority=Priority.READAHEAD):
                    self._entries[key].expected = True
            super().read_ahead(keys)
        self.fetcher.wake_ends()

    def has_stack(self, layer: int, dtype: torch.dtype) -> bool:
        """Whether kernels take a layer's experts as one stack, for rows of this type."""
        return self.stacks is not None and self.stacks.takes(layer, dtype)

    def launch_residents(self, layer: int, launch: Callable[[Any], object]) -> Residents:
        """Calls ``launch`` with the stack of a layer's residents, if any; it must not wait."""
        return self.with_residents(layer, lambda found: found.experts and launch(found.stack))

    def with_residents(self, layer: int, queue: Callable[[Residents], object]) -> Residents:
        """Queues work on a layer's residents: none is evicted meanwhile, and later copies into
        their slots run after it."""
        self.fetcher.raise_failure()
        stream = self.device.compute_here()
        with self._monitor:
            found = self._residents.get(layer)
            if found is None or found.stream != stream:
                found = self._residents[layer] = self._find_residents(layer, stream)
            self._monitor.may_be_interrupted = True
            queue(found)
            return found

    def with_same_residents(
        self, expected: Mapping[int, Residents], queue: Callable[[], object]
    ) -> bool:
        """Queues work if all these layers have the same residents as before; returns whether."""
        self.fetcher.raise_failure()
        stream = self.device.compute_here()
        with self._monitor:
            for layer, found in expected.items():
                if self._residents.get(layer) is not found or found.stream != stream:
                    return False
            self._monitor.may_be_interrupted = True
            queue()
            return True

    def stack_of(self, keys: Sequence[ExpertKey], into: torch.Tensor | None = None) -> Any:
        """The stack of experts of one layer that a lease has just yielded."""
        assert self.stacks is not None, "the layer has a stack"
        layer = keys[0].layer
        slots = np.full(self.stacks.num_experts(layer), -1, np.int32)
        with self._monitor:
            for key in keys:
                slots[key.expert] = self._entries[key].slot
        return self.stacks.stack(layer, slots, into)

    def count_later(self, event: Event, used: Callable[[], Sequence[ExpertKey]]) -> None:
        """Counts uses of residents later: ``used`` returns them after ``event``, most wanted
        last."""
        with self._monitor:
            self._uncounted.append((event, used))
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self.count_one()

    def count_one(self) -> bool:
        """Counts the oldest deferred use; returns whether its event has happened."""
        with self._monitor:
            if not self._uncounted or not self._uncounted[0][0].query():
                return False
            # popped first: after an exception nothing is counted twice
            for key in self._uncounted.popleft()[1]():
                self._count_use(key)
            return True

    def count_behind(self, event: Event) -> None:
        """Counts uses that wait for an event that is about to be reused, and all before them."""
        with self._monitor:
            while any(waited_for is event for waited_for, _ in self._uncounted):
                self._uncounted[0][0].synchronize()
                self.count_one()

    def count_residents(
        self, residents: Residents, ids: Sequence[int], event: Event, keys: Callable[[], Any]
    ) -> bool:
        """Counts the uses of a step that needs residents alone; returns whether it does. Then no
        lease is needed: no slot is overwritten before the launched work has ended."""
        if self._unadmitted or self.listener is not None or not residents.experts.issuperset(ids):
            return False
        self.count_later(event, keys)
        return True

    def bring(self, keys: Sequence[ExpertKey], uses: RecentUses) -> None:
        """Copies experts that the CPU computed, after all demands, and keeps them.

        Each needs a free slot, or that of an expert with `BROUGHT_MARGIN` fewer uses. Nothing is
        copied while earlier ones are under way, or if the policy decides after a use.
        """
        self._count_uses(waits=False)  # an expert that was just used gives no slot
        with self._monitor:
            self._brought = [read for read in self._brought if not read.ended_s]
            if self._brought or self.decides_later:
                return
            for key in keys:
                if key in self._entries:
                    continue
                if not self._free and not self._unadmitted:
                    victim = self._victim(key)
                    if victim is None or uses.of(key) <= uses.of(victim) + BROUGHT_MARGIN:
                        continue
                slot = self._take_slot(key, keep=True)
                if slot is None:
                    return
                self._start(key, slot, keep=True, priority=Priority.READAHEAD)
                self._brought.append(self._entries[key].read)

    def count_misses(
        self,
        copied: Sequence[ExpertKey],
        num_computed: int,
        seconds: float,
        begun_s: float,
        host_s: float,
    ) -> None:
        """Counts misses of a layer that the CPU computed, and the time of planned ones.

        Args:
            copied: misses that a lease has just demanded.
            seconds: predicted for all misses; 0 without a plan.
            begun_s: begin, of ``time.perf_counter``.
            host_s: end of the CPU's part.
        """
        with self._monitor:
            self._counters.misses += num_computed
            self._counters.computed_misses += num_computed
            if seconds:
                entries = (self._entries.get(key) for key in copied)
                reads = [entry.read for entry in entries if entry is not None]
                self._planned.append(Planned(seconds, begun_s, host_s, reads))
            self._count_plans()

    def stats(self) -> StoreStats:
        self._count_uses(waits=True)
        with self._monitor:
            self._count_plans()
        found = super().stats()
        if self.miss_costs is not None:
            costs = self.miss_costs()
            found.miss_cpu_s, found.miss_copy_s = costs.cpu_s(1), costs.copy_s
            found.miss_return_s, found.miss_launch_s = costs.return_s, costs.launch_s
        found.recorded_bytes = self.recorded_bytes
        found.recorded_reserve_bytes = self.recorded_reserve_bytes
        return found

    def count_step(self, way: str) -> None:
        """Counts a recorded decode step: ``"resident_steps"``, ``"fetched_steps"`` or
        ``"cut_steps"``."""
        with self._monitor:
            setattr(self._counters, way, getattr(self._counters, way) + 1)

    def reset_stats(self) -> None:
        self._count_uses(waits=True)
        self._planned.clear()
        super().reset_stats()

    def close(self) -> None:
        self._residents.clear()
        self._slots.clear()
        self.stacks = self.recorded = self.host_tables = None
        super().close()

    def _count_uses(self, *, waits: bool) -> None:
        with self._monitor:
            while self._uncounted:
                if waits:
                    self._uncounted[0][0].synchronize()
                if not self.count_one():
                    return

    # The following is called with the lock held.

    def start_together(
        self,
        keys: Sequence[ExpertKey],
        keep: Collection[ExpertKey],
        *,
        passes: bool = False,
        priority: Priority = Priority.DEMAND,
    ) -> list[ExpertKey]:
        """Begins one copy of experts of a layer that are resident below, as far as there are slots.

        Args:
            keys: absent experts.
            keep: experts that the policy holds; the others pass through.
            passes: they belong to a stream.

        Returns the experts that are on their way now.
        """
        slots: dict[ExpertKey, torch.Tensor] = {}
        read = Transfer(priority, partial(self._arrive_together, slots), passes=passes)
        for key in self.fetcher.resident_below(keys):
            slot = self._take_slot(key, keep=key in keep and not passes)
            if slot is None:
                break
            self._enter(key, slot, read, keep=key in keep)
            slots[key] = self._slab.slot(slot)
        if slots and not self.fetcher.copy_resident(slots, read):
            for key, memory in slots.items():
                own = Transfer(priority, partial(self._arrive, key), passes=passes)
                self._entries[key].read = own
                self.fetcher.fetch(key, memory, own)
        return [*slots]

    def _hasten(self, key: ExpertKey, entry: Entry[W], priority: Priority) -> None:
        if self.fetcher.can_hasten(entry.read):
            super()._hasten(key, entry, priority)

    def _arrive_together(self, keys: Iterable[ExpertKey], read: Transfer) -> None:
        with self._monitor:
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
            if key not in self._unadmitted:
                self._policy.touch(key)

    def _find_residents(self, layer: int, stream: int) -> Residents:
        assert self.stacks is not None, "the layer has a stack"
        slots = self._slots.get(layer)
        if slots is None:
            slots = self._slots[layer] = np.full(self.stacks.num_experts(layer), -1, np.int32)
            for key, entry in self._entries.items():
                if key.layer == layer and is_resident(entry):
                    slots[key.expert] = entry.slot
        are_kept = not any(key.layer == layer for key in self._unadmitted)
        return Residents(layer, slots.copy(), self.stacks, stream, are_kept=are_kept)

    def _note(self, key: ExpertKey) -> None:
        """An expert came, left, or is kept from now on."""
        self._residents.pop(key.layer, None)
        slots = self._slots.get(key.layer)
        if slots is not None:
            slots[key.expert] = self._entries[key].slot if self.has(key) else -1

    def _arrive(self, key: ExpertKey, read: Transfer) -> None:
        with self._monitor:
            self.lower.spares[key] = None
            super()._arrive(key, read)
            self._note(key)

    def return_to_host(self, key: ExpertKey) -> None:
        """Offers a resident expert to the tier below."""
        slot = self._slab.slot(self._entries[key].slot)
        self.lower.take_back(key, slot, self.fetcher.moves_of(key, slot))

    def _keep(self, key: ExpertKey) -> None:
        super()._keep(key)
        self._note(key)

    def _drop(self, key: ExpertKey) -> None:
        if key not in self._unadmitted and self.has(key) and not self.is_closed:
            self.return_to_host(key)
        super()._drop(key)
        self._note(key)

    def reset(self) -> None:
        self._residents.clear()
        self._slots.clear()
        super().reset()


def use_arriving(
    store: DeviceStore[Any],
    keys: Sequence[ExpertKey],
    residents: Residents,
    launch: Callable[[Sequence[ExpertKey]], object],
) -> Sequence[ExpertKey]:
    """Copies the missing experts of a layer and queues work on them, as one operation.

    This is cheaper for the host than a lease.

    Args:
        keys: the experts of the step, most wanted last.
        residents: of the layer; work on them is queued already.
        launch: queues work on the experts given to it; it must not wait.

    Returns:
        Experts that must still be leased: all if one is under way or on disk, or if the policy
        decides after the use; else those without slots.

    Raises:
        MoERuntimeError: a copy failed that earlier work was queued after.
    """
    fetcher = store.fetcher
    fetcher.raise_failure()
    store.device.compute_here()
    with store._monitor:
        entries = store._entries
        missing = [key for key in keys if key.expert not in residents.experts]
        if (
            store._unadmitted
            or store.listener is not None
            or store.decides_later
            or any(key in entries for key in missing)
            or len(fetcher.resident_below(missing)) < len(missing)
        ):
            return keys
        used = [key for key in keys if key.expert in residents.experts]
        for key in used:
            store._count_use(key)
        if not missing:
            return ()
        held = [entries[key] for key in used if is_resident(entries.get(key))]
        for entry in held:
            entry.pins += 1
        store.lower.asked = frozenset(missing)
        started = store.start_together(missing, missing)
        for entry in held:
            entry.pins -= 1
        # one read, or one each if the device refused the copy of all
        reads = {entries[key].read: None for key in started}
        copies = [fetcher.queued[read] for read in reads if read in fetcher.queued]
        if not started or len(copies) < len(reads):  # slots are lacking, or threads copy
            return missing
        store._counters.misses += len(started)
        for copy in copies:
            copy.has_users = True
            store.device.wait_here(copy.event)
        store._monitor.may_be_interrupted = True
        launch(started)
    fetcher.wake_ends()
    return [key for key in missing if key not in started]
