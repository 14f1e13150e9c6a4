"""One tier filled from another: experts copied from host slots to device slots."""

from functools import partial

import torch

from moe_runtime.store.cache import ExpertStore
from moe_runtime.store.changes import Changes
from moe_runtime.store.transfer import Read, ReadQueue
from moe_runtime.types import ExpertKey

COPY_THREADS = 2
"""Copies under way at once: one waits for its expert to be read while another uses the link."""


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    An expert is leased below for the time of its copy, so it cannot be evicted half-way. Copies to
    a CUDA device run on a stream of their own, after the computation that was queued before them:
    it may still read what the slot held until now.
    """

    def __init__(self, lower: ExpertStore[torch.Tensor], device: torch.device) -> None:
        self.lower = lower
        self.changed = Changes()
        self._queue = ReadQueue(COPY_THREADS)
        self._device = device

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to copy an expert into a slot; it is read first if it is not resident below."""
        self._queue.submit([partial(self._copy, key, slot)], read)

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves a waiting copy before all read-aheads."""
        self._queue.promote(read)

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        return self._queue.cancel(read)

    def is_under_way(self, read: Read) -> bool:
        """Whether a copy was started and its end is still to be told."""
        return self._queue.is_under_way(read)

    def let_go(self) -> None:
        """Gives up what an exception left to this thread, here and below."""
        self._queue.let_go()
        self.lower.let_go()

    def close(self) -> None:
        """Ends the copies, and the tier below."""
        self._queue.close()
        self.lower.close()

    def _copy(self, key: ExpertKey, slot: torch.Tensor) -> int:
        with self.lower.lease([key]) as lease:
            for group in lease:
                for _, source in group:
                    self._move(source[: len(slot)], slot)
        return len(slot)

    def _move(self, source: torch.Tensor, slot: torch.Tensor) -> None:
        if slot.device.type != "cuda":
            slot.copy_(source)
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            slot.copy_(source, non_blocking=True)
        stream.synchronize()
