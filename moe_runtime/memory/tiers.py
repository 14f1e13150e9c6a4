"""One tier filled from another: experts copied from host slots to device slots."""

from functools import partial

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.io_queue import Read, ReadQueue
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey

COPY_THREADS = 2
"""Threads that only copy what is demanded: one waits for its expert to be read while another uses
the link. As many more also read ahead."""


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    An expert is leased below for the time of its copy, so it cannot be evicted half-way. What is
    read ahead here is read ahead there, what only passes through here passes through there, and a
    demand waits for neither: it has threads that copy nothing else, and one slot below that no
    read-ahead takes.

    Copies to a CUDA device run on a stream of their own, after the computation that was queued
    before them: it may still read what the slot held until now.
    """

    def __init__(self, lower: ExpertStore[torch.Tensor], device: torch.device) -> None:
        self.lower = lower
        self.changed = Changes()
        num_ahead = max(1, min(COPY_THREADS, lower.num_slots - COPY_THREADS))
        self._copies = ReadQueue(num_ahead, num_for_demands=COPY_THREADS)
        self._device = device

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to copy an expert into a slot; it is read first if it is not resident below."""
        self._copies.submit([partial(self._copy, key, slot, read)], read)

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

    def _copy(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> int:
        lease, is_done = self.lower.lease([key], streaming=read.passes, above=read), False
        try:
            with lease:
                for group in lease:
                    for key, source in group:
                        self._move(key, source, slot)
            is_done = True
        finally:
            if not is_done:
                self.lower.give_up(lease)
        return len(slot)

    def _move(self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor) -> None:
        source = source[: len(slot)]
        if slot.device.type != "cuda":
            slot.copy_(source)
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            slot.copy_(source, non_blocking=True)
        stream.synchronize()
