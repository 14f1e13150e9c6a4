"""What a tier needs of a device: memory, and copies into it that overlap with computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.memory.reads import Priority

NOT_TOLD = -(2**31)
"""In place of a number that a graph has not written yet."""


class Event(Protocol):
    """A place in a stream of a device's work."""

    def query(self) -> bool:
        """Whether the device has come this far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has come this far; raises what failed on the way."""
        ...


class Copy(Event, Protocol):
    """The end of a copy into a slot."""

    def seconds_after(self, before: Any) -> float:
        """Seconds for which the copy had the link, less the time of the copy that ended before
        it."""
        ...


class Told(Event, Protocol):
    """Host memory that a graph writes in the middle of each replay; the event says that it has.

    Attributes:
        numbers: integers; valid from the event until ``forget``.
        values: likewise, of any type.
    """

    numbers: torch.Tensor
    values: Sequence[torch.Tensor]

    def settle(self) -> None:
        """Waits until no replay that was queued before will write here."""
        ...

    def forget(self) -> None:
        """Clears the numbers before a replay, once it has settled."""
        ...


class Graph(Protocol):
    """Recorded work of a device."""

    def replay(self) -> None:
        """Queues the work on the current stream."""
        ...


class GraphRecorder(Protocol):
    """Records the work that is queued within a ``with`` block, in one or several graphs. Graphs of
    one recorder share memory: they are replayed one after another, in their order."""

    def __enter__(self) -> GraphRecorder: ...

    def __exit__(self, *failure: object) -> None: ...

    def tell(self, numbers: torch.Tensor, *values: torch.Tensor) -> Told:
        """Has the graph copy integers above ``NOT_TOLD`` and values to the host, in parallel with
        what follows."""
        ...

    def cut(self) -> Graph:
        """Ends a graph, and begins the next one."""
        ...

    def end(self) -> Graph:
        """Ends the last graph; RuntimeError where there was work that cannot be recorded."""
        ...


class Device(Protocol):
    """Memory for slots, and streams of copies. All methods may be called from several threads."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, ``uint8``; CapacityError where there is not so much."""
        ...

    def pin(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Locks host memory of slots until it goes; CapacityError where the system refuses."""
        ...

    def reads_host(self, memory: torch.Tensor) -> bool:
        """Whether kernels can read pinned host memory at its addresses on the host."""
        ...

    def compute_here(self) -> int:
        """The caller's current stream computes from slots from now on; returns its number."""
        ...

    def upload(
        self, numbers: npt.NDArray[np.integer], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Numbers on the device, in ``into`` or new memory, for work queued on the current stream.
        New memory may be written to in any inference mode. The source may change afterwards."""
        ...

    def download(
        self, numbers: torch.Tensor, *, is_kept: bool = False
    ) -> tuple[torch.Tensor, Event]:
        """Copies numbers to the host behind what the current stream has queued; does not wait.

        Nothing writes the numbers again where ``is_kept``: later work need not wait for the copy.
        Returns host memory, and the event behind which it holds them.
        """
        ...

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the host on the device, for work queued on the current stream."""
        ...

    def wait_here(self, event: Any) -> None:
        """The caller's current stream waits for a ``copy``; the host does not."""
        ...

    def vacate(self, *slots: torch.Tensor, still: Sequence[Event] = ()) -> Sequence[Any]:
        """Events of all queued work that may still read these slots, and those in ``still``."""
        ...

    def copy(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Any],
        priority: Priority,
    ) -> Copy:
        """Queues copies from host memory into vacated slots, behind the events of ``vacate``.

        Parts are pairs of ``uint8`` tensors of one size. The sources must stay unchanged until the
        returned event, and nothing may read the targets before it.
        """
        ...

    def copy_back(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queues copies from the device to pinned host memory, behind all work queued so far.
        Neither side may be changed before the returned event."""
        ...

    def drain(self) -> None:
        """Waits until no copy writes any more: for where an exception left one under way."""
        ...

    def record(self) -> GraphRecorder:
        """Records what the caller queues, instead of computing it."""
        ...
