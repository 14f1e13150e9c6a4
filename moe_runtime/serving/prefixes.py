"""Keys and values of beginnings of texts: in memory that no sequence needs, and on the disk."""

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
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeWarning, UnsupportedModelError
from moe_runtime.files import PARTIAL_SUFFIX, make_folders, partial_name
from moe_runtime.inference.sequence_cache import BlockCopies, set_room
from moe_runtime.serving.kv_account import KVAccount, digests_of
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import GenerationRequest
from moe_runtime.serving.scheduling import Sequence

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
        most_bytes: of all files in it, also those of other processes.
        identity: of all that computes keys and values; see `identity_of`.
    """

    folder: Path
    most_bytes: int
    identity: bytes


def identity_of(checkpoint: str | os.PathLike[str], *settings: str) -> bytes:
    """A digest of what keys and values depend on besides the tokens: the checkpoint's files, and
    settings."""
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

    Several processes may use the folder: a file is whole or absent, and a damaged one is an unknown
    block. The files used longest ago give way.

    Raises:
        ValueError: there is no room for a single block, or the folder cannot be made.
    """

    def __init__(self, disk: PrefixDisk, *, block_tokens: int, block_bytes: int) -> None:
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

    def find(self, tokens: Items[int], first: int, owner: str = "") -> Iterator[torch.Tensor]:
        """What is known of the beginning of some tokens, block by block from ``first``, as bytes.

        Blocks kept under another ``owner`` are not found.
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
        self, tokens: Items[int], make: Callable[[int], torch.Tensor], owner: str = ""
    ) -> None:
        """Writes the whole blocks of some tokens that are not there yet, as many as have place."""
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

    def _files(self, tokens: Items[int], owner: str) -> Iterator[Path]:
        root = self._root
        if owner:
            root = hashlib.blake2b(root + owner.encode(), digest_size=_DIGEST_BYTES).digest()
        for digest in digests_of(tokens, self._block_tokens, root, _DIGEST_BYTES):
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
        data, expected = block[: self._block_bytes], block[self._block_bytes :]
        if is_whole and _sum(file, data) == expected.numpy().tobytes():
            return data
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def _write(self, file: Path, block: torch.Tensor) -> None:
        """A file is renamed when it is written; a sum tells what a power cut left of it."""
        data = block.cpu()
        try:
            self._take_place()
        except FileNotFoundError:  # another process emptied the cache
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
        """Counts one file more; all processes add to the same number, one at a time."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(self._folder / _COUNT, flags, 0o600), "r+b", buffering=0) as count:
            if not stat.S_ISREG(os.fstat(count.fileno()).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(self._folder / _COUNT))
            _lock(count.fileno())
            written = count.read(_MOST_DIGITS)
            total = int(written) if written.isdigit() else self._most_bytes
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

    def _use(self, path: Items[Path]) -> None:
        """The last block first, so that beginnings stay longest."""
        for file in reversed(path):
            with contextlib.suppress(OSError):
                _set_time(file)


def _set_time(file: Path) -> None:
    os.utime(file)


def _lock(descriptor: int) -> None:
    """Waits a moment for other processes; one that is stopped may hold the lock for ever."""
    for _ in range(_LOCK_TRIALS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_TRIAL_S)
    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock of the folder's size")


def _sum(file: Path, data: torch.Tensor) -> bytes:
    """A digest of a block and its name."""
    key = bytes.fromhex(file.name)
    return hashlib.blake2b(data.numpy().data, digest_size=_SUM_BYTES, key=key).digest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


LEAST_SHARED = 64
"""A sequence waits for another that computes so many tokens of its beginning; fewer are worth no
waiting."""
_PARTS = 8
"""Keys and values that move from one place to another do so in so many parts."""


class Prefixes:
    """What is known of the beginnings of texts, in blocks of tokens, in memory and on the disk.

    Raises:
        UnsupportedModelError: the account keeps no prefixes, and there is a disk for them.
    """

    def __init__(
        self,
        account: KVAccount[torch.Tensor],
        passes: ModelPasses,
        *,
        exact: bool,
        disk: PrefixDisk | None,
    ) -> None:
        self._account = account
        self._exact = exact
        self._copies = BlockCopies(account.block_tokens)
        self._files: PrefixFiles | None = None
        self.num_disk_tokens = 0
        if disk is None:
            return
        if not account.block_tokens:
            raise UnsupportedModelError(
                "the model keeps no prefixes (it has windows or running states), so there are none "
                "for a disk; leave --prefix-disk out"
            )
        block_bytes = self._copies.learn(passes.cache_of_one_token())
        self._files = PrefixFiles(disk, block_tokens=account.block_tokens, block_bytes=block_bytes)

    @property
    def num_disk_failures(self) -> int:
        return 0 if self._files is None else self._files.num_failures

    def look_up(self, sequence: Sequence) -> None:
        """Finds a sequence's beginning before it gets room, which may be that very memory."""
        sequence.found = self._account.find(self._wanted(sequence), sequence.root)

    def are_coming(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Whether a sequence better waits until one that runs has computed its beginning."""
        size, num_wanted = self._account.block_tokens, self._num_wanted(sequence)
        for other in running if size else ():
            end = -(-(other.num_found + LEAST_SHARED) // size) * size
            # one that tells of its prompt's log-probabilities computes what is known already, too
            is_first = other.is_reading and not other.wants_prompt_logprobs
            is_before = is_first and other.order < sequence.order
            if (
                is_before
                and other.root == sequence.root
                and end <= min(num_wanted, other.read_end)
                and sequence.tokens[:end] == other.tokens[:end]
            ):
                return True
        return False

    def fill(self, sequence: Sequence, cache: DynamicCache, room: int) -> int:
        """Copies the longest known beginning of a sequence into its empty cache; gives its tokens.

        Where the cache's room was taken from the blocks that were found, it grows as these are
        freed: both are never there at once.
        """
        tokens, root = self._wanted(sequence), sequence.root
        found, sequence.found = sequence.found[::-1], []
        size, num_cached = self._account.block_tokens, 0
        is_given_up = len(self._account.find(tokens, root)) < len(found)
        at_once = -(-len(found) // _PARTS) if is_given_up else len(found)
        while found:
            grown = num_cached + at_once * size if len(found) > at_once else room
            set_room(cache, grown)
            for _ in range(min(at_once, len(found))):
                self._append(cache, found.pop(), num_cached, grown)
                num_cached += size
        if self._files is not None and sequence.request.adapter is None:
            owner = sequence.request.prefix_owner
            for block in self._files.find(tokens, num_cached // size, owner):
                self._append(cache, block, num_cached, room)
                num_cached += size
                self.num_disk_tokens += size
        return num_cached

    def keep(self, sequence: Sequence) -> None:
        """Keeps the whole blocks that are computed of a sequence, as far as there is place."""
        cache, tokens = sequence.cache, self._computed(sequence)
        if cache is None or not self._account.block_tokens:
            return
        self._account.keep(tokens, lambda index: self._copies.copy(cache, index), sequence.root)
        self._write(cache, tokens, sequence.request)

    def take_over(self, sequence: Sequence, release: Callable[[], None]) -> None:
        """Keeps the whole blocks of a sequence that ends, whose room becomes theirs.

        Where there is no other place for them, the cache shrinks from its end as they are copied.
        """
        cache, size = sequence.cache, self._account.block_tokens
        if cache is None or not size:
            return
        tokens, root = self._computed(sequence), sequence.root
        count, known = len(tokens) // size, len(self._account.find(tokens, root))
        # the room of a row does not belong to the sequence in it
        if count * size <= self._account.available or not self._account.room_of(sequence):
            self.keep(sequence)
            return
        self._write(cache, tokens, sequence.request)
        blocks: dict[int, torch.Tensor] = {}
        at_once = -(-(count - known) // _PARTS)
        for end in range(count, known, -at_once):
            first = max(end - at_once, known)
            blocks |= {index: self._copies.copy(cache, index) for index in range(first, end)}
            set_room(cache, first * size)
        release()
        self._account.keep(tokens, blocks.__getitem__, root)

    def _wanted(self, sequence: Sequence) -> Items[int]:
        """Tokens that may be known: the last one is computed in any case, for what follows it."""
        whole = sequence.request.prompt_ids if self._exact else sequence.tokens
        return whole[: self._num_wanted(sequence)]

    def _num_wanted(self, sequence: Sequence) -> int:
        if sequence.wants_prompt_logprobs:
            return 0
        return len(sequence.request.prompt_ids if self._exact else sequence.tokens) - 1

    def _computed(self, sequence: Sequence) -> Items[int]:
        end = sequence.num_computed
        return sequence.tokens[: min(end, sequence.read_end) if self._exact else end]

    def _write(self, cache: DynamicCache, tokens: Items[int], request: GenerationRequest) -> None:
        if self._files is not None and request.adapter is None:
            make = partial(self._copies.copy, cache)
            self._files.keep(tokens, make, request.prefix_owner)

    def _append(self, cache: DynamicCache, block: torch.Tensor, num_cached: int, room: int) -> None:
        self._copies.append(cache, block)
        if not num_cached:  # now that the cache has tensors
            set_room(cache, room)
