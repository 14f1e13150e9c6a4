"""What an expert store works with: where experts come from, its entries and its counters."""

from dataclasses import asdict, dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.io_queue import Read
from moe_runtime.types import ExpertKey, StoreStats

W = TypeVar("W")


class Fetcher(Protocol):
    """Where a tier gets its experts from: the files of a checkpoint, or the tier below.

    Attributes:
        changed: guards the entries of the tier that is filled; all that is below is called with it
            held, ``close`` excepted.
    """

    changed: Changes

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to fill a slot; the read is told later, when that ended."""
        ...

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves what is left of a read-ahead as a demand."""
        ...

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        ...

    def is_under_way(self, read: Read) -> bool:
        """Whether a read was started and its end is still to be told."""
        ...

    def let_go(self) -> None:
        """Gives up the locks, other than ``changed``, that an exception left to this thread."""
        ...

    def close(self) -> None:
        """Ends what is under way: every read is told, with its data or an error."""
        ...


@dataclass(slots=True)
class Entry(Generic[W]):
    """One occupied slot.

    ``expected``: read ahead, and its layer has not come yet. ``guessed``: prefetched and not used
    since; it stays when its layer did not want it, as the first to give up its slot.
    """

    slot: int
    read: Read
    expected: bool = False
    guessed: bool = False
    pins: int = 0
    arrived: bool = False
    weights: W | None = None


@dataclass(slots=True)
class Counters:
    """What ``StoreStats`` and the prefetcher's statistics are made of."""

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    demand_bytes: int = 0
    readahead_bytes: int = 0
    evictions: int = 0
    stall_s: float = 0.0
    guesses: int = 0
    useful_guesses: int = 0
    late_guesses: int = 0
    wasted_guesses: int = 0
    cancelled_guesses: int = 0

    @property
    def judged_guesses(self) -> int:
        """Guesses of which it is known what became of them."""
        return self.useful_guesses + self.late_guesses + self.wasted_guesses

    def stats(self, num_slots: int, slot_bytes: int) -> StoreStats:
        """The counters so far, with the slots of the tier that they are of."""
        return StoreStats(
            **asdict(self),
            bytes_read=self.demand_bytes + self.readahead_bytes,
            expert_slots=num_slots,
            slot_bytes=slot_bytes,
        )
