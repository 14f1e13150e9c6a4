"""What a disk alone takes to read and write as many bytes, past the page cache."""

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIXED_BLOCK_BYTES = 4 * 2**20
"""Of reads and writes in turn."""


def mixed_seconds(file: Path, read: int, written: int, num_threads: int) -> float:
    """Time that bytes take from and to a file, past the page cache, with nothing else to do.

    The file is written over.
    """
    size = MIXED_BLOCK_BYTES
    blocks = file.stat().st_size // size
    kinds = [True] * (read // size) + [False] * (written // size)
    random.Random(0).shuffle(kinds)
    descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    buffers = [mmap.mmap(-1, size) for _ in range(num_threads)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(bytes(size))

    def move(thread: int) -> None:
        for index in range(thread, len(kinds), num_threads):
            offset = index % blocks * size
            if kinds[index]:
                os.preadv(descriptor, [buffers[thread]], offset)
            else:
                os.pwritev(descriptor, [buffers[thread]], offset)

    started = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(move, range(num_threads)))
    seconds = time.perf_counter() - started
    os.close(descriptor)
    return seconds
