"""A tier's memory: one allocation, cut into equal slots."""

import mmap
from collections.abc import Iterator
from typing import Any

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError

HUGE_PAGE_BYTES = 2 * 2**20


class Slab:
    """Preallocated slots of one tier.

    Host slabs are page-aligned anonymous memory: nothing is resident until it is written, and huge
    pages are asked for, because reading weights at the speed of memory leaves no time for page
    walks.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, device: str | torch.device = "cpu"
    ) -> None:
        """Allocates the slab.

        Raises:
            ValueError: a size is not positive.
            CapacityError: the memory cannot be had.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"a slab needs a slot of a byte, got {num_slots} of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.device = torch.device(device)
        total = num_slots * slot_bytes
        if self.device.type == "cpu":
            self._bytes = aligned_bytes(total)
        else:
            self._bytes = _device_bytes(total, self.device)
        self._slots = [*self._bytes.split(slot_bytes)]

    def pin(self) -> None:
        """Locks a host slab in memory, so that a GPU copies from it at full speed.

        Raises:
            CapacityError: the system does not allow so much locked memory.
        """
        size = self._bytes.numel()
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(self._bytes.data_ptr(), size, 0)) != 0:
            raise CapacityError(f"cannot lock {format_bytes(size)} of host memory for the GPU")

    def slot(self, index: int) -> torch.Tensor:
        """The bytes of one slot: ``uint8`` of ``slot_bytes``."""
        return self._slots[index]

    def parts(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """All slots from the first on, as ``uint8`` of this size each, the last one of the rest."""
        yield from self._bytes.split(num_bytes)


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Page-aligned zeroed host memory as a ``uint8`` tensor, in huge pages where there are any.

    Raises:
        CapacityError: the memory cannot be had.
    """
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


def _device_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise CapacityError(f"cannot allocate {format_bytes(num_bytes)} on {device}") from None
