"""The expert store: the experts in a tier's slots, and the leases that pin them there.

Resident: the read has ended, and the slot has the weights.
Pinned: an open lease holds the expert, so it cannot be evicted.
Admitted: the policy holds the expert until it chooses it as a victim.
Streamed: the expert passes through a slot for one lease, and the policy does not hold it.
Prefetched: read on a predictor's guess. Read ahead: read because the next layer needs all experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Never, Protocol, TypeVar, cast

import torch

from moe_runtime.errors import CLOSED, CapacityError, MoERuntimeError
from moe_runtime.memory.reads import Fetcher, LinkMeter, Priority, Transfer
from moe_runtime.memory.source import Slab, give_back
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.policies.eviction.base import Watcher
from moe_runtime.policies.prediction.base import Event
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")
R = TypeVar("R")


@dataclass(slots=True)
class Entry(Generic[W]):
    """One occupied slot.

    Attributes:
        expected: read ahead, and its layer has not run yet.
        guessed: prefetched and not used since.
        pins: number of leases that hold it.
        arrived: the read has ended.
        weights: the bound slot, once it was used.
    """

    slot: int
    read: Transfer
    expected: bool = False
    guessed: bool = False
    pins: int = 0
    arrived: bool = False
    weights: W | None = None


def is_resident(entry: Entry[W] | None) -> bool:
    """Whether an expert's weights are in its slot; without the lock, this may be outdated."""
    return entry is not None and entry.arrived and entry.read.error is None


class LeaseListener(Protocol):
    """Called by one lease."""

    def entered(
        self, hits: Sequence[ExpertKey], late: Sequence[ExpertKey], misses: Sequence[ExpertKey]
    ) -> None: ...
    def asked(self, done: Sequence[ExpertKey]) -> None: ...
    def given(self, group: Sequence[ExpertKey], *, waited: bool) -> None: ...
    def left(self) -> None: ...


class StoreListener(Protocol):
    """Called for the reads of a store, with its lock held, and for its leases."""

    def read_began(self, key: ExpertKey, priority: Priority) -> None: ...
    def read_ended(self, key: ExpertKey, read: Transfer) -> None: ...
    def dropped(self, key: ExpertKey) -> None: ...
    def was_reset(self, arriving: Collection[ExpertKey]) -> None: ...
    def lease(self) -> LeaseListener | None: ...


class LeaseEndedError(MoERuntimeError):
    """A lease ended before its block, because the store was reset."""

    def __init__(self) -> None:
        super().__init__("this lease has ended; ask for the experts again")


class Lease(Generic[W]):
    """Pins some experts of a layer; made by ``ExpertStore.lease`` and used as a context.

    Iterating yields lists of ``(key, weights)``: residents first, then arrivals; when streaming,
    arrivals first, so that their slots are soon free again. The next iteration releases the experts
    of a list.
    """

    def __init__(
        self,
        store: ExpertStore[W],
        keys: Sequence[ExpertKey],
        *,
        streaming: bool,
        above: Transfer | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._streaming = streaming
        self._above = above
        self._thread: int | None = threading.get_ident()
        self._resident: deque[ExpertKey] = deque()
        self._arriving: list[ExpertKey] = []
        self._missing: deque[ExpertKey] = deque()  # not demanded yet
        self._held: list[ExpertKey] = []
        self._keep: Collection[ExpertKey] = ()
        # a policy that may decline decides after the use
        fits = streaming and len(keys) <= store.slots_of(keys[0].layer)
        self._admits_after_use = store._policy.may_decline and not fits
        self._listener = None if store.listener is None else store.listener.lease()
        self._has_waited = False

    def __enter__(self) -> Lease[W]:
        store = self._store
        if store.is_closed:
            raise MoERuntimeError(CLOSED)
        with store._monitor:
            store._leases.add(self)
            missing = self._pin_present()
            if self._listener is not None:
                self._listener.entered([*self._resident], [*self._arriving], missing)
            # a lease that streams one expert keeps experts that were read ahead after it
            if store._unadmitted and not (self._streaming and len(self._keys) == 1):
                for layer in {key.layer for key in self._keys}:
                    store._forget_expected(layer)
            if missing or self._streaming:
                if self._admits_after_use:
                    self._missing.extend(missing)
                elif self._streaming:
                    only_free = self._above is not None
                    self._keep = store._keep_most_wanted(self._keys, only_free=only_free)
                    self._missing.extend(sorted(missing, key=lambda key: key not in self._keep))
                else:
                    self._keep = frozenset(missing)
                    self._missing.extend(missing)
                store._counters.misses += len(missing)
                store._regrets += sum(store.gone.pop(key, 0) for key in missing)
                self._demand_missing()
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._store._leases:  # else it was ended already
            if self._held or self._resident or self._arriving or self._missing:
                with self._store._monitor:
                    self.end()
            else:
                self._store._leases.discard(self)
        if self._listener is not None:
            self._listener.left()

    def end(self) -> None:
        """Releases everything; called with the lock held."""
        if self.is_open:
            self._release(self.pinned())
        self._held, self._arriving = [], []
        self._resident.clear()
        self._missing.clear()
        self._store._leases.discard(self)

    @property
    def is_open(self) -> bool:
        """Whether neither the lease was ended nor the store reset."""
        return self in self._store._leases

    def pinned(self) -> list[ExpertKey]:
        return [*self._held, *self._resident, *self._arriving]

    def __iter__(self) -> Iterator[list[tuple[ExpertKey, W]]]:
        listener = self._listener
        while True:
            if listener is not None:
                listener.asked(self._held)
            group = self._next_group()
            if listener is not None:
                listener.given([key for key, _ in group], waited=self._has_waited)
            if not group:
                return
            yield group

    @property
    def all_started(self) -> bool:
        """Whether every expert of the lease is resident or being read."""
        return not self._missing

    @property
    def computes_residents_first(self) -> bool:
        """Whether residents are computed while the others are read. Then listeners should run after
        the first group, before the wait."""
        is_partial = bool(self._resident and (self._missing or self._arriving))
        return is_partial and not self._streaming

    def _next_group(self) -> list[tuple[ExpertKey, W]]:
        """Releases the last group, and waits for the next."""
        store = self._store
        monitor, self._has_waited = store._monitor, False
        with monitor:
            if self in store._leases:
                self._release(self._held)
                self._held = []
            while True:
                if self not in store._leases:
                    monitor.may_be_interrupted = True
                    raise LeaseEndedError
                if self._missing:
                    self._demand_missing()
                self._held = self._take_ready()
                if self._held or not (self._missing or self._arriving):
                    break
                entries = store._entries
                if not self._arriving and entries and all(map(store._is_idle, entries)):
                    monitor.may_be_interrupted = True
                    policy = type(store._policy.layers[0]).__name__
                    raise ValueError(f"{policy}.victim found no expert, but each may be evicted")
                start, self._has_waited = time.perf_counter(), True
                monitor.wait()
                store._counters.stall_s += time.perf_counter() - start
            return self._bind_held()

    def _bind_held(self) -> list[tuple[ExpertKey, W]]:
        store, found = self._store, list[tuple[ExpertKey, W]]()
        for key in self._held:
            entry = store._entries[key]
            if entry.weights is None:
                entry.weights = store._bind(key, store._slab.slot(entry.slot))
            found.append((key, entry.weights))
        return found

    def _pin_present(self) -> list[ExpertKey]:
        """Pins experts that are resident or being read; returns the others."""
        store, missing = self._store, list[ExpertKey]()
        if not self._keys:  # no token of this process's experts
            return missing
        counters, policy = store._counters, store._policy
        touch = policy.touch if policy.counts_uses else policy.layers[self._keys[0].layer].touch
        for key in self._keys:
            entry = store._entries.get(key)
            if entry is None:
                missing.append(key)
                continue
            entry.pins += 1
            entry.expected = False
            if entry.guessed:
                counters.useful_guesses += entry.arrived
                counters.late_guesses += not entry.arrived
                entry.guessed = False
            if entry.arrived and entry.read.error is None:
                counters.hits += 1
                self._resident.append(key)
            else:
                counters.late_hits += 1
                above = self._above
                store._hasten(key, entry, above.priority if above else Priority.DEMAND)
                self._arriving.append(key)
            if key not in store._unadmitted:
                touch(key)
            elif not self._admits_after_use and not self._streaming:
                store._keep(key)
        return missing

    def _release(self, keys: Sequence[ExpertKey]) -> None:
        store = self._store
        for key in keys:
            store._entries[key].pins -= 1
        for key in keys:
            entry = store._entries.get(key)
            if entry is None:  # it was evicted for another expert of the list
                continue
            sound = entry.read.error is None
            if sound and key not in store._unadmitted:
                continue
            if self._admits_after_use and store._is_idle(key) and sound:
                store._keep_or_decline(key)
            store._drop_if_done(key)
        if keys:
            store._monitor.notify_all()

    def _demand_missing(self) -> None:
        """Demands missing experts, as far as there are slots."""
        store, above = self._store, self._above
        # it may have changed during a wait
        priority = Priority.DEMAND if above is None else above.priority
        while self._missing:
            key = self._missing[0]
            entry = store._entries.get(key)
            if entry is not None:  # another lease has started its read
                store._hasten(key, entry, priority)
            else:
                keep = key in self._keep
                # a streaming lease has already made room for experts that it keeps
                slot = store._take_slot(key, keep=keep and not self._streaming)
                if slot is None:
                    return
                entry = store._start(
                    key, slot, keep=keep, priority=priority, passes=self._streaming
                )
            entry.pins += 1
            self._arriving.append(self._missing.popleft())

    def _take_ready(self) -> list[ExpertKey]:
        """Takes experts that can be computed now."""
        arrived: list[ExpertKey] = []
        if self._arriving:
            entries, arriving = self._store._entries, list[ExpertKey]()
            for key in self._arriving:
                (arrived if entries[key].arrived else arriving).append(key)
            for key in arrived:
                error = entries[key].read.error
                if error is not None:
                    self._store._monitor.may_be_interrupted = True
                    try:
                        raise error
                    finally:
                        del error  # its traceback has this frame: a cycle
            self._arriving = arriving
        if self._streaming:
            return arrived or ([self._resident.popleft()] if self._resident else [])
        ready = [*self._resident, *arrived]
        self._resident.clear()
        return ready


class ExpertStore(Generic[W]):
    """Slots of one tier, filled on demand, kept by a policy, pinned by leases.

    All methods may be called from several threads. The weights that a lease yields are valid until
    its next iteration or end.

    Attributes:
        listener: called for every read and lease.
        is_closed: its memory was freed, and leases are refused.
        num_watched: length of ``gone``; so many more slots would have kept those experts.
        gone: recently evicted experts that did not come back, the last one last.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        slab: Slab,
        policy: LayerShares,
        bind: Callable[[ExpertKey, torch.Tensor], W],
        *,
        stream_slots: int,
        listener: StoreListener | None = None,
    ) -> None:
        """Takes over the fetcher and the slab.

        Args:
            policy: chooses experts to evict; must hold no key yet.
            bind: turns a filled slot (``uint8``) into the expert's weights.
            stream_slots: slots that streamed experts may take.
        """
        self.listener = listener
        self.is_closed = False
        self._fetcher = fetcher
        self._slab = slab
        self._policy = policy
        self._bind = bind
        self._stream_slots = max(1, min(stream_slots, slab.num_slots))
        self._entries: dict[ExpertKey, Entry[W]] = {}
        # streamed, prefetched or read ahead; the policy holds the others
        self._unadmitted: set[ExpertKey] = set()
        self._free = list(range(slab.num_slots - 1, -1, -1))
        self._closed: set[int] = set()  # slots without memory, see ``resize``
        self._leases: set[Lease[W]] = set()  # open ones
        self._monitor = fetcher.monitor
        self._monitor.reset = self.reset
        self._counters = StoreStats()
        self._guesses_before = 0  # made before the counters were reset, judged after it
        self._link = LinkMeter()
        self.num_watched, self.gone = 0, OrderedDict[ExpertKey, int]()
        self._regrets = 0  # misses of experts in ``gone``

    @property
    def num_slots(self) -> int:
        return self._slab.num_slots - len(self._closed)

    def slots_of(self, layer: int) -> int:
        """Slots of a layer: with more experts it evicts its own."""
        return self._policy.share(layer)

    def lease(
        self, keys: Sequence[ExpertKey], *, streaming: bool = False, above: Transfer | None = None
    ) -> Lease[W]:
        """Pins experts of one layer while they are used, and demands missing ones.

        Args:
            keys: distinct experts, the most wanted last.
            streaming: missing experts pass through a few slots. The most wanted fill free room; if
                the lease has more experts than the layer's share, they also replace residents that
                it does not use.
            above: the read of the tier above, which gives the priority.
        """
        return Lease(self, keys, streaming=streaming, above=above)

    def use_resident(
        self, keys: Sequence[ExpertKey], use: Callable[[list[W]], R | None]
    ) -> R | None:
        """Computes with experts of one layer that are all resident, without pins.

        The lock is held meanwhile: ``use`` should be short and must not wait for another thread of
        the store. It takes the weights in the order of the keys, and returns None if it did not use
        them. Returns the result of ``use``, or None if the experts must be leased.
        """
        if not all(map(self._entries.__contains__, keys)):
            return None
        with self._monitor as monitor:
            # streamed, prefetched and read-ahead experts need a lease
            if self._unadmitted or self.listener is not None:
                return None
            found: list[W] = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.weights is None or entry.read.error is not None:
                    return None
                found.append(entry.weights)
            monitor.may_be_interrupted = True
            result = use(found)
            monitor.may_be_interrupted = False
            if result is not None:
                policy = self._policy
                layer = policy if policy.counts_uses else policy.layers[keys[0].layer]
                for key in keys:
                    layer.touch(key)
                self._counters.hits += len(keys)
            return result

    def missing(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Keys that are not resident now, also those being read."""
        with self._monitor:
            entries = self._entries
            return [key for key in keys if not is_resident(entries.get(key))]

    def count(self, *, replaced: int = 0, skipped: int = 0, stood_in: int = 0) -> None:
        """Counts choices that lossy options changed."""
        with self._monitor:
            self._counters.replaced_choices += replaced
            self._counters.skipped_choices += skipped
            self._counters.stand_in_choices += stood_in

    def read_later(self, keys: Sequence[ExpertKey], at_once: int) -> None:
        """Reads experts of one layer that the policy keeps, after all demands, with at most
        ``at_once`` reads under way."""
        policy = self._policy
        with self._monitor:
            for key in keys:
                if key in self._entries or self._link.under_way >= at_once:
                    continue
                if not self._free and policy.may_decline:
                    victim = self._victim(key)
                    if victim is None or policy.declines(key, victim):
                        continue
                slot = self._take_slot(key, keep=True)
                if slot is not None:
                    self._start(key, slot, keep=True, priority=Priority.READAHEAD)

    def end_leases(self) -> None:
        """Ends leases of this thread that an exception left open."""
        if self._leases and not self.is_forked:
            with self._monitor:
                thread = threading.get_ident()
                for lease in [one for one in self._leases if one._thread == thread]:
                    lease.end()

    @property
    def is_forked(self) -> bool:
        """Whether the store belongs to the parent of this process."""
        return self._monitor.is_forked

    def promote(self, key: ExpertKey) -> None:
        """Serves an expert's read as a demand, if it is under way."""
        with self._monitor:
            entry = self._entries.get(key)
            if entry is not None:
                self._hasten(key, entry, Priority.DEMAND)

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        """Reads experts that will probably be leased next, after all demands.

        Takes only free slots, as many as streaming may use. Drops experts that were read ahead for
        another layer and not leased.
        """
        with self._monitor:
            expected_layers = {key.layer for key in keys}
            for layer in {key.layer for key in self._unadmitted} - expected_layers:
                self._forget_expected(layer)
            for key in keys:
                if key in self._entries:
                    continue
                if not self._free or len(self._unadmitted) >= self._stream_slots:
                    return
                entry = self._start(
                    key, self._free.pop(), keep=False, priority=Priority.READAHEAD, passes=True
                )
                entry.expected = True

    def observe(self, event: Event) -> None:
        """Passes a step or a layer's routing to the policy, if it watches."""
        if self._policy.watcher:
            with self._monitor:
                self._policy.watcher.observe(event)

    def finish(self, sequence: int) -> None:
        """Passes the end of a request to the policy."""
        if self._policy.watcher:
            with self._monitor:
                self._policy.watcher.finish(sequence)

    @property
    def watchers(self) -> Sequence[Watcher]:
        """Parts of the policy that watch routing events."""
        return self._policy.watchers

    @property
    def decides_later(self) -> bool:
        """Whether the policy may decline an expert after its use."""
        return self._policy.may_decline

    def stats(self) -> StoreStats:
        with self._monitor:
            return dataclasses.replace(
                self._counters, expert_slots=self.num_slots, slot_bytes=self._slab.slot_bytes
            )

    def waits(self) -> tuple[float, int, int]:
        """Seconds that leases waited, misses, and misses of experts in ``gone``."""
        return self._counters.stall_s, self._counters.misses, self._regrets

    def reset_stats(self) -> None:
        with self._monitor:
            self._counters, self._regrets = StoreStats(), 0
            self._guesses_before = self._num_open_guesses()

    def check(self) -> None:
        """Proves that every slot is free, resident or arriving, that open leases hold the pins, and
        that every read will end; else raises AssertionError."""
        with self._monitor:
            entries = self._entries
            slots = [*self._free, *self._closed, *(entry.slot for entry in entries.values())]
            assert sorted(slots) == list(range(self._slab.num_slots))
            kept = entries.keys() - self._unadmitted
            assert self._unadmitted <= entries.keys()
            assert len(self._policy) == len(kept)
            assert all(key in self._policy for key in kept)
            pins = dict.fromkeys(entries, 0)
            for lease in self._leases:
                for key in lease.pinned():
                    pins[key] += 1
            assert {key: entry.pins for key, entry in entries.items()} == pins
            arriving = [entry for entry in entries.values() if not entry.arrived]
            assert all(self._fetcher.is_under_way(entry.read) for entry in arriving)
            assert self._link.under_way == len(arriving)
            judged, made = self._counters.judged_guesses, self._counters.guesses
            assert made + self._guesses_before == judged + self._num_open_guesses()
            self._policy.check()

    def resize(self, num_slots: int, *, shared_slots: int, stream_slots: int) -> int:
        """Changes the number of slots in host memory; returns the new number.

        That is more than asked for if experts are in use or being read, and less if an allocation
        fails.

        Args:
            num_slots: at least 1.
            shared_slots: slots that the layers divide.
            stream_slots: slots that streamed experts may take.
        """
        with self._monitor:
            self._policy.divide(shared_slots)
            self._stream_slots = max(1, min(stream_slots, num_slots))
            while self.num_slots > num_slots:
                if not self._free:
                    victim = self._victim_of_resizing()
                    if victim is None:
                        break
                    self._counters.evictions += 1
                    self._drop(victim)
                slot = self._free.pop()
                self._closed.add(slot)
                give_back(self._slab.slot(slot))
            while self.num_slots < num_slots and self._closed:
                self._free.append(self._closed.pop())
            with contextlib.suppress(CapacityError):
                self._free += reversed(self._slab.extend(num_slots - self.num_slots))
            self.gone.clear()
            self._monitor.notify_all()
            return self.num_slots

    def close(self) -> None:
        """Ends the reads under way, with their data or an error; experts in use live on."""
        self.is_closed = True
        self._fetcher.close()
        if not self.is_forked:
            with self._monitor:
                self._slab.close()
                self._bind = _refuse  # the old one may hold views of slots
                for entry in self._entries.values():
                    entry.weights = None

    # The following is called with the lock held.

    def reset(self) -> None:
        """Empties the store after an exception. Open leases end with an error. An expert that is
        being read keeps its slot until the read has ended."""
        for lease in tuple(self._leases):
            self._leases.discard(lease)
            lease.end()
        entries = self._entries
        self._entries = {
            key: Entry(entry.slot, entry.read)
            for key, entry in entries.items()
            if not entry.read.ended_s and self._fetcher.is_under_way(entry.read)
        }
        self._unadmitted = {*self._entries}
        self._policy.clear()
        occupied = self._closed.union(entry.slot for entry in self._entries.values())
        self._free = [n for n in reversed(range(self._slab.num_slots)) if n not in occupied]
        reads = [entry.read for entry in self._entries.values()]
        demands = sum(read.priority is Priority.DEMAND for read in reads)
        self._link.recount(len(reads), demands)
        self._counters.guesses, self._guesses_before = self._counters.judged_guesses, 0
        if self.listener is not None:
            self.listener.was_reset({*self._entries})
        self._monitor.notify_all()

    def _start(
        self, key: ExpertKey, slot: int, *, keep: bool, priority: Priority, passes: bool = False
    ) -> Entry[W]:
        read = Transfer(priority, partial(self._arrive, key), passes=passes)
        entry = self._enter(key, slot, read, keep=keep)
        self._fetcher.fetch(key, self._slab.slot(slot), read)
        return entry

    def _enter(self, key: ExpertKey, slot: int, read: Transfer, *, keep: bool) -> Entry[W]:
        if self.listener is not None:
            self.listener.read_began(key, read.priority)
        entry = self._entries[key] = Entry[W](slot, read)
        self.gone.pop(key, None)
        self._policy.insert(key) if keep else self._unadmitted.add(key)
        self._link.begin(is_demand=read.priority is Priority.DEMAND)
        return entry

    def _hasten(self, key: ExpertKey, entry: Entry[W], priority: Priority) -> None:
        """Raises the priority of a read-ahead."""
        if priority < entry.read.priority and not entry.arrived:
            self._link.begin_demand()
            self._fetcher.promote(key, entry.read)

    def _arrive(self, key: ExpertKey, read: Transfer) -> None:
        with self._monitor:
            if self.listener is not None:
                self.listener.read_ended(key, read)
            entry, counters = self._entries.get(key), self._counters
            if entry is None or entry.read is not read or entry.arrived:
                return  # the store was reset meanwhile
            entry.arrived, is_demand = True, read.priority is Priority.DEMAND
            counters.demand_bytes += read.num_bytes * is_demand
            counters.readahead_bytes += read.num_bytes * (not is_demand)
            self._link.end(read.num_bytes, is_demand=is_demand, now_s=read.ended_s)
            if read.error is not None or key in self._unadmitted:
                self._drop_if_done(key)
            self._monitor.notify_all()

    def _take_slot(self, incoming: ExpertKey, *, keep: bool) -> int | None:
        """Takes a free slot, that of a streamed expert, or that of the policy's victim, if any.
        Without ``keep`` there is a victim only while streaming has slots left."""
        if self._free:
            return self._free.pop()
        idle = [key for key in self._unadmitted if self._is_idle(key)]
        victim = next((key for key in idle if not self._entries[key].expected), None)
        if victim is None and (keep or len(self._unadmitted) < self._stream_slots):
            victim = self._victim(incoming)
        return self._evict_for_slot(next(iter(idle), None) if victim is None else victim)

    def _take_slot_for_guess(
        self, incoming: ExpertKey, gives_way: Callable[[ExpertKey], bool]
    ) -> int | None:
        """``_take_slot`` for a prefetch: evicts only experts of its layer that give way."""
        if self._free:
            return self._free.pop()

        def may_go(key: Hashable) -> bool:
            return gives_way(cast(ExpertKey, key)) and self._is_idle(key)

        unwanted = (key for key in self._unadmitted if not self._entries[key].expected)
        victim = next(filter(self._is_idle, unwanted), None)
        if victim is None:
            victim = self._policy.victim_within(incoming.layer, may_go, incoming)
        return self._evict_for_slot(victim)

    def _evict_for_slot(self, victim: ExpertKey | None) -> int | None:
        if victim is None:
            return None
        self._counters.evictions += 1
        self._drop(victim)
        return self._free.pop()

    def _victim(self, incoming: ExpertKey) -> ExpertKey | None:
        return self._policy.victim(self._is_idle, incoming)

    def _keep(self, key: ExpertKey) -> None:
        self._unadmitted.remove(key)
        self._policy.insert(key)

    def _drop(self, key: ExpertKey) -> None:
        if self.listener is not None:
            self.listener.dropped(key)
        self._counters.wasted_guesses += self._entries[key].guessed
        self._unadmitted.remove(key) if key in self._unadmitted else self._policy.remove(key)
        self.gone[key] = 1
        if len(self.gone) > self.num_watched:
            self.gone.popitem(last=False)
        self._free.append(self._entries.pop(key).slot)

    def _keep_or_decline(self, key: ExpertKey) -> None:
        """Decides after the use whether the policy keeps a streamed expert."""
        if self._policy.room(key.layer) == 0:
            victim = self._policy.victim(self._is_idle, key)
            if victim is None or self._policy.declines(key, victim):
                self._policy.decline(key)
                return
            self._counters.evictions += 1
            self._drop(victim)
        self._keep(key)

    def _keep_most_wanted(self, keys: Sequence[ExpertKey], *, only_free: bool) -> set[ExpertKey]:
        """Chooses the experts of a streaming lease that the policy keeps.

        They fill the free room of their layer. If the lease exceeds its share, they also replace
        residents that the lease does not use, as far as slots for streaming are left.
        """
        policy, layer = self._policy, keys[0].layer
        newcomers = [key for key in keys if key not in policy]
        room = policy.room(layer)
        num_beyond = len(keys) - self.slots_of(layer)
        if num_beyond <= 0:
            num_kept = 0 if only_free and len(self._free) <= self._stream_slots else room
        else:
            num_used = len(keys) - len(newcomers)
            num_unused = len(policy.layers[layer]) - num_used
            streamed = sum(not self._entries[key].expected for key in self._unadmitted)
            spare = len(self._free) + streamed - min(num_beyond, self._stream_slots)
            num_kept = max(0, min(self.slots_of(layer) - num_used, num_unused + spare))
            self._evict_unused(keys, num_kept - min(room, spare))
        kept = newcomers[max(0, len(newcomers) - num_kept) :]
        for key in self._unadmitted.intersection(kept):
            self._keep(key)
        return set(kept)

    def _evict_unused(self, keys: Sequence[ExpertKey], number: int) -> None:
        in_use = frozenset(keys)
        for _ in range(number):
            victim = self._policy.victim_within(
                keys[0].layer, lambda key: key not in in_use and self._is_idle(key), keys[-1]
            )
            if victim is None:  # other leases pin the others
                return
            self._counters.evictions += 1
            self._drop(victim)

    def _drop_if_done(self, key: ExpertKey) -> None:
        entry = self._entries[key]
        passed = key in self._unadmitted and not (entry.expected or entry.guessed)
        if (passed or entry.read.error) and entry.arrived and entry.pins == 0:
            self._drop(key)

    def _forget_expected(self, layer: int) -> None:
        for key in [key for key in self._unadmitted if key.layer == layer]:
            self._entries[key].expected = False
            self._drop_if_done(key)

    def _is_idle(self, key: Hashable) -> bool:
        entry = self._entries[cast(ExpertKey, key)]
        return entry.arrived and entry.pins == 0

    def _num_open_guesses(self) -> int:
        return sum(entry.guessed for entry in self._entries.values())

    def _victim_of_resizing(self) -> ExpertKey | None:
        """A streamed expert, or one of the layer furthest above its share."""
        found = next(filter(self._is_idle, self._unadmitted), None)
        held = self._policy.layers
        surplus = [len(policy) - self._policy.share(n) for n, policy in enumerate(held)]
        for layer in sorted(range(len(held)), key=surplus.__getitem__, reverse=True):
            if found is None and len(held[layer]):
                found = self._policy.victim_within(layer, self._is_idle, ExpertKey(layer, 0))
        return found


def _refuse(_: ExpertKey, __: torch.Tensor) -> Never:
    raise MoERuntimeError(CLOSED)
