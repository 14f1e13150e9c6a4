"""The expert store: which experts lie in a tier's slots, and the leases that hold them there."""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, Never, TypeVar, cast

import torch

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.entries import Entry, Fetcher, StoreListener
from moe_runtime.memory.io_queue import CLOSED, Priority, Read
from moe_runtime.memory.lease import Lease
from moe_runtime.memory.link_meter import LinkMeter
from moe_runtime.memory.slab import Slab
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.policies.eviction.base import Watcher
from moe_runtime.policies.prediction.base import Event
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")
R = TypeVar("R")


class ExpertStore(Generic[W]):
    """Slots of one tier, filled on demand, kept by a policy, held by leases.

    All methods may be called from several threads. What a lease yields is valid until the lease
    asks for more or ends. The content of a slot never depends on when or why it was read, so the
    store changes when experts are computed, never what is computed.

    Attributes:
        listener: hears what the store does, if anybody does.
        is_closed: whether its memory was given up, so that leases are refused.
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
            fetcher: what fills slots.
            slab: the slots.
            policy: decides who gives up a slot; must hold no key yet.
            bind: turns a filled slot (``uint8``) into the expert's weights.
            stream_slots: slots that experts who only pass through may take from the others.
            listener: hears what the store does.
        """
        self.listener = listener
        self.is_closed = False
        self._fetcher = fetcher
        self._slab = slab
        self._policy = policy
        self._bind = bind
        self._stream_slots = max(1, min(stream_slots, slab.num_slots))
        self._entries: dict[ExpertKey, Entry[W]] = {}
        self._streamed: set[ExpertKey] = set()  # they only pass through; the policy knows the rest
        self._free = list(range(slab.num_slots - 1, -1, -1))
        self._closed: set[int] = set()  # slots without memory, see resizing
        self._leases: set[weakref.ref[Lease[W]] | None] = set()  # those that are open
        self._changed = fetcher.changed
        self._changed.mend = self._mend
        self._counters = StoreStats()
        self._guesses_before = 0  # made before the counters were reset, and not judged by then
        self._link = LinkMeter()

    @property
    def num_slots(self) -> int:
        """Experts that the tier holds."""
        return self._slab.num_slots - len(self._closed)

    def share(self, layer: int) -> int:
        """Experts of a layer that the tier may hold before the layer has to evict its own."""
        return self._policy.share(layer)

    def lease(
        self,
        keys: Sequence[ExpertKey],
        *,
        streaming: bool = False,
        above: Read | None = None,
    ) -> Lease[W]:
        """Holds experts of one layer in their slots while they are used.

        Misses are demanded at once, as far as there are slots; iterating over the lease yields the
        experts in groups as they become usable.

        Args:
            keys: the experts, no one twice, those wanted most last.
            streaming: missing ones pass through a few slots. Those wanted most fill free room; of a
                lease of more experts than the layer's share they also take the slots of residents
                that the lease does not use.
            above: the read of the tier above that the experts are for; its priority is theirs.
        """
        return Lease(self, keys, streaming=streaming, above=above)

    def use_resident(
        self, keys: Sequence[ExpertKey], use: Callable[[list[W]], R | None]
    ) -> R | None:
        """Computes from experts of one layer that are all resident: a lease in short.

        The lock is held meanwhile, so that nothing has to be pinned: what is done with the experts
        should be short, and it must not wait for another thread that uses the store.

        Args:
            keys: as of a lease.
            use: is given the experts in the order of the keys; None says that it did not use them.

        Returns:
            What ``use`` returns, or None where the experts have to be leased.
        """
        with self._changed:
            if self._streamed or self.listener is not None:
                return None
            found: list[W] = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.weights is None or entry.read.error is not None:
                    return None
                found.append(entry.weights)
            result = use(found)
            if result is not None:
                policy = self._policy
                layer = policy if policy.counts_uses else policy.layers[keys[0].layer]
                for key in keys:
                    layer.touch(key)
                self._counters.hits += len(keys)
            return result

    def give_up(self, lease: Lease[W]) -> None:
        """Ends a lease that an exception left, wherever that struck."""
        lease.is_whole = False
        self._changed.disturb()
        self.let_go()

    def let_go(self) -> None:
        """Gives up the locks that an exception left to this thread, and repairs the entries."""
        self._fetcher.let_go()
        self._changed.let_go()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the store belongs to."""
        return self._changed.is_forked

    def promote(self, key: ExpertKey) -> None:
        """Serves an expert's read as a demand from now on, if it is under way."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None:
                self._hasten(key, entry, Priority.DEMAND)

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        """Starts reading experts that will probably be leased next, behind all demands.

        Takes free slots only, and no more of them than streaming may use; the rest is ignored.
        What was read ahead for another layer and has not been leased is given up.
        """
        with self._changed:
            expected_layers = {key.layer for key in keys}
            for layer in {key.layer for key in self._streamed} - expected_layers:
                self._forget_expected(layer)
            for key in keys:
                if key in self._entries:
                    continue
                if not self._free or len(self._streamed) >= self._stream_slots:
                    return
                entry = self._start(
                    key, self._free.pop(), keep=False, priority=Priority.READAHEAD, passes=True
                )
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
    def watchers(self) -> Sequence[Watcher]:
        """Those of the policy that must be told of routing events."""
        return self._policy.watchers

    @property
    def decides_later(self) -> bool:
        """Whether the policy decides after the use what is kept."""
        return self._policy.may_decline

    def stats(self) -> StoreStats:
        """The counters so far."""
        with self._changed:
            return dataclasses.replace(
                self._counters, expert_slots=self.num_slots, slot_bytes=self._slab.slot_bytes
            )

    def reset_stats(self) -> None:
        """Sets all counters to zero, as after a warm-up."""
        with self._changed:
            self._counters = StoreStats()
            self._guesses_before = self._num_open_guesses()

    def check(self) -> None:
        """Proves that free, resident and arriving slots make up the tier, each exactly once; that
        open leases hold the pins; that every read will end; and that no lock was left held.

        Raises:
            AssertionError: the entries contradict each other.
        """
        self._changed.check()
        with self._changed:
            entries = self._entries
            slots = [*self._free, *self._closed, *(entry.slot for entry in entries.values())]
            assert sorted(slots) == list(range(self._slab.num_slots))
            kept = entries.keys() - self._streamed
            assert self._streamed <= entries.keys()
            assert len(self._policy) == len(kept)
            assert all(key in self._policy for key in kept)
            assert {key: entry.pins for key, entry in entries.items()} == self._count_pins(
                self._open_leases()
            )
            arriving = [entry for entry in entries.values() if not entry.arrived]
            assert all(self._fetcher.is_under_way(entry.read) for entry in arriving)
            assert self._link.under_way == len(arriving)
            judged, made = self._counters.judged_guesses, self._counters.guesses
            assert made + self._guesses_before == judged + self._num_open_guesses()
            self._policy.check()

    def close(self) -> None:
        """Ends the reads under way, with their data or an error; experts in use live on."""
        self.is_closed = True
        self._fetcher.close()
        if not self.is_forked:
            with self._changed:
                self._slab.close()
                self._bind = _refuse  # the other one may remember views of slots
                for entry in self._entries.values():
                    entry.weights = None

    # What follows is called with the lock held.

    def _start(
        self, key: ExpertKey, slot: int, *, keep: bool, priority: Priority, passes: bool = False
    ) -> Entry[W]:
        read = Read(priority, partial(self._arrive, key), passes=passes)
        entry = self._enter(key, slot, read, keep=keep)
        self._fetcher.fetch(key, self._slab.slot(slot), read)
        return entry

    def _enter(self, key: ExpertKey, slot: int, read: Read, *, keep: bool) -> Entry[W]:
        if self.listener is not None:
            self.listener.read_began(key, read.priority)
        entry: Entry[W] = Entry(slot, read)
        self._entries[key] = entry
        self._policy.insert(key) if keep else self._streamed.add(key)
        self._link.begin(is_demand=read.priority is Priority.DEMAND)
        return entry

    def _hasten(self, key: ExpertKey, entry: Entry[W], priority: Priority) -> None:
        """What was read ahead is waited for, by somebody who is served at that priority."""
        if priority < entry.read.priority and not entry.arrived:
            self._link.begin_demand()
            self._fetcher.promote(key, entry.read)

    def _arrive(self, key: ExpertKey, read: Read) -> None:
        with self._changed:
            if self.listener is not None:
                self.listener.read_ended(key, read)
            entry, counters = self._entries.get(key), self._counters
            if entry is None or entry.read is not read or entry.arrived:
                return  # told of before an exception cut that short
            is_demand = read.priority is Priority.DEMAND
            demand = counters.demand_bytes + is_demand * read.num_bytes
            ahead = counters.readahead_bytes + (not is_demand) * read.num_bytes
            # all or nothing of one line
            entry.arrived, counters.demand_bytes, counters.readahead_bytes = True, demand, ahead
            self._link.end(read.num_bytes, is_demand=is_demand, now_s=read.ended_s)
            self._drop_if_done(key)
            self._changed.notify_all()

    def _take_slot(self, incoming: ExpertKey, *, keep: bool) -> int | None:
        if self._free:
            return self._free.pop()
        idle = [key for key in self._streamed if self._is_idle(key)]
        victim = next((key for key in idle if not self._entries[key].expected), None)
        if victim is None and (keep or len(self._streamed) < self._stream_slots):
            victim = self._victim(incoming)
        if victim is None:
            victim = next(iter(idle), None)
        if victim is None:
            return None
        self._counters.evictions += 1
        self._drop(victim)
        return self._free.pop()

    def _victim(self, incoming: ExpertKey) -> ExpertKey | None:
        return cast(ExpertKey | None, self._policy.victim(self._is_idle, incoming))

    def _keep(self, key: ExpertKey) -> None:
        self._streamed.remove(key)
        self._policy.insert(key)

    def _drop(self, key: ExpertKey) -> None:
        if self.listener is not None:
            self.listener.dropped(key)
        self._counters.wasted_guesses += self._entries[key].guessed
        self._streamed.remove(key) if key in self._streamed else self._policy.remove(key)
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
        failed = entry.read.error is not None
        passed = key in self._streamed and not (entry.expected or entry.guessed)
        if (failed or passed) and self._is_idle(key):
            self._drop(key)

    def _forget_expected(self, layer: int) -> None:
        for key in [key for key in self._streamed if key.layer == layer]:
            self._entries[key].expected = False
            self._drop_if_done(key)

    def _is_idle(self, key: Hashable) -> bool:
        entry = self._entries[cast(ExpertKey, key)]
        return entry.arrived and entry.pins == 0

    def _num_open_guesses(self) -> int:
        return sum(entry.guessed for entry in self._entries.values())

    def _open_leases(self) -> list[Lease[W]]:
        leases = [ref() for ref in tuple(self._leases) if ref is not None]
        return [lease for lease in leases if lease is not None and lease.is_whole]

    def _count_pins(self, leases: Sequence[Lease[W]]) -> dict[ExpertKey, int]:
        pins = dict.fromkeys(self._entries, 0)
        for lease in leases:
            for key in lease.pinned():
                pins[key] += 1
        return pins

    def _mend(self) -> None:
        """Rebuilds the entries, which an exception may have left anyhow.

        What it cannot have touched: which reads are under way, which have told that they ended, and
        the leases that were not in the midst of an operation.
        """
        leases = self._open_leases()
        self._leases = {lease._ref for lease in leases}
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if entry.arrived or self._fetcher.is_under_way(entry.read)
        }
        for key, pins in self._count_pins(leases).items():
            self._entries[key].pins = pins
        occupied = self._closed.union(entry.slot for entry in self._entries.values())
        self._free = [n for n in reversed(range(self._slab.num_slots)) if n not in occupied]
        self._streamed &= self._entries.keys()
        self._policy.restore([key for key in self._entries if key not in self._streamed])
        arriving = [entry.read for entry in self._entries.values() if not entry.arrived]
        demands = sum(read.priority is Priority.DEMAND for read in arriving)
        self._link.recount(len(arriving), demands)
        counters = self._counters
        open_guesses = self._num_open_guesses() - self._guesses_before
        counters.guesses = counters.judged_guesses + open_guesses
        for key in list(self._entries):
            self._drop_if_done(key)
        if self.listener is not None:
            self.listener.mended({key for key, e in self._entries.items() if not e.arrived})
        self._changed.notify_all()


def _refuse(_: ExpertKey, __: torch.Tensor) -> Never:
    raise MoERuntimeError(CLOSED)
