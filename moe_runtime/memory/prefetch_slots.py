"""Prefetching into an expert store: which slots guesses may take, and how they are taken back."""

import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Generic, TypeVar, cast

from moe_runtime.memory.io_queue import Priority
from moe_runtime.memory.link_meter import LinkState
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.policies.prediction.base import Guess
from moe_runtime.policies.prefetch import Admission
from moe_runtime.types import ExpertKey

W = TypeVar("W")


class Guesses(Generic[W]):
    """The prefetches of one store, as ``Lease`` is the demands.

    A guess never takes the slot of an expert that is leased, that is arriving, that the running
    step has just used, or that is itself about as probable.
    """

    def __init__(self, store: ExpertStore[W]) -> None:
        self._store = store

    def start(
        self, guesses: Sequence[Guess], chance: Mapping[ExpertKey, float], admission: Admission
    ) -> int:
        """Starts reading experts that will perhaps be leased, behind all demands.

        A guess takes a free slot, that of an earlier guess which its layer did not want, or that of
        the expert of its own layer that the policy values least. What is in the store already is
        left alone.

        Args:
            guesses: experts with their probabilities, the most urgent first.
            chance: probabilities of these and of others; what is not here has none.
            admission: the rules; the reads are paid for from its credit.

        Returns:
            How many reads were started.
        """
        store, started = self._store, 0
        with store._changed:
            held = sum(store._entries[key].expected for key in store._streamed)
            for key, probability in guesses:
                if held + started >= admission.rules.window or admission.room < 1:
                    break
                if key in store._entries:
                    continue
                slot = self._take_slot(key, admission.gives_way(key, probability, chance))
                if slot is not None:
                    entry = store._start(key, slot, keep=False, priority=Priority.READAHEAD)
                    entry.expected = entry.guessed = True
                    admission.spend((key, probability))
                    started += 1
            store._counters.guesses += started
        return started

    @property
    def may_be_stale(self) -> bool:
        """Whether there may be a guess whose read has not begun, as far as can be seen without
        the lock: one that ends meanwhile is no loss."""
        return bool(self._store._streamed) and self._store._link.under_way > 0

    def cancel_except(self, keys: Container[ExpertKey]) -> list[ExpertKey]:
        """Takes back guesses that are not among the keys and whose read has not begun.

        Returns:
            Those that were taken back.
        """
        store, cancelled = self._store, []
        with store._changed:
            for key in [key for key in store._streamed if key not in keys]:
                entry = store._entries[key]
                waits = entry.guessed and not entry.arrived and entry.pins == 0
                if waits and store._fetcher.cancel(entry.read):
                    entry.guessed = False
                    store._link.end(0, is_demand=False, now_s=time.perf_counter())
                    store._drop(key)
                    cancelled.append(key)
            store._counters.cancelled_guesses += len(cancelled)
            store._counters.guesses -= len(cancelled)
        return cancelled

    def absent(self, guesses: Sequence[Guess], least_probability: float = 0.0) -> list[Guess]:
        """Those at least so likely whose expert neither lies in a slot nor is on its way to one."""
        entries = self._store._entries  # without the lock: ``start`` looks again
        return [g for g in guesses if g[1] >= least_probability and g[0] not in entries]

    def link(self) -> LinkState:
        """What the link to the tier below is doing, for those who admit prefetches.

        Looked at without the lock: what has ended and is not known yet is in the next look.
        """
        link, counters = self._store._link, self._store._counters
        return LinkState(
            link.seconds_for(self._store._slab.slot_bytes),
            counters.stall_s,
            link.demand_s,
            counters.misses + counters.late_hits,
            counters.useful_guesses + counters.late_guesses,
        )

    def _take_slot(self, incoming: ExpertKey, gives_way: Callable[[ExpertKey], bool]) -> int | None:
        store = self._store
        if store._free:
            return store._free.pop()

        def may_go(key: Hashable) -> bool:
            expert = cast(ExpertKey, key)
            return gives_way(expert) and store._is_idle(expert)

        unwanted = (k for k in store._streamed if not store._entries[k].expected)
        victim = next(filter(store._is_idle, unwanted), None)
        if victim is None:
            victim = store._policy.victim_within(incoming.layer, may_go, incoming)
        if victim is None:
            return None
        store._counters.evictions += 1
        store._drop(victim)
        return store._free.pop()
