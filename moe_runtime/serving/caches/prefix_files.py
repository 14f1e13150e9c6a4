"""Prefixes on the disk: keys and values of blocks of tokens, for later requests and processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import itertools
import os
import re
import stat
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.files import PARTIAL_SUFFIX, make_folders, partial_name

_DIGEST_BYTES = 32
_SUM_BYTES = 16
_DISK_BLOCK = 4096
"""Files take a multiple of so many bytes of a disk."""
_SHARE = 16
"""A sixteenth of the room is made where there is none left."""
_COUNT = "bytes"
"""The file that says how much all the others take."""
_MOST_DIGITS = 20
_LOCK_TRIALS, _LOCK_TRIAL_S = 20, 0.01
_OURS = re.compile(rf"[0-9a-f]{{64}}(\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)})?")
_CHECKPOINT_FILES = ("*.safetensors", "*.gguf", "*.json")
_PACKAGES = ("moe-runtime", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class PrefixDisk:
    """Where a model's prefixes lie.

    Attributes:
        folder: made when it is absent; models and processes may share it.
        most_bytes: of all files in it, whoever wrote them.
        identity: of all that computes keys and values; see `identity_of`.
    """

    folder: Path
    most_bytes: int
    identity: bytes


def identity_of(checkpoint: str | os.PathLike[str], *settings: str) -> bytes:
    """A digest of what keys and values depend on beside the tokens.

    Args:
        checkpoint: a folder or a GGUF file; names, sizes and times of its files count.
        settings: whatever else does, such as the type of numbers.
    """
    place = Path(checkpoint)
    files = [place]
    if place.is_dir():
        files = sorted(file for pattern in _CHECKPOINT_FILES for file in place.glob(pattern))
    facts = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    for file in files:
        found = file.stat()
        facts.append(f"{file.name} {found.st_size} {found.st_mtime_ns}")
    text = "\n".join((*facts, *settings))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


class PrefixFiles:
    """Blocks of tokens, each in a file that is named by a digest of all tokens up to its end.

    What is there only the folder knows, so several processes may use it: a file is whole or absent,
    and one that is damaged, or was removed by another, is a block that nobody knows. The files that
    were used longest ago give way. A digest of 256 bits stands for a model and a text.

    Attributes:
        num_failures: times that blocks could not be written or looked for.
    """

    def __init__(self, disk: PrefixDisk, *, block_tokens: int, block_bytes: int) -> None:
        """Makes the folder.

        Args:
            disk: where, how much and of what.
            block_tokens: tokens of a block.
            block_bytes: of its keys and values.

        Raises:
            ValueError: there is no room for a single block, or the folder cannot be made.
        """
        self._folder = disk.folder
        self._most_bytes = disk.most_bytes
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._file_bytes = -(-(block_bytes + _SUM_BYTES) // _DISK_BLOCK) * _DISK_BLOCK
        self._most_blocks = disk.most_bytes // self._file_bytes
        if not self._most_blocks:
            raise ValueError(
                f"--prefix-disk must be at least {format_bytes(self._file_bytes)}, which "
                f"{block_tokens} tokens take, got {format_bytes(disk.most_bytes)}"
            )
        text = f"{block_tokens} {block_bytes}".encode()
        self._root = hashlib.blake2b(disk.identity + text, digest_size=_DIGEST_BYTES).digest()
        self.num_failures = 0
        try:
            self._make_folder()
        except OSError as error:
            raise ValueError(f"--prefix-disk: {error.filename}: {error.strerror}") from None

    def find(self, tokens: Sequence[int], first: int, owner: str = "") -> Iterator[torch.Tensor]:
        """What is known of the beginning of some tokens, block by block; it is used now.

        Args:
            tokens: from the beginning of a text.
            first: number of the first block that is wanted.
            owner: who alone finds what was kept under this name.

        Yields:
            Keys and values as bytes, ``[block_bytes]``, as they were kept.
        """
        path: list[Path] = []
        for index, file in enumerate(self._files(tokens, owner)):
            if index < first:
                continue
            block = self._read(file)
            if block is None:
                break
            path.append(file)
            yield block
        self._use(path)

    def keep(
        self, tokens: Sequence[int], make: Callable[[int], torch.Tensor], owner: str = ""
    ) -> None:
        """Writes the whole blocks of some tokens that are not there yet, as many as have place.

        Args:
            tokens: from the beginning of a text.
            make: gives the bytes of the block with a number, 0 the first.
            owner: as for `find`.
        """
        path = list(itertools.islice(self._files(tokens, owner), self._most_blocks))
        try:
            self._use([file for file in path if file.exists()])  # or they give way to what follows
            for index, file in enumerate(path):
                if not file.exists():
                    self._write(file, make(index))
        except OSError as error:
            self.num_failures += 1
            if self.num_failures == 1:
                message = f"prefixes are not kept on the disk: {error}"
                warnings.warn(message, MoERuntimeWarning, stacklevel=2)
        self._use(path)

    def _make_folder(self) -> None:
        make_folders(self._folder)
        os.chmod(self._folder, 0o700)  # keys and values tell what was asked

    def _files(self, tokens: Sequence[int], owner: str) -> Iterator[Path]:
        """Of the whole blocks, each with all before it."""
        size, digest = self._block_tokens, self._root
        if owner:
            root = hashlib.blake2b(digest + owner.encode(), digest_size=_DIGEST_BYTES)
            digest = root.digest()
        for first in range(0, len(tokens) - size + 1, size):
            block = array("q", tokens[first : first + size]).tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=_DIGEST_BYTES).digest()
            yield self._folder / digest.hex()

    def _read(self, file: Path) -> torch.Tensor | None:
        """The bytes of a block; None where the file is absent or damaged, and is none any more."""
        num_bytes = self._block_bytes + _SUM_BYTES
        block = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            # what is no regular file must not be waited for
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
                found = os.fstat(source.fileno())
                is_whole = stat.S_ISREG(found.st_mode) and found.st_size == num_bytes
                is_whole = is_whole and source.readinto(block.numpy().data) == num_bytes
        except OSError:
            return None
        data, told = block[: self._block_bytes], block[self._block_bytes :]
        if is_whole and _sum(file, data) == told.numpy().tobytes():
            return data
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def _write(self, file: Path, block: torch.Tensor) -> None:
        """A file is renamed when it is written; a sum tells what a power cut left of it."""
        data = block.cpu()
        try:
            self._take_place()
        except FileNotFoundError:  # somebody emptied the cache
            self._make_folder()
            self._take_place()
        partial = partial_name(file)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as target:
                for part in (data.numpy().data, memoryview(_sum(file, data))):
                    _write_all(target.fileno(), part)
            os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _take_place(self) -> None:
        """Counts one file more; all who write here add to the same number, one at a time."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(self._folder / _COUNT, flags, 0o600), "r+b", buffering=0) as count:
            if not stat.S_ISREG(os.fstat(count.fileno()).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(self._folder / _COUNT))
            _lock(count.fileno())
            told = count.read(_MOST_DIGITS)
            total = int(told) if told.isdigit() else self._most_bytes
            if total + self._file_bytes > self._most_bytes:
                # more than one, since looking at all of them takes a while
                spare = max(self._most_bytes // _SHARE, self._file_bytes)
                total = self._remove_down_to(self._most_bytes - spare)
            os.pwrite(count.fileno(), b"%0*d" % (_MOST_DIGITS, total + self._file_bytes), 0)

    def _remove_down_to(self, limit: int) -> int:
        """Removes what was used longest ago; gives the bytes on the disk that are left."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another process removed it
                        found = entry.stat(follow_symlinks=False)
                        size = -(-found.st_size // _DISK_BLOCK) * _DISK_BLOCK
                        files.append((found.st_mtime_ns, size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total

    def _use(self, path: Sequence[Path]) -> None:
        """The last block first, so that beginnings stay longest."""
        for file in reversed(path):
            with contextlib.suppress(OSError):
                _set_time(file)


def _set_time(file: Path) -> None:
    """The file was used last."""
    os.utime(file)


def _lock(descriptor: int) -> None:
    """Waits a moment for other processes; one that is stopped may hold the lock for ever."""
    for _ in range(_LOCK_TRIALS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_TRIAL_S)
    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock of the folder's size")


def _sum(file: Path, data: torch.Tensor) -> bytes:
    """Of a block, which is none under another name."""
    key = bytes.fromhex(file.name)
    return hashlib.blake2b(data.numpy().data, digest_size=_SUM_BYTES, key=key).digest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
