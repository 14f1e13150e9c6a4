"""What a disk alone takes to read and write as many bytes, past the page cache."""

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK_BYTES = 4 << 20
_NUM_THREADS = 4


def seconds_alone(file: Path, read: int, written: int) -> float | None:
    """Times reads and writes of whole blocks, in random order, four at a time.

    Args:
        file: written over.
        read, written: bytes.

    Returns:
        None of less than a block, and where files cannot be opened past the page cache.

    Raises:
        OSError: the disk fails.
    """
    kinds = [True] * (read // _BLOCK_BYTES) + [False] * (written // _BLOCK_BYTES)
    if not kinds or file.stat().st_size < _BLOCK_BYTES:
        return None
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    random.Random(0).shuffle(kinds)
    num_blocks = file.stat().st_size // _BLOCK_BYTES
    # Anonymous maps begin at a page, as direct I/O wants it.
    buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_NUM_THREADS)]
    for buffer in buffers:
        buffer.write(bytes(_BLOCK_BYTES))

    def move(thread: int) -> None:
        for index in range(thread, len(kinds), _NUM_THREADS):
            one = os.preadv if kinds[index] else os.pwritev
            one(descriptor, [buffers[thread]], index % num_blocks * _BLOCK_BYTES)

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(move, range(_NUM_THREADS)))
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)
