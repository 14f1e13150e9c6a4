"""Settings of glibc's allocator for the whole process; no effect elsewhere."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

LARGE_BLOCK_BYTES = 2**19
"""Blocks of at least this size are returned to the system when freed."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of `mallopt` settings in `malloc.h`."""


def return_freed_blocks() -> None:
    """Returns large blocks to the system as soon as they are freed.

    glibc raises the size from which it does so, up to 32 MiB, whenever such a block is freed:
    activations of changing sizes then take about twice the memory that is in use.
    """
    _set({_MMAP_THRESHOLD: LARGE_BLOCK_BYTES, _TRIM_THRESHOLD: LARGE_BLOCK_BYTES})


def use_one_heap() -> None:
    """Makes all threads allocate in one heap; call it before they start.

    Otherwise each thread has its own heap, whose free blocks no other thread can use. A server's
    threads pass blocks to each other and would keep several times the memory in use.
    """
    _set({_ARENA_MAX: 1})


def give_back_free_pages() -> None:
    """Returns free pages between blocks of the heap to the system, in a few milliseconds.

    The heap itself shrinks from its end alone.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(settings: dict[int, int]) -> None:
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        for setting, value in settings.items():
            mallopt(setting, value)


@functools.cache
def _c_library() -> ctypes.CDLL:
    import ctypes

    return ctypes.CDLL(None)
