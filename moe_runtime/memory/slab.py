"""A tier's memory: one allocation, cut into equal slots, and touched before it is used."""

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CLOSED, CapacityError, MoERuntimeError
from moe_runtime.kernels.native.pages import madvise, populate

HUGE_PAGE_BYTES = 2 * 2**20
PART_BYTES = 16 * 2**20
"""Slots are touched in parts of this size."""


class Slab:
    """Preallocated slots of one tier; ``bytes`` is all of them. Host slabs are page-aligned
    anonymous memory in huge pages, resident once written."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Allocates the slab, by ``aligned_bytes`` or ``allocate``. Raises ValueError: a size is
        not positive. Raises CapacityError: the allocation fails."""
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"a slab needs a slot of a byte, got {num_slots} of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.bytes = (allocate or aligned_bytes)(num_slots * slot_bytes)
        self._slots = [*self.bytes.split(slot_bytes)]

    def slot(self, index: int) -> torch.Tensor:
        """One slot, ``uint8`` of ``slot_bytes``; MoERuntimeError once closed."""
        if not self._slots:
            raise MoERuntimeError(CLOSED)
        return self._slots[index]

    def extend(self, num_slots: int) -> range:
        """Adds slots in memory of their own, and returns their numbers; may raise CapacityError."""
        first = self.num_slots
        if num_slots > 0:
            self._slots[first:] = aligned_bytes(num_slots * self.slot_bytes).split(self.slot_bytes)
            self.num_slots += num_slots
        return range(first, self.num_slots)

    def close(self) -> None:
        """Gives the memory up; it lives on as long as there is a view of it."""
        self._slots, self.bytes = [], self.bytes.new_empty(0)

    def parts(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """All memory as ``uint8`` of this size each, the last one of the rest."""
        yield from self.bytes.split(num_bytes)


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Page-aligned zeroed ``uint8`` host memory, in huge pages where there are any. Raises
    CapacityError: the allocation fails."""
    lead = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    # shared memory, which is what Python maps by default, gets no huge pages
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, num_bytes + lead, flags=private)
    except (OSError, OverflowError) as error:
        size = format_bytes(num_bytes)
        raise CapacityError(f"cannot allocate {size} of host memory: {error}") from None
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % HUGE_PAGE_BYTES if lead else 0
    # the last, partly used page stays small, so that no more is taken than was asked for
    whole_pages = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole_pages)
    return mapped[start : start + num_bytes]


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous ``uint8`` host tensor, to read into."""
    array: Any = tensor.numpy()
    return memoryview(array)


@contextlib.contextmanager
def touched_meanwhile(slab: Slab) -> Iterator[None]:
    """Touches the pages of a host slab while something else runs, until the block ends.

    The first write to a page waits for the system to clear it, which in a virtual machine may take
    longer than reading a page from a disk.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_touch, args=(slab, stop), name="moe-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _touch(slab: Slab, stop: threading.Event) -> None:
    for part in slab.parts(PART_BYTES):
        if stop.is_set() or not populate(part):
            return


def give_back(memory: torch.Tensor) -> None:
    """Returns whole pages to the system; they read as zeros afterwards."""
    advise = madvise()
    if advise is None:
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        advise(first, last - first, mmap.MADV_DONTNEED)
