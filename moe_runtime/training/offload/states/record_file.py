"""Records on the disk: a preallocated file of equal slots, written past the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.memory.source import CheckpointFile


class RecordFile(CheckpointFile):
    """Slots of one size in one file; each is free or held, once or several times.

    A slot that something durable refers to is never written: a new version of an expert goes to a
    free slot. That is what makes a kill at any instant harmless.

    Args:
        path: the file; made if it is missing.
        slot_bytes: of a slot, whole blocks.
        num_slots: slots to allocate at once.
        direct: go past the page cache where possible.

    Raises:
        CapacityError: the disk has not enough room.
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, slot_bytes: int, num_slots: int, *, direct: bool = True) -> None:
        super().__init__(path, direct=direct)
        self.slot_bytes = slot_bytes
        self.num_slots = 0
        self._holds: Counter[int] = Counter()
        self._free: list[int] = []
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            self._grow(max(num_slots, os.fstat(self._fd).st_size // slot_bytes))
            opened.pop_all()

    def take(self) -> int:
        """A free slot, held once; the file grows when there is none.

        Raises:
            CapacityError: the disk is full.
        """
        if not self._free:
            self._grow(self.num_slots + 1 + self.num_slots // 8)
        slot = self._free.pop()
        self._holds[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Holds a slot once more, or takes a certain free one.

        Raises:
            CheckpointError: the file has no such slot.
        """
        if slot >= self.num_slots:
            raise CheckpointError(
                f"{self.path} is too short: it has {self.num_slots} records, the checkpoint names "
                f"number {slot}"
            )
        if slot not in self._holds:
            self._free.remove(slot)
        self._holds[slot] += 1

    def drop(self, slot: int) -> None:
        """Lets go of a slot once; free when nothing holds it any more."""
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            del self._holds[slot]
            self._free.append(slot)

    def write(self, offset: int, content: memoryview) -> int:
        """Writes whole blocks.

        Raises:
            CapacityError: the disk is full.
            CheckpointError: the disk reports another error.
        """
        done = 0
        try:
            while done < len(content):
                moved = os.pwritev(self._fd, [content[done:]], offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += moved
        except OSError as error:
            raise self._failure("write", error) from None
        return done

    def fetch(self, offset: int, into: memoryview) -> int:
        """Reads whole blocks.

        Raises:
            CheckpointError: the file ends too early, or the disk reports an error.
        """
        try:
            return self.read(offset, into, len(into))
        except EOFError as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from None
        except OSError as error:
            raise self._failure("read", error) from None

    def sync(self) -> None:
        """Returns when what was written lies on the disk.

        Raises:
            CapacityError, CheckpointError: the disk reports an error.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._failure("write", error) from None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # tmpfs and some network file systems know no direct I/O
                self.direct = False
        return os.open(self.path, flags, 0o644)

    def _grow(self, num_slots: int) -> None:
        size = num_slots * self.slot_bytes
        try:
            if size > os.fstat(self._fd).st_size:
                os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise self._failure("write", error, f" of {format_bytes(size)}") from None
        self._free.extend(range(num_slots - 1, self.num_slots - 1, -1))
        self.num_slots = max(self.num_slots, num_slots)

    def _failure(self, what: str, error: OSError, size: str = "") -> MoERuntimeError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return CapacityError(
                f"no room on the disk for {self.path}{size}: {error.strerror}; "
                "make some, or name another folder for the experts' states"
            )
        return CheckpointError(f"cannot {what} {self.path}: {error.strerror}")
