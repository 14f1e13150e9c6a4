"""How fast a tier is filled, measured while it happens."""

import time
from dataclasses import dataclass

FORGET = 0.98
"""What a finished transfer leaves of the weight of those before it: the last fifty or so count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkState:
    """A look at the link between a tier and the one below.

    Attributes:
        bytes_per_s: bytes that arrived per second in which something was under way, as a running
            mean; 0 before anything arrived.
        waiting_bytes: bytes of slots that are waiting or being filled.
        slot_bytes: bytes of one slot.
        stall_s: seconds that computation waited since the counters were reset.
    """

    bytes_per_s: float
    waiting_bytes: int
    slot_bytes: int
    stall_s: float


class LinkMeter:
    """Running mean of the throughput over the time in which transfers were under way.

    Attributes:
        under_way: transfers that were asked for and have not ended.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The running mean; 0 before the first transfer ended."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self) -> None:
        """A transfer was asked for."""
        if self.under_way == 0:
            self._since_s = time.perf_counter()
        self.under_way += 1

    def end(self, num_bytes: int) -> None:
        """A transfer ended, or was taken back (with 0 bytes)."""
        now = time.perf_counter()
        self.under_way -= 1
        if num_bytes:
            self._busy_s = FORGET * self._busy_s + (now - self._since_s)
            self._bytes = FORGET * self._bytes + num_bytes
            self._since_s = now
