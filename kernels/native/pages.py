"""Memory of large results: the first touch of fresh memory takes as long as filling it."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_WORTH_IT = 32 << 20  # smaller tensors come from used memory
_ALIGNMENT = 64
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; Python has no name for it


def with_huge_pages(fresh: Tensor) -> Tensor:
    """Advises the system to back a large, unwritten tensor by huge pages."""
    advise = madvise()
    if advise is None or not fresh.is_cpu or fresh.nbytes < _WORTH_IT:
        return fresh
    first = -(-fresh.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (fresh.data_ptr() + fresh.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    advise(first, last - first, mmap.MADV_HUGEPAGE)
    return fresh


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor of this size gets fresh memory from the system."""
    return tensor.is_cpu and tensor.nbytes >= _WORTH_IT


def untouched_zeros(like: Tensor) -> Tensor:
    """Zeros like a tensor; large ones take memory when they are written."""
    if not is_large(like):
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    memory = torch.from_numpy(np.zeros(like.nbytes + _ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % _ALIGNMENT
    zeros = memory[first : first + like.nbytes].view(like.dtype).view(like.shape)
    return with_huge_pages(zeros)


def clear(part: Tensor) -> None:
    """Zeroes a contiguous part of `untouched_zeros` without touching its whole pages."""
    inner = part.view(-1).view(torch.uint8)
    first = -inner.data_ptr() % _HUGE_PAGE
    size = max(0, len(inner) - first) // _HUGE_PAGE * _HUGE_PAGE
    advise = madvise()
    if size and advise and advise(inner.data_ptr() + first, size, mmap.MADV_DONTNEED) == 0:
        inner[:first].zero_()
        inner[first + size :].zero_()
    else:
        inner.zero_()


def populate(fresh: Tensor) -> bool:
    """Has the system back page-aligned host memory now instead of at the first write to each page.

    The content stays; other Python threads run meanwhile. Returns whether the system did it.
    """
    advise = madvise()
    return advise is not None and advise(fresh.data_ptr(), fresh.nbytes, _MADV_POPULATE_WRITE) == 0


@functools.cache
def madvise() -> Callable[[int, int, int], int] | None:
    """The C library's function, or None without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
