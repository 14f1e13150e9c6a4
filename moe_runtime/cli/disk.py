"""Measures random reads of one expert from a disk, and long reads from memory."""

import contextlib
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ALIGNMENT = 4096
_SCRATCH_BYTES = 128 << 20
_SCRATCH_BLOCK_BYTES = 16 << 20
_MIN_READS = 8
_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpeed:
    """Bandwidth of random reads of `path`.

    `direct_bytes_per_s` bypasses the page cache; None if the file system does not support it.
    `buffered_bytes_per_s` is through the page cache, without any of the file in it.
    """

    path: Path
    read_bytes: int
    in_flight: int
    direct_bytes_per_s: float | None
    buffered_bytes_per_s: float


def measure_disk(
    path: Path, *, read_bytes: int, seconds: float = 0.8, in_flight: int = 4
) -> DiskSpeed:
    """Measures random reads from a file, or from the disk of a folder.

    A folder's largest file is read. If none is large enough, a scratch file of 128 MiB is written
    into the folder and removed. `read_bytes` is rounded up to whole pages.

    Raises:
        OSError: the path cannot be read, or the scratch file cannot be written.
        ValueError: the file is too small to be measured.
    """
    read_bytes = -(-read_bytes // _ALIGNMENT) * _ALIGNMENT
    with _file_to_read(path, read_bytes) as file:
        if file.stat().st_size < read_bytes:
            raise ValueError(
                f"{file}: has {file.stat().st_size} bytes, too few for reads of {read_bytes}"
            )
        try:
            direct = _bandwidth(file, read_bytes, seconds, in_flight, direct=True)
        except OSError:
            direct = None
        buffered = _bandwidth(file, read_bytes, seconds, in_flight, direct=False)
        return DiskSpeed(
            path=file,
            read_bytes=read_bytes,
            in_flight=in_flight,
            direct_bytes_per_s=direct,
            buffered_bytes_per_s=buffered,
        )


def measure_memory() -> float:
    """Bytes per second that all threads of torch read from memory; the best of five."""
    import torch

    numbers_N = torch.ones(_MEMORY_BYTES // 8, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        numbers_N.sum()
        seconds.append(time.perf_counter() - started)
    return _MEMORY_BYTES / min(seconds)


@contextlib.contextmanager
def _file_to_read(path: Path, read_bytes: int) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    files = [file for file in path.iterdir() if file.is_file() and os.access(file, os.R_OK)]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= _MIN_READS * read_bytes:
        yield largest
        return
    with tempfile.NamedTemporaryFile(dir=path, prefix=".moe-runtime-doctor-") as scratch:
        # random bytes: a file system may compress
        block = os.urandom(_SCRATCH_BLOCK_BYTES)
        for _ in range(max(_SCRATCH_BYTES, _MIN_READS * read_bytes) // len(block)):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        yield Path(scratch.name)


def _bandwidth(
    file: Path, read_bytes: int, seconds: float, in_flight: int, *, direct: bool
) -> float:
    """Bytes per second of reads of distinct places in random order."""
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    if direct and flags == os.O_RDONLY:
        raise OSError("this system has no direct reads")
    descriptor = os.open(file, flags)
    try:
        places = [place * read_bytes for place in range(file.stat().st_size // read_bytes)]
        random.Random(0).shuffle(places)
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        left = iter(places)  # shared by the threads

        def read_until_done(_: int) -> int:
            num_bytes = 0
            with mmap.mmap(-1, read_bytes) as buffer:
                for place in left:
                    num_bytes += os.preadv(descriptor, [buffer], place)
                    if time.perf_counter() > started + seconds:
                        break
            return num_bytes

        with ThreadPoolExecutor(in_flight) as pool:
            num_bytes = sum(pool.map(read_until_done, range(in_flight)))
        return num_bytes / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
