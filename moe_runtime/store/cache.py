"""The expert store: which experts lie in a tier's slots, and the leases that hold them there."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import torch

from moe_runtime.policies.eviction import LayerShares
from moe_runtime.policies.prediction.base import Event
from moe_runtime.store.books import Counters, Entry, Fetcher
from moe_runtime.store.link import LinkMeter
from moe_runtime.store.slab import Slab
from moe_runtime.store.transfer import Priority, Read
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")


class ExpertStore(Generic[W]):
    """Slots of one tier, filled on demand, kept by a policy, held by leases.

    All methods may be called from several threads. What a lease yields is valid until the lease
    asks for more or ends. The content of a slot never depends on when or why it was read, so the
    store changes when experts are computed, never what is computed.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        slab: Slab,
        policy: LayerShares,
        bind: Callable[[ExpertKey, torch.Tensor], W],
        *,
        stream_slots: int,
    ) -> None:
        """Takes over the fetcher and the slab.

        Args:
            fetcher: what fills slots.
            slab: the slots.
            policy: decides who gives up a slot; must hold no key yet.
            bind: turns a filled slot (``uint8``) into the expert's weights.
            stream_slots: slots that experts who only pass through may take from the others.
        """
        self._fetcher = fetcher
        self._slab = slab
        self._policy = policy
        self._bind = bind
        self._stream_slots = max(1, min(stream_slots, slab.num_slots))
        self._entries: dict[ExpertKey, Entry[W]] = {}
        self._passing: set[ExpertKey] = set()  # they only pass through; the policy knows the rest
        self._free = list(range(slab.num_slots - 1, -1, -1))
        self._changed = fetcher.changed
        self._counters = Counters()
        self._link = LinkMeter()

    def share(self, layer: int) -> int:
        """Experts of a layer that the tier may hold before the layer has to evict its own."""
        return self._policy.share(layer)

    def lease(self, keys: Sequence[ExpertKey], *, streaming: bool = False) -> "Lease[W]":
        """Holds experts of one layer in their slots while they are used.

        Misses are demanded at once, as far as there are slots; iterating over the lease yields the
        experts in groups as they become usable.

        Args:
            keys: the experts, no one twice, least recently used first.
            streaming: the call visits most of the layer's experts (a prompt): missing ones pass
                through a few slots and the cache stays as it is, except that free room is filled.
        """
        return Lease(self, keys, streaming=streaming)

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        """Starts reading experts that will probably be leased next, behind all demands.

        Takes free slots only, and no more of them than streaming may use; the rest is ignored.
        What was read ahead for another layer and has not been leased is given up.
        """
        with self._changed:
            expected_layers = {key.layer for key in keys}
            for layer in {key.layer for key in self._passing} - expected_layers:
                self._forget_expected(layer)
            for key in keys:
                if key in self._entries:
                    continue
                if not self._free or len(self._passing) >= self._stream_slots:
                    return
                entry = self._start(key, self._free.pop(), keep=False, priority=Priority.READAHEAD)
                entry.expected = True

    def observe(self, event: Event) -> None:
        """Tells the policy of a step or of a layer's routing, if it asks to know."""
        if self._policy.watcher:
            with self._changed:
                self._policy.watcher.observe(event)

    def finish(self, sequence: int) -> None:
        """Tells the policy that a request ended."""
        if self._policy.watcher:
            with self._changed:
                self._policy.watcher.finish(sequence)

    @property
    def watches(self) -> bool:
        """Whether the policy must be told of routing events."""
        return bool(self._policy.watcher)

    @property
    def decides_later(self) -> bool:
        """Whether the policy decides after the use what is kept."""
        return self._policy.may_decline

    def stats(self) -> StoreStats:
        """The counters so far."""
        with self._changed:
            return self._counters.stats(self._slab.num_slots, self._slab.slot_bytes)

    def reset_stats(self) -> None:
        """Sets all counters to zero, as after a warm-up."""
        with self._changed:
            self._counters = Counters()

    def check(self) -> None:
        """Proves that free, resident and arriving slots make up the tier, each exactly once.

        Raises:
            AssertionError: the books do not balance.
        """
        with self._changed:
            occupied = [entry.slot for entry in self._entries.values()]
            assert sorted(occupied + self._free) == list(range(self._slab.num_slots))
            kept = self._entries.keys() - self._passing
            assert self._passing <= self._entries.keys()
            assert len(self._policy) == len(kept)
            assert all(key in self._policy for key in kept)
            assert all(entry.pins >= 0 for entry in self._entries.values())
            assert all(entry.arrived or entry.read for entry in self._entries.values())
            self._policy.check()

    def close(self) -> None:
        """Ends the reads under way. The store must not be used afterwards."""
        self._fetcher.close()

    # What follows is called with the lock held.

    def _start(self, key: ExpertKey, slot: int, *, keep: bool, priority: Priority) -> Entry[W]:
        entry: Entry[W] = Entry(slot)
        self._entries[key] = entry
        if keep:
            self._policy.insert(key)
        else:
            self._passing.add(key)
        self._link.begin(is_demand=priority is Priority.DEMAND)
        entry.read = self._fetcher.fetch(
            key, self._slab.slot(slot), priority, lambda read: self._arrive(key, entry, read)
        )
        return entry

    def _arrive(self, key: ExpertKey, entry: Entry[W], read: Read) -> None:
        with self._changed:
            entry.read = read
            entry.arrived = True
            is_demand = read.priority is Priority.DEMAND
            self._link.end(read.num_bytes, is_demand=is_demand, now_s=read.ended_s)
            if is_demand:
                self._counters.demand_bytes += read.num_bytes
            else:
                self._counters.readahead_bytes += read.num_bytes
            self._drop_if_done(key)
            self._changed.notify_all()

    def _take_slot(self, incoming: ExpertKey, *, keep: bool) -> int | None:
        if self._free:
            return self._free.pop()
        idle = [key for key in self._passing if self._is_idle(key)]
        victim = next((key for key in idle if not self._entries[key].expected), None)
        if victim is None and (keep or len(self._passing) < self._stream_slots):
            victim = self._policy.victim(self._is_idle, incoming)
        if victim is None:
            victim = next(iter(idle), None)
        if victim is None:
            return None
        self._counters.evictions += 1
        self._drop(victim)
        return self._free.pop()

    def _keep(self, key: ExpertKey) -> None:
        self._passing.remove(key)
        self._policy.insert(key)

    def _drop(self, key: ExpertKey) -> None:
        self._counters.wasted_guesses += self._entries[key].guessed
        if key in self._passing:
            self._passing.remove(key)
        else:
            self._policy.remove(key)
        self._free.append(self._entries.pop(key).slot)

    def _settle(self, key: ExpertKey) -> None:
        """Decides after the use whether the policy keeps an expert that passed through."""
        if self._policy.room(key.layer) == 0:
            victim = self._policy.victim(self._is_idle, key)
            if victim is None or self._policy.declines(key, victim):
                self._policy.decline(key)
                return
            self._counters.evictions += 1
            self._drop(victim)
        self._keep(key)

    def _drop_if_done(self, key: ExpertKey) -> None:
        entry = self._entries[key]
        failed = entry.read is not None and entry.read.error is not None
        passed = key in self._passing and not (entry.expected or entry.guessed)
        if (failed or passed) and self._is_idle(key):
            self._drop(key)

    def _forget_expected(self, layer: int) -> None:
        for key in [key for key in self._passing if key.layer == layer]:
            self._entries[key].expected = False
            self._drop_if_done(key)

    def _is_idle(self, key: Hashable) -> bool:
        entry = self._entries[cast(ExpertKey, key)]
        return entry.arrived and entry.pins == 0


class Lease(Generic[W]):
    """A hold on some experts of a layer; made by ``ExpertStore.lease`` and used as a context.

    Iterating yields lists of ``(key, weights)``: what is resident first, then what arrives,
    together as it arrives. When streaming, arrivals go first and residents fill the time between
    them, so that the slots which the stream passes through are free again as soon as possible. The
    experts of a list are released when the next list is asked for.
    """

    def __init__(
        self, store: ExpertStore[W], keys: Sequence[ExpertKey], *, streaming: bool
    ) -> None:
        self._store = store
        self._keys = keys
        self._streaming = streaming
        self._resident: deque[ExpertKey] = deque()
        self._arriving: list[ExpertKey] = []
        self._wanted: deque[ExpertKey] = deque()
        self._held: list[ExpertKey] = []
        self._keep: set[ExpertKey] = set()
        # A policy that may decline an expert is asked when the expert was used.
        self._decides_later = store._policy.may_decline and not streaming

    def __enter__(self) -> "Lease[W]":
        with self._store._changed:
            missing = [key for key in self._keys if not self._pin_present(key)]
            if self._store._passing:
                for layer in {key.layer for key in self._keys}:
                    self._store._forget_expected(layer)
            if missing:
                self._keep = set(self._worth_keeping(missing))
                self._wanted.extend(missing)
                self._store._counters.misses += len(missing)
                self._admit()
        return self

    def __exit__(self, *_: object) -> None:
        if not (self._held or self._resident or self._arriving or self._wanted):
            return
        with self._store._changed:
            self._release([*self._held, *self._resident, *self._arriving])
            self._held, self._arriving = [], []
            self._resident.clear()
            self._wanted.clear()

    def __iter__(self) -> Iterator[list[tuple[ExpertKey, W]]]:
        while group := self._next_group():
            yield [(key, self._weights(key)) for key in group]

    @property
    def all_started(self) -> bool:
        """Whether every expert of the lease is resident or on its way."""
        return not self._wanted

    @property
    def will_wait(self) -> bool:
        """Whether some experts are there already and others are not: time to think is after the
        first group, while nothing could be computed anyway."""
        is_partial = bool(self._resident and (self._wanted or self._arriving))
        return is_partial and not self._streaming

    def _next_group(self) -> list[ExpertKey]:
        store = self._store
        with store._changed:
            self._release(self._held)
            self._held = []
            while True:
                self._admit()
                self._held = self._take_ready()
                if self._held or not (self._wanted or self._arriving):
                    return self._held
                start = time.perf_counter()
                store._changed.wait()
                store._counters.stall_s += time.perf_counter() - start

    def _pin_present(self, key: ExpertKey) -> bool:
        store = self._store
        entry = store._entries.get(key)
        if entry is None:
            return False
        entry.pins += 1
        assert entry.read is not None
        store._counters.useful_guesses += entry.guessed and entry.arrived
        store._counters.late_guesses += entry.guessed and not entry.arrived
        entry.guessed = False
        if entry.arrived and entry.read.error is None:
            store._counters.hits += 1
            self._resident.append(key)
        else:
            store._counters.late_hits += 1
            if entry.read.priority is not Priority.DEMAND and not entry.arrived:
                store._link.begin_demand()
            store._fetcher.promote(key, entry.read)
            self._arriving.append(key)
        if key not in store._passing:
            store._policy.touch(key)
        elif not self._decides_later and (not self._streaming or store._policy.room(key.layer) > 0):
            store._keep(key)
        return True

    def _release(self, keys: Sequence[ExpertKey]) -> None:
        store = self._store
        for key in keys:
            store._entries[key].pins -= 1
        for key in keys:
            entry = store._entries.get(key)
            if entry is None:  # it made room for another one of the list
                continue
            sound = entry.read is None or entry.read.error is None
            if sound and key not in store._passing:
                continue
            if self._decides_later and store._is_idle(key) and sound:
                store._settle(key)
            store._drop_if_done(key)
        if keys:
            store._changed.notify_all()

    def _worth_keeping(self, missing: Sequence[ExpertKey]) -> Sequence[ExpertKey]:
        if self._decides_later:
            return []
        if not self._streaming or not missing:
            return missing
        room = self._store._policy.room(missing[0].layer)
        return missing[max(0, len(missing) - room) :]

    def _admit(self) -> None:
        store = self._store
        while self._wanted:
            key = self._wanted[0]
            if key in store._entries:  # another lease asked for it while this one waited for a slot
                store._entries[key].pins += 1
            else:
                keep = key in self._keep
                slot = store._take_slot(key, keep=keep)
                if slot is None:
                    return
                store._start(key, slot, keep=keep, priority=Priority.DEMAND).pins += 1
            self._arriving.append(self._wanted.popleft())

    def _take_ready(self) -> list[ExpertKey]:
        if not self._arriving and not self._streaming:
            ready, self._resident = list(self._resident), deque()
            return ready
        arrived = [key for key in self._arriving if self._store._entries[key].arrived]
        for key in arrived:
            read = self._store._entries[key].read
            if read is not None and read.error is not None:
                raise read.error
        self._arriving = [key for key in self._arriving if key not in set(arrived)]
        if self._streaming:
            return arrived or ([self._resident.popleft()] if self._resident else [])
        ready = [*self._resident, *arrived]
        self._resident.clear()
        return ready

    def _weights(self, key: ExpertKey) -> W:
        entry = self._store._entries[key]
        if entry.weights is None:
            entry.weights = self._store._bind(key, self._store._slab.slot(entry.slot))
        return entry.weights
