"""What an expert store works with: where experts come from, and its entries."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.io_queue import Priority, Read
from moe_runtime.types import ExpertKey

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


class LeaseListener(Protocol):
    """Hears what becomes of one lease."""

    def entered(
        self, hits: Sequence[ExpertKey], late: Sequence[ExpertKey], misses: Sequence[ExpertKey]
    ) -> None:
        """The lease holds what is there, and its misses are demanded."""
        ...

    def asked(self, done: Sequence[ExpertKey]) -> None:
        """The next group is asked for; those of the last one were computed."""
        ...

    def given(self, group: Sequence[ExpertKey], *, waited: bool) -> None:
        """The next group is there; an empty one is the end."""
        ...

    def left(self) -> None:
        """The lease ended."""
        ...


class StoreListener(Protocol):
    """Hears what a store does; called with its lock held, ``lease`` excepted."""

    def read_began(self, key: ExpertKey, priority: Priority) -> None:
        """An expert is being read into a slot."""
        ...

    def read_ended(self, key: ExpertKey, read: Read) -> None:
        """The read ended, with data or an error; it may be told twice."""
        ...

    def dropped(self, key: ExpertKey) -> None:
        """An expert gave up its slot, perhaps before its read began."""
        ...

    def mended(self, arriving: Collection[ExpertKey]) -> None:
        """After an exception these are being read, and no others."""
        ...

    def lease(self) -> LeaseListener | None:
        """Who hears of a lease that is about to be entered."""
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
