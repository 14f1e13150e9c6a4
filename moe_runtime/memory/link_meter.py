"""How fast a tier is filled and how long it is waited for, measured while it happens."""

import time
from typing import NamedTuple

FORGET = 0.98
"""What a finished transfer leaves of the weight of those before it: the last fifty or so count."""


class LinkState(NamedTuple):
    """A look at the link between a tier and the one below.

    Attributes:
        transfer_s: seconds that one expert takes on an idle link, as a running mean; 0 before
            anything arrived.
        stall_s: seconds that computation waited since the counters were reset.
        demand_s: seconds in which a demand was under way, since the store was opened.
        num_missing: experts that were not there when they were asked for, since the counters were
            reset.
        came_true: guesses that were asked for, since the counters were reset.
    """

    transfer_s: float
    stall_s: float
    demand_s: float
    num_missing: int
    came_true: int


class LinkMeter:
    """Running mean of the throughput over the time in which transfers were under way.

    Attributes:
        under_way: transfers that were asked for and have not ended.
        beside: those of them that take another way.
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
        """What so many bytes take on an idle link; 0 before the first transfer ended."""
        return num_bytes * self._busy_s / self._bytes if self._bytes > 0 else 0.0

    @property
    def demand_s(self) -> float:
        """Seconds so far in which at least one demand was under way."""
        running_s = time.perf_counter() - self._demands_since_s if self._demands else 0.0
        return self._demand_s + running_s

    def begin(self, *, is_demand: bool) -> None:
        """A transfer was asked for."""
        if self.under_way == self.beside:
            self._since_s = time.perf_counter()
        self.under_way += 1
        if is_demand:
            self.begin_demand()

    def begin_demand(self) -> None:
        """A transfer that is under way is waited for from now on."""
        if self._demands == 0:
            self._demands_since_s = time.perf_counter()
        self._demands += 1

    def end(self, num_bytes: int, *, is_demand: bool, now_s: float) -> None:
        """A transfer ended at some time, or was taken back (with 0 bytes)."""
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
        """So many transfers are under way, and so many of them demands, whatever was counted."""
        now_s = time.perf_counter()
        self._demand_s = self.demand_s
        self.under_way, self._demands = under_way, demands
        self._since_s = self._demands_since_s = now_s
