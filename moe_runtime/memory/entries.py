"""What an expert store works with: where experts come from, and its entries."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.io_queue import Read
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
