"""Small files, named by digests, in a folder of limited size."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.files import (
    PARTIAL_SUFFIX,
    make_private_folder,
    new_held,
    partial_name,
    remove_unless_held,
)

DIGEST_BYTES = 32
SUM_BYTES = 16
_DISK_BLOCK = 4096
"""A file takes a multiple of this on disk."""
_SHARE = 16
"""A full folder frees a sixteenth of its room at once."""
_COUNT = "bytes"
"""The file with the total size of all others."""
_MOST_DIGITS = 20
_LOCK_TRIALS, _LOCK_TRIAL_S = 20, 0.01
_OURS = re.compile(rf"[0-9a-f]{{64}}(\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)})?")


class DigestFiles:
    """Files named by digests in a folder of at most ``most_bytes``; ``what`` names their content.

    Several processes and threads may use the folder: a file is whole or absent, and a damaged file
    is removed. The least recently used files are evicted.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path, most_bytes: int, what: str) -> None:
        self.folder = folder
        self.num_failures = 0
        self._most_bytes = most_bytes
        self._what = what
        try:
            make_private_folder(self.folder)
        except OSError as error:
            raise ValueError(f"--prefix-disk: {error.filename}: {error.strerror}") from None
        try:
            self._take_room(0)  # the limit may have been larger before
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """Counts a failure; the first one is a warning."""
        self.num_failures += 1
        if self.num_failures == 1:
            place = error.filename or self.folder
            message = f"{self._what} are not kept on the disk: {place}: {error.strerror}"
            warnings.warn(message, MoERuntimeWarning, stacklevel=3)

    def read(self, file: Path, size: int | None = None) -> torch.Tensor | None:
        """The bytes of a file, of ``size`` if given; None if it is absent, or memory is short."""
        try:
            # O_NONBLOCK: a pipe must not block
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
                found = os.fstat(source.fileno())
                num_bytes = found.st_size if size is None else size + SUM_BYTES
                is_whole = stat.S_ISREG(found.st_mode) and found.st_size == num_bytes
                is_whole = is_whole and SUM_BYTES <= num_bytes <= self._most_bytes
                block = torch.empty(num_bytes if is_whole else 0, dtype=torch.uint8)
                is_whole = is_whole and source.readinto(block.numpy().data) == num_bytes
        except (OSError, MemoryError, RuntimeError):  # torch out of memory: RuntimeError
            return None
        if is_whole:
            data, expected = block[:-SUM_BYTES], block[-SUM_BYTES:]
            if _sum(file, data.numpy().data) == expected.numpy().tobytes():
                return data
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def write(self, file: Path, data: bytes | memoryview) -> None:
        """Writes a file and renames it when it is whole; a checksum detects power cuts.

        Raises:
            OSError: it is not written, for example because it is larger than the folder's limit.
        """
        num_bytes = on_disk(len(data))
        if num_bytes > self._most_bytes:
            raise OSError(errno.EFBIG, "a file is larger than --prefix-disk")
        try:
            self._take_room(num_bytes)
        except FileNotFoundError:  # another process emptied the cache
            make_private_folder(self.folder)
            self._take_room(num_bytes)
        partial = partial_name(file)
        try:
            with new_held(partial, 0o600) as target:  # held: others must not remove it
                for part in (memoryview(data), memoryview(_sum(file, data))):
                    _write_all(target.fileno(), part)
                os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def use(self, path: Sequence[Path]) -> None:
        """Notes a use of files, the last first, so that beginnings stay longest."""
        for file in reversed(path):
            with contextlib.suppress(OSError):
                os.utime(file)

    def _take_room(self, num_bytes: int) -> None:
        """Adds a file to the total size, which all processes share, and evicts others if needed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(self.folder / _COUNT, flags, 0o600), "r+b", buffering=0) as count:
            if not stat.S_ISREG(os.fstat(count.fileno()).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(self.folder / _COUNT))
            _lock(count.fileno())
            written = count.read(_MOST_DIGITS)
            total = int(written) if written.isdigit() else self._most_bytes + 1
            if total + num_bytes > self._most_bytes:
                # listing the folder takes long, so several files are evicted at once
                spare = max(self._most_bytes // _SHARE, num_bytes)
                total = self._remove_down_to(self._most_bytes - spare)
            os.pwrite(count.fileno(), b"%0*d" % (_MOST_DIGITS, total + num_bytes), 0)

    def _remove_down_to(self, limit: int) -> int:
        """Removes the least recently used files; returns the bytes on disk that are left."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another process removed it
                        found = entry.stat(follow_symlinks=False)
                        size = on_disk(found.st_size - SUM_BYTES)
                        files.append((found.st_mtime_ns, size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            if path.endswith(PARTIAL_SUFFIX):
                remove_unless_held(Path(path))
                if os.path.lexists(path):
                    continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


def on_disk(num_bytes: int) -> int:
    """Bytes on disk of a file with ``num_bytes`` and its checksum."""
    return -(-(num_bytes + SUM_BYTES) // _DISK_BLOCK) * _DISK_BLOCK


def _lock(descriptor: int) -> None:
    """Waits briefly for other processes; a stopped process may hold the lock for ever."""
    for _ in range(_LOCK_TRIALS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_TRIAL_S)
    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock of the folder's size")


def _sum(file: Path, data: bytes | memoryview) -> bytes:
    """A digest of a file's data and name."""
    key = bytes.fromhex(file.name)
    return hashlib.blake2b(data, digest_size=SUM_BYTES, key=key).digest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
