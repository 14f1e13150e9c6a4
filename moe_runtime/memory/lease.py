"""A hold on some experts: what is yielded of them, and how it is given back on every way out."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.io_queue import Priority, Read
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.memory.residency import ExpertStore

W = TypeVar("W")


class Lease(Generic[W]):
    """A hold on some experts of a layer; made by ``ExpertStore.lease`` and used as a context.

    Iterating yields lists of ``(key, weights)``: what is resident first, then what arrives,
    together as it arrives. When streaming, arrivals go first and residents fill the time between
    them, so that the slots which the stream passes through are free again as soon as possible. The
    experts of a list are released when the next list is asked for.

    The store knows the leases that are open, by weak references, and counts its pins anew from
    them when something went wrong: an operation that an exception cuts short ends its lease.

    Attributes:
        is_whole: whether the lists below say what is pinned: not within an operation.
    """

    def __init__(
        self,
        store: ExpertStore[W],
        keys: Sequence[ExpertKey],
        *,
        streaming: bool,
        above: Read | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._streaming = streaming
        self._above = above
        self.is_whole = True
        self._ref: weakref.ref[Lease[W]] | None = None
        self._resident: deque[ExpertKey] = deque()
        self._arriving: list[ExpertKey] = []
        self._wanted: deque[ExpertKey] = deque()
        self._held: list[ExpertKey] = []
        self._keep: set[ExpertKey] = set()
        # A policy that may decline an expert is asked when the expert was used.
        passes = streaming and len(keys) <= store.share(keys[0].layer)
        self._decides_later = store._policy.may_decline and not passes
        self._listener = None if store.listener is None else store.listener.lease()
        self._has_waited = False

    def __enter__(self) -> Lease[W]:
        store = self._store
        with store._changed:
            self.is_whole = False
            self._ref = weakref.ref(self, store._changed.disturb)
            store._leases.add(self._ref)
            missing = [key for key in self._keys if not self._pin_present(key)]
            if self._listener is not None:
                self._listener.entered([*self._resident], [*self._arriving], missing)
            # who streams experts one by one has had those behind it read ahead
            if store._streamed and not (self._streaming and len(self._keys) == 1):
                for layer in {key.layer for key in self._keys}:
                    store._forget_expected(layer)
            if missing or self._streaming:
                self._keep = set(self._worth_keeping(missing))
                self._wanted.extend(sorted(missing, key=lambda key: key not in self._keep))
                store._counters.misses += len(missing)
                self._admit()
            self.is_whole = True
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        if self._listener is not None:
            self._listener.left()

    def _leave(self) -> None:
        store = self._store
        if not (self._held or self._resident or self._arriving or self._wanted):
            self._forget()
            return
        with store._changed as is_own:
            if not is_own:  # the garbage collector ends it in the midst of an operation
                self.is_whole = False
                store._changed.disturb()
            elif self._ref in store._leases:  # else an exception has ended it already
                self.is_whole = False
                self._release(self.pinned())
                self._held, self._arriving = [], []
                self._resident.clear()
                self._wanted.clear()
                self._forget()

    def pinned(self) -> list[ExpertKey]:
        """The experts that cannot be evicted because of this lease."""
        return [*self._held, *self._resident, *self._arriving]

    def __iter__(self) -> Iterator[list[tuple[ExpertKey, W]]]:
        listener = self._listener
        while True:
            if listener is not None:
                listener.asked(self._held)
            group = self._next_group()
            if listener is not None:
                listener.given(group, waited=self._has_waited)
            if not group:
                return
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
            if self._ref not in store._leases:
                raise MoERuntimeError("this lease has ended; ask for the experts again")
            self.is_whole = self._has_waited = False
            self._release(self._held)
            self._held = []
            while True:
                self._admit()
                self._held = self._take_ready()
                self.is_whole = True
                if self._held or not (self._wanted or self._arriving):
                    return self._held
                start, self._has_waited = time.perf_counter(), True
                store._changed.wait()
                store._counters.stall_s += time.perf_counter() - start
                self.is_whole = False

    def _pin_present(self, key: ExpertKey) -> bool:
        store = self._store
        entry = store._entries.get(key)
        if entry is None:
            return False
        entry.pins += 1
        entry.expected = False
        store._counters.useful_guesses += entry.guessed and entry.arrived
        store._counters.late_guesses += entry.guessed and not entry.arrived
        entry.guessed = False
        if entry.arrived and entry.read.error is None:
            store._counters.hits += 1
            self._resident.append(key)
        else:
            store._counters.late_hits += 1
            store._hasten(key, entry, self._priority())
            self._arriving.append(key)
        if key not in store._streamed:
            store._policy.touch(key)
        elif not self._decides_later and not self._streaming:
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
            sound = entry.read.error is None
            if sound and key not in store._streamed:
                continue
            if self._decides_later and store._is_idle(key) and sound:
                store._settle(key)
            store._drop_if_done(key)
        if keys:
            store._changed.notify_all()

    def _worth_keeping(self, missing: Sequence[ExpertKey]) -> Collection[ExpertKey]:
        if self._decides_later or not self._streaming:
            return [] if self._decides_later else missing
        from moe_runtime.memory.streaming import keep_most_wanted  # not every model streams

        return keep_most_wanted(self._store, self._keys, only_free=self._above is not None)

    def _admit(self) -> None:
        store = self._store
        while self._wanted:
            key = self._wanted[0]
            if key in store._entries:  # another lease asked for it while this one waited for a slot
                entry = store._entries[key]
                store._hasten(key, entry, self._priority())
            else:
                keep = key in self._keep
                slot = store._take_slot(key, keep=keep and not self._streaming)
                if slot is None:
                    return
                entry = store._start(
                    key, slot, keep=keep, priority=self._priority(), passes=self._streaming
                )
            entry.pins += 1
            self._arriving.append(self._wanted.popleft())

    def _priority(self) -> Priority:
        """What missing experts are read as: it may have changed while a slot was waited for."""
        return Priority.DEMAND if self._above is None else self._above.priority

    def _forget(self) -> None:
        self._store._leases.discard(self._ref)
        self._ref = None

    def _take_ready(self) -> list[ExpertKey]:
        if not self._arriving and not self._streaming:
            ready, self._resident = list(self._resident), deque()
            return ready
        arrived = [key for key in self._arriving if self._store._entries[key].arrived]
        for key in arrived:
            error = self._store._entries[key].read.error
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame: a cycle, which keeps all of the pass
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
