"""What an expert store consists of: its entries, what fills them, and the meter of its link."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from moe_runtime.memory.reads import Monitor, Priority, Read
from moe_runtime.types import ExpertKey

W = TypeVar("W")

FORGET = 0.98
"""What a transfer leaves of the weight of those before it: about the last fifty count."""


class Fetcher(Protocol):
    """Fills the slots of a tier, from files or from the tier below.

    All but ``close`` is called with ``changed`` held, which guards the entries of that tier.
    """

    changed: Monitor

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to fill a slot; the end of the read is announced later."""
        ...

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves the rest of a read-ahead as a demand."""
        ...

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        ...

    def is_under_way(self, read: Read) -> bool:
        """Whether a read was started and its end is still to be announced."""
        ...

    def close(self) -> None:
        """Ends what is under way: every read ends, with its data or an error."""
        ...


class LeaseListener(Protocol):
    """Hears of one lease."""

    def entered(
        self, hits: Sequence[ExpertKey], late: Sequence[ExpertKey], misses: Sequence[ExpertKey]
    ) -> None:
        """The lease holds what is there, and its misses are demanded."""
        ...

    def asked(self, done: Sequence[ExpertKey]) -> None:
        """The next group is asked for; the last one was computed."""
        ...

    def given(self, group: Sequence[ExpertKey], *, waited: bool) -> None:
        """The next group is there; an empty one is the end."""
        ...

    def left(self) -> None: ...


class StoreListener(Protocol):
    """Hears of a store's reads; called with its lock held, ``lease`` excepted."""

    def read_began(self, key: ExpertKey, priority: Priority) -> None: ...

    def read_ended(self, key: ExpertKey, read: Read) -> None:
        """The read ended, with data or an error."""
        ...

    def dropped(self, key: ExpertKey) -> None:
        """An expert gave up its slot, perhaps before its read began."""
        ...

    def was_reset(self, arriving: Collection[ExpertKey]) -> None:
        """The store was emptied; only these are still being read."""
        ...

    def lease(self) -> LeaseListener | None:
        """The listener of a lease that is about to be entered."""
        ...


class LinkState(NamedTuple):
    """The state of the link between a tier and the one below.

    Attributes:
        transfer_s: of one expert on an idle link, as a running mean; 0 before the first.
        stall_s: for which computation waited, since the counters were reset.
        demand_s: in which a demand was under way, since the store was opened.
        num_missing: misses and late hits, since the counters were reset.
        came_true: guesses that were asked for, since the counters were reset.
    """

    transfer_s: float
    stall_s: float
    demand_s: float
    num_missing: int
    came_true: int


class LinkMeter:
    """Running mean of throughput, over the time in which transfers were under way.

    Attributes:
        under_way: transfers that have not ended.
        beside: those of them that use another link.
    """

    def __init__(self) -> None:
        self.under_way = self.beside = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0
        self._demands = 0
        self._demands_since_s = 0.0
        self._demand_s = 0.0

    def seconds_for(self, num_bytes: int) -> float:
        """Seconds of a transfer on an idle link; 0 before the first transfer ended."""
        return num_bytes * self._busy_s / self._bytes if self._bytes > 0 else 0.0

    @property
    def demand_s(self) -> float:
        """Seconds so far in which a demand was under way."""
        running_s = time.perf_counter() - self._demands_since_s if self._demands else 0.0
        return self._demand_s + running_s

    def begin(self, *, is_demand: bool) -> None:
        if self.under_way == self.beside:
            self._since_s = time.perf_counter()
        self.under_way += 1
        if is_demand:
            if self._demands == 0:
                self._demands_since_s = time.perf_counter()
            self._demands += 1

    def begin_demand(self) -> None:
        """A read-ahead that is under way becomes a demand."""
        if self._demands == 0:
            self._demands_since_s = time.perf_counter()
        self._demands += 1

    def end(self, num_bytes: int, *, is_demand: bool, now_s: float) -> None:
        """A transfer ended, or was cancelled (0 bytes)."""
        self.under_way -= 1
        if is_demand:
            self._demands -= 1
            if self._demands == 0:
                self._demand_s += max(0.0, now_s - self._demands_since_s)
        if num_bytes:
            self._busy_s = FORGET * self._busy_s + max(0.0, now_s - self._since_s)
            self._bytes = FORGET * self._bytes + num_bytes
            self._since_s = now_s

    def recount(self, under_way: int, demands: int) -> None:
        """Sets the transfers and demands that are under way."""
        now_s = time.perf_counter()
        self._demand_s = self.demand_s
        self.under_way, self._demands = under_way, demands
        self._since_s = self._demands_since_s = now_s


@dataclass(slots=True)
class Entry(Generic[W]):
    """One occupied slot.

    Attributes:
        expected: read ahead, and its layer has not come yet.
        guessed: prefetched and not used since.
        pins: leases that hold it.
        arrived: whether the read has ended.
        weights: what the slot was bound to, once it was used.
    """

    slot: int
    read: Read
    expected: bool = False
    guessed: bool = False
    pins: int = 0
    arrived: bool = False
    weights: W | None = None


def is_resident(entry: Entry[W] | None) -> bool:
    """Whether an expert is in its slot; without the lock, this may be outdated."""
    return entry is not None and entry.arrived and entry.read.error is None
