"""Random-read bandwidth of a disk for blocks of one expert's size, and reads beside writes.

What an expert cache can reach at best is bytes missed over this bandwidth. Direct reads bypass the
page cache; buffered reads go through it, and the pages they leave are dropped after each block.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

DISK_BLOCK_BYTES = 4096
THREAD_COUNTS = (1, 2, 4, 8)
MIXED_BLOCK_BYTES = 4 * 2**20
"""Of reads and writes in turn."""


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How blocks are read: past the page cache or through it, and how many at once."""

    direct: bool
    num_threads: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'} x{self.num_threads}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes per second that one mode reached with blocks of `block_bytes`."""

    mode: ReadMode
    block_bytes: int
    bytes_per_s: float

    def describe(self) -> dict[str, object]:
        return {
            **asdict(self.mode),
            "block_bytes": self.block_bytes,
            "bytes_per_s": self.bytes_per_s,
        }


def measure(
    ranges: Sequence[tuple[Path, int, int]], mode: ReadMode, *, seconds: float, seed: int = 0
) -> Measurement:
    """Reads blocks of `ranges` (file, offset, length) in random order for about `seconds`.

    Every block is read whole, widened to disk blocks; only the bytes asked for are counted.

    Raises:
        OSError: the file system refuses direct I/O, or a read fails.
    """
    order = list(ranges)
    random.Random(seed).shuffle(order)
    with ExitStack() as cleanup:
        files = {path: _open(path, mode.direct, cleanup) for path in {path for path, _, _ in order}}
        shares = [order[start :: mode.num_threads] for start in range(mode.num_threads)]
        pool = cleanup.enter_context(ThreadPoolExecutor(mode.num_threads))
        begin = time.perf_counter()
        readers = [
            pool.submit(_read_until, share, files, mode.direct, begin + seconds)
            for share in shares
            if share
        ]
        num_bytes = sum(reader.result() for reader in readers)
        elapsed_s = time.perf_counter() - begin
    return Measurement(mode, order[0][2], num_bytes / elapsed_s)


def sweep(
    ranges: Sequence[tuple[Path, int, int]],
    *,
    seconds: float,
    progress: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Measures every mode on the same blocks; modes the file system refuses are left out."""
    results: list[Measurement] = []
    for direct in (True, False):
        for num_threads in THREAD_COUNTS:
            seed = len(results)
            try:
                result = measure(ranges, ReadMode(direct, num_threads), seconds=seconds, seed=seed)
            except OSError:
                if not direct:
                    raise
                continue
            results.append(result)
            if progress is not None:
                progress(result)
    return results


def _open(path: Path, direct: bool, cleanup: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    cleanup.callback(os.close, descriptor)
    return descriptor


def _read_until(
    share: Sequence[tuple[Path, int, int]], files: dict[Path, int], direct: bool, deadline: float
) -> int:
    longest = max(length for _, _, length in share) + 2 * DISK_BLOCK_BYTES
    num_bytes = 0
    with mmap.mmap(-1, longest) as buffer, memoryview(buffer) as view:
        # Touch the pages now: the first faults are not the disk's time.
        buffer[::DISK_BLOCK_BYTES] = bytes(len(range(0, longest, DISK_BLOCK_BYTES)))
        while True:
            for path, offset, length in share:
                _read_block(files[path], offset, length, view)
                if not direct:
                    os.posix_fadvise(files[path], offset, length, os.POSIX_FADV_DONTNEED)
                num_bytes += length
                if time.perf_counter() >= deadline:
                    return num_bytes


def _read_block(descriptor: int, offset: int, length: int, view: memoryview) -> None:
    """Reads the aligned blocks that cover the range; a file's end may cut the last one short."""
    first = offset - offset % DISK_BLOCK_BYTES
    end = offset + length
    wanted = -(-end // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES - first
    done = 0
    while first + done < end:
        count = os.preadv(descriptor, [view[done:wanted]], first + done)
        if count == 0:
            raise OSError(f"file ended {end - first - done} bytes before the block's end")
        done += count


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
