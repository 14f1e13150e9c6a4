"""One tier filled from another: experts copied from host slots to device slots."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.device import Device
from moe_runtime.memory.io_queue import Priority, Read, ReadQueue
from moe_runtime.memory.lease import Lease
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey

W = TypeVar("W")

COPY_THREADS = 2
"""Threads that only copy what is demanded: one waits for its expert to be read while another uses
the link. As many more also read ahead."""


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    An expert is leased below for the time of its copy, so it cannot be evicted half-way. What is
    read ahead here is read ahead there, what only passes through here passes through there, and a
    demand waits for neither: it has threads that copy nothing else, and one slot below that no
    read-ahead takes.

    Copies to a device run behind the computation that was queued when the slot was given up, and
    beside all other. The thread that began a copy waits for it, so a read has ended when its bytes
    are there, and with the error if there was one; nobody else waits.
    """

    def __init__(self, lower: ExpertStore[torch.Tensor], device: Device | None = None) -> None:
        self.lower = lower
        self.changed = Changes()
        num_ahead = max(1, min(COPY_THREADS, lower.num_slots - COPY_THREADS))
        self._copies = ReadQueue(num_ahead, num_for_demands=COPY_THREADS)
        self._device = device

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to copy an expert into a slot; it is read first if it is not resident below."""
        after = self._device.vacate(slot) if self._device else ()
        self._copies.submit([partial(self._copy, key, slot, read, after)], read)

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves a copy before all read-aheads, here and below."""
        self._copies.promote(read)  # first: who has begun it looks at its priority
        self.lower.promote(key)

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        return self._copies.cancel(read)

    def is_under_way(self, read: Read) -> bool:
        """Whether a copy was started and its end is still to be told."""
        return self._copies.is_under_way(read)

    def let_go(self) -> None:
        """Gives up what an exception left to this thread, here and below."""
        self._copies.let_go()
        self.lower.let_go()

    def close(self) -> None:
        """Ends the tier below, and with it what waits for that; then the copies."""
        self.lower.close()
        self._copies.close()

    def _copy(self, key: ExpertKey, slot: torch.Tensor, read: Read, after: Sequence[Any]) -> int:
        lease, is_done = self.lower.lease([key], streaming=read.passes, above=read), False
        try:
            with lease:
                for group in lease:
                    for key, source in group:
                        if self._device:
                            self._send(source, slot, after, read.priority)
                        else:
                            self._move(key, source, slot)
            is_done = True
        finally:
            if not is_done:
                self.lower.give_up(lease)
        return len(slot)

    def _move(self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(source[: len(slot)])

    def _send(
        self, source: torch.Tensor, slot: torch.Tensor, after: Sequence[Any], priority: Priority
    ) -> None:
        assert self._device is not None
        is_done = False
        try:
            self._device.copy(source[: len(slot)], slot, after, priority).synchronize()
            is_done = True
        finally:
            if not is_done:  # it may still read from a slot, and write to one, that are given up
                self._device.drain()


class DeviceStore(ExpertStore[W]):
    """Experts in slots of a device.

    A lease is for work that is queued on the caller's current stream while the lease yields: it may
    be any stream, and may change from lease to lease.
    """

    def __init__(self, device: Device, *args: Any, **kwargs: Any) -> None:
        """Takes the device, and what ``ExpertStore`` takes."""
        super().__init__(*args, **kwargs)
        self._device = device

    def lease(
        self, keys: Sequence[ExpertKey], *, streaming: bool = False, above: Read | None = None
    ) -> Lease[W]:
        """As ``ExpertStore.lease``."""
        self._device.compute_here()
        return super().lease(keys, streaming=streaming, above=above)
