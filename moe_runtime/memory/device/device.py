"""What a tier needs of a device: memory, and copies into it that run beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.memory.reads import Priority

NOT_TOLD = -(2**31)
"""In place of a number that a graph has yet to tell."""


class Event(Protocol):
    """A place in a stream of a device's work."""

    def query(self) -> bool:
        """Whether the device has come this far."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has come this far; what failed on the way is raised."""
        ...


class Copy(Event, Protocol):
    """The end of a copy into a slot."""

    def seconds_after(self, before: Any) -> float:
        """Seconds for which the copy had the link, once the device has come this far.

        Args:
            before: the copy that ended before this one, whose time is its own; None for none.
        """
        ...


class Told(Event, Protocol):
    """What a graph tells the host in the middle of each replay: the event is that it has.

    Attributes:
        numbers: host memory, integers; valid from the event until ``forget``.
        values: likewise, of any type.
    """

    numbers: torch.Tensor
    values: Sequence[torch.Tensor]

    def settle(self) -> None:
        """Returns when no replay that was queued before will write here."""
        ...

    def forget(self) -> None:
        """To be called before a replay, once it has settled."""
        ...


class Graph(Protocol):
    """Work of a device that was recorded, and is computed when it is replayed."""

    def replay(self) -> None:
        """Queues the work on the current stream."""
        ...


class GraphRecorder(Protocol):
    """Records the work that is queued within a ``with`` block, in one or several graphs.

    Graphs of one recorder share memory: they are replayed one after another, in their order.
    """

    def __enter__(self) -> GraphRecorder: ...

    def __exit__(self, *failure: object) -> None: ...

    def tell(self, numbers: torch.Tensor, *values: torch.Tensor) -> Told:
        """Has the graph tell the host numbers and values of the device, beside what follows.

        Args:
            numbers: integers above ``NOT_TOLD``; they and the values stay until the graph ends.
            values: of any type.
        """
        ...

    def cut(self) -> Graph:
        """Ends a graph, and begins the next one."""
        ...

    def end(self) -> Graph:
        """Ends the last graph.

        Raises:
            RuntimeError: there was work that cannot be recorded.
        """
        ...


class Device(Protocol):
    """Memory for slots, and streams of copies that last as long as the device is used.

    All methods may be called from several threads.
    """

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, ``uint8``.

        Raises:
            CapacityError: there is not so much.
        """
        ...

    def pin(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Locks host memory of slots in place until it goes, for copies at full speed.

        Raises:
            CapacityError: the system does not allow so much locked memory.
        """
        ...

    def reads_host(self, memory: torch.Tensor) -> bool:
        """Whether kernels can read pinned host memory at the addresses that it has on the host."""
        ...

    def compute_here(self) -> int:
        """The caller's current stream computes from slots from now on; returns its number."""
        ...

    def upload(
        self, numbers: npt.NDArray[np.integer], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Numbers of the device, for work that is queued on the current stream.

        New memory may be written to later whatever mode of inference it was made in.

        Args:
            numbers: as many as there are places; they may change later.
            into: where they go; new memory if omitted.
        """
        ...

    def download(
        self, numbers: torch.Tensor, *, is_kept: bool = False
    ) -> tuple[torch.Tensor, Event]:
        """Copies numbers to the host behind what the current stream has queued; does not wait.

        Args:
            numbers: of the device.
            is_kept: nobody writes them again, so that what is queued later need not come later.

        Returns:
            Host memory, and the event behind which it holds them.
        """
        ...

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the host on the device, for work that is queued on the current stream."""
        ...

    def wait_here(self, event: Any) -> None:
        """The caller's current stream goes on behind a copy; the host does not wait.

        Args:
            event: what ``copy`` returned.
        """
        ...

    def vacate(self, *slots: torch.Tensor, still: Sequence[Event] = ()) -> Sequence[Any]:
        """What slots held is given up: the work that was queued until now, and may read it still.

        Args:
            slots: memory of the device.
            still: behind which copies back from them are over.

        Returns:
            Events, one of each stream that computes, and those of the copies.
        """
        ...

    def copy(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Any],
        priority: Priority,
    ) -> Copy:
        """Queues copies into vacated slots behind what ``vacate`` returned, and does not wait.

        Args:
            parts: host memory, unchanged until the event, and as many bytes of a slot, which
                nobody reads but behind the event; both ``uint8``.
            after: what ``vacate`` returned.
            priority: a demand is not queued behind what is read ahead.
        """
        ...

    def copy_back(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queues copies to the host behind all work of streams that compute; does not wait.

        Args:
            parts: memory of the device, unchanged until the event, and as many bytes of host memory
                that was pinned, which nobody touches but behind the event, or kernels that are
                queued already; both ``uint8``.
        """
        ...

    def drain(self) -> None:
        """Returns when no copy writes any more: for where an exception left one to itself."""
        ...

    def record(self) -> GraphRecorder:
        """Records what the caller queues, instead of computing it."""
        ...
