"""Settings of the C library's allocator, for the whole process; no effect where it is not glibc."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

LARGE_BLOCK_BYTES = 2**19
"""Blocks from which on memory is given back when it is freed."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Settings of `mallopt`, by their numbers in `malloc.h`."""


def return_freed_blocks() -> None:
    """Has large blocks given back to the system as soon as they are freed.

    glibc raises the size from which it does so whenever such a block is freed, up to 32 MiB, and
    keeps the others in a heap full of holes: activations of changing sizes then take about twice
    the memory that is in use.
    """
    _set({_MMAP_THRESHOLD: LARGE_BLOCK_BYTES, _TRIM_THRESHOLD: LARGE_BLOCK_BYTES})


def use_one_heap() -> None:
    """Has all threads allocate in one heap, before they begin.

    Each thread gets a heap of its own otherwise, up to eight a core, and what one of them frees
    no other can use: a server's threads, which hand blocks to each other, keep several times what
    is in use.
    """
    _set({_ARENA_MAX: 1})


def give_back_free_pages() -> None:
    """Gives the pages that are free between blocks of the heap back to the system.

    The heap itself shrinks from its end alone: a block that lives long keeps everything below it,
    and a server whose requests have all sizes fills it with holes. Takes a few milliseconds.
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
