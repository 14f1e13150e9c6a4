"""A store that writes what it does to a timeline; without one, the plain store runs as it is."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch

from moe_runtime.lab.traces.timeline import Timeline, expert_name
from moe_runtime.memory.entries import Entry, Fetcher
from moe_runtime.memory.io_queue import Priority, Read
from moe_runtime.memory.lease import Lease
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.memory.slab import Slab
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.types import ExpertKey

W = TypeVar("W")

_KINDS = {Priority.DEMAND: "demand", Priority.READAHEAD: "prefetch"}


class TimedStore(ExpertStore[W], Generic[W]):
    """Notes every read with its expert and, where layers compute from it, every layer.

    A layer's slice holds in turn the computation of the experts that are there and the waits for
    those that are not. What lies between two layers is dense computation.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        slab: Slab,
        policy: LayerShares,
        bind: Callable[[ExpertKey, torch.Tensor], W],
        *,
        stream_slots: int,
        timeline: Timeline,
        tier: int = 0,
    ) -> None:
        """Takes what the plain store takes.

        Args:
            fetcher: what fills slots.
            slab: the slots.
            policy: decides who gives up a slot; must hold no key yet.
            bind: turns a filled slot into the expert's weights.
            stream_slots: slots that experts who only pass through may take from the others.
            timeline: where events go.
            tier: 0 for the store that layers compute from, 1 for the one below.
        """
        super().__init__(fetcher, slab, policy, bind, stream_slots=stream_slots)
        self._timeline = timeline
        self._tier = tier
        # Reads under way: begin, row on the timeline, and what they were begun as.
        self._begun: dict[ExpertKey, tuple[float, int, str]] = {}
        self._dense_since_s: float | None = None

    def lease(
        self,
        keys: Sequence[ExpertKey],
        *,
        streaming: bool = False,
        above: Read | None = None,
    ) -> Lease[W]:
        """Holds experts, and notes what becomes of them if a layer computes from this store."""
        make = Lease if self._tier else TimedLease
        return make(cast(Any, self), keys, streaming=streaming, above=above)

    def use_resident(self, keys: Any, use: Any) -> None:
        """Leaves all to leases, which are noted."""

    def begin_dense(self) -> None:
        """Dense computation begins."""
        self._dense_since_s = time.perf_counter()

    def end_dense(self, now_s: float) -> None:
        """Dense computation ended, if any was under way."""
        if self._dense_since_s is not None:
            self._timeline.slice("dense", self._dense_since_s, now_s)
        self._dense_since_s = None

    def _start(
        self, key: ExpertKey, slot: int, *, keep: bool, priority: Priority, passes: bool = False
    ) -> Entry[W]:
        taken = {lane for _, lane, _ in self._begun.values()}
        lane = next(number for number in range(len(taken) + 1) if number not in taken)
        self._begun[key] = (time.perf_counter(), lane, _KINDS[priority])
        return super()._start(key, slot, keep=keep, priority=priority, passes=passes)

    def _arrive(self, key: ExpertKey, read: Read) -> None:
        with self._changed:
            outcome = "failed" if read.error else _KINDS[read.priority]
            self._end_read(key, outcome, read.num_bytes, read.ended_s)
            super()._arrive(key, read)

    def _drop(self, key: ExpertKey) -> None:
        self._end_read(key, "taken back", 0, time.perf_counter())
        super()._drop(key)

    def _mend(self) -> None:
        super()._mend()
        arriving = {key for key, entry in self._entries.items() if not entry.arrived}
        self._begun = {key: self._begun[key] for key in self._begun.keys() & arriving}

    def _end_read(self, key: ExpertKey, outcome: str, num_bytes: int, end_s: float) -> None:
        """Notes a read, if it is one whose begin was noted and whose end was not."""
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        begin_s, lane, kind = begun
        tier = ("reads", "reads below")[self._tier]
        self._timeline.slice(
            f"{kind} {expert_name(key)}",
            begin_s,
            end_s,
            track=self._timeline.read_track(tier, self._tier, lane),
            began_as=kind,
            ended_as=outcome,
            bytes=num_bytes,
        )


class TimedLease(Lease[W], Generic[W]):
    """A lease whose layer, groups and waits are slices."""

    def __init__(
        self,
        store: TimedStore[W],
        keys: Sequence[ExpertKey],
        *,
        streaming: bool,
        above: Read | None,
    ) -> None:
        super().__init__(store, keys, streaming=streaming, above=above)
        self._timed = store
        self._begin_s = 0.0
        self._computing_since_s: float | None = None
        self._outcome: dict[str, list[str]] = {}

    def __enter__(self) -> "TimedLease[W]":
        self._begin_s = time.perf_counter()
        self._timed.end_dense(self._begin_s)
        with self._store._changed:
            present = {key for key in self._keys if key in self._store._entries}
            super().__enter__()
            hits = set(self._resident)
        named = {
            "hits": [key for key in self._keys if key in hits],
            "late": [key for key in self._keys if key in present - hits],
            "misses": [key for key in self._keys if key not in present],
        }
        self._outcome = {name: list(map(expert_name, keys)) for name, keys in named.items()}
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        now_s = time.perf_counter()
        layers = sorted({key.layer for key in self._keys})
        name = f"layer {layers[0]}" if len(layers) == 1 else "layer"
        outcome = self._outcome
        self._timed._timeline.slice(
            name,
            self._begin_s,
            now_s,
            hits=outcome["hits"],
            late=outcome["late"],
            misses=outcome["misses"],
        )
        self._timed.begin_dense()

    def _next_group(self) -> list[ExpertKey]:
        store, asked_s = self._timed, time.perf_counter()
        if self._computing_since_s is not None:
            store._timeline.slice(
                "experts", self._computing_since_s, asked_s, experts=[*map(expert_name, self._held)]
            )
        before_s = store._counters.stall_s
        group = super()._next_group()
        now_s = time.perf_counter()
        if store._counters.stall_s > before_s:
            store._timeline.slice("wait", asked_s, now_s, then=[*map(expert_name, group)])
        self._computing_since_s = now_s if group else None
        return group
