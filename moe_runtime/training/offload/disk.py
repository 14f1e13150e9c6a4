"""Records on the disk: preallocated files of equal slots, written past the page cache."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.files import locked
from moe_runtime.memory.reads import Block, ReadQueue, Transfer
from moe_runtime.memory.source import READ_BYTES, CheckpointFile, host_view
from moe_runtime.training.offload.records import (
    ORDER,
    RecordLayout,
    Sections,
    Version,
    checksum,
    records_path,
)
from moe_runtime.types import ExpertKey


class RecordFile(CheckpointFile):
    """Slots of one size in one file; each is free, or held once or several times.

    A slot that a checkpoint names is never written: a new version of an expert goes to a free slot.
    So a kill at any instant is harmless.

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
        """A free slot, held once; the file grows when there is none."""
        if not self._free:
            self._grow(self.num_slots + 1 + self.num_slots // 8)
        slot = self._free.pop()
        self._holds[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Holds a slot once more; a free one is taken."""
        if slot >= self.num_slots:
            raise CheckpointError(
                f"{self.path} is too short: it has {self.num_slots} records, the checkpoint names "
                f"number {slot}"
            )
        if slot not in self._holds:
            self._free.remove(slot)
        self._holds[slot] += 1

    def drop(self, slot: int) -> None:
        """Drops one hold of a slot; the slot is free when none is left."""
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            del self._holds[slot]
            self._free.append(slot)

    def write(self, offset: int, content: memoryview) -> int:
        done = 0
        with self._named_errors("write"):
            while done < len(content):
                moved = os.pwritev(self._fd, [content[done:]], offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += moved
        return done

    def fetch(self, offset: int, into: memoryview) -> int:
        with self._named_errors("read"):
            return self.read(offset, into, len(into))

    def sync(self) -> None:
        with self._named_errors("write"):
            os.fdatasync(self._fd)

    def require_unchanged(self) -> None:
        """Does nothing: the file changes all the time, and digests are compared instead."""

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
        with self._named_errors("write", f" of {format_bytes(size)}"):
            if size > os.fstat(self._fd).st_size:
                os.posix_fallocate(self._fd, 0, size)
        self._free.extend(range(num_slots - 1, self.num_slots - 1, -1))
        self.num_slots = max(self.num_slots, num_slots)

    @contextlib.contextmanager
    def _named_errors(self, action: str, size: str = "") -> Iterator[None]:
        """Raises errors of the file system with the name of the file."""
        try:
            yield
        except EOFError as error:
            raise CheckpointError(f"cannot {action} {self.path}: {error}") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CapacityError(
                    f"no room on the disk for {self.path}{size}: {error.strerror}; "
                    "make some, or name another folder for the experts' states"
                ) from None
            raise CheckpointError(f"cannot {action} {self.path}: {error.strerror}") from None


@dataclass(frozen=True, eq=False, slots=True)
class RecordPart:
    """Sections of an expert's record in memory, and their version on the disk."""

    key: ExpertKey
    layout: RecordLayout
    version: Version | None
    sections: Sections
    record: Tensor


OpenFile = Callable[[Path, int, int], RecordFile]
LOCK_FILE = "experts.lock"


class Disk:
    """Versions of records in `experts-*.records`, waiting gradients in `gradients-*.scratch`.

    Args:
        folder: of the files; it must exist, and no other training may use it.
        layouts: of every expert's record; each size of record has a file.
        open_file: opens the files, in tests.

    Attributes:
        files: of versions, by the bytes of a record.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[ExpertKey, RecordLayout],
        *,
        io_threads: int = 4,
        direct: bool = True,
        open_file: OpenFile | None = None,
    ) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"storage_dir {folder} is not a directory; make it first")
        self.folder = folder
        self._open = open_file or partial(RecordFile, direct=direct)
        self.files: dict[int, RecordFile] = {}
        self._scratch: dict[int, RecordFile] = {}
        self._parking: dict[ExpertKey, int] = {}
        self._parked: dict[ExpertKey, str] = {}
        numbers = Counter(layout.state_bytes for layout in layouts.values())
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(locked(folder / LOCK_FILE))
            except BlockingIOError:
                raise CheckpointError(
                    f"storage_dir {folder}: another training has its experts there; close it, or "
                    "name another folder"
                ) from None
            except OSError as error:
                raise CheckpointError(f"cannot open {folder}: {error.strerror}") from None
            for layout in layouts.values():
                size = layout.state_bytes
                if size not in self.files:
                    path = records_path(folder, layout)
                    file = self.files[size] = self._open(path, size, numbers[size])
                    opened.callback(file.close)
            self._queue = ReadQueue(io_threads)
            self._opened = opened.pop_all()

    def read(self, part: RecordPart, read: Transfer) -> None:
        """Starts a read; the thread that reads the last block checks the digests."""
        blocks = self._blocks(part, attrgetter("fetch"))
        left = itertools.count(1 - len(blocks))

        def move(block: Block) -> int:
            moved = block()
            if next(left) == 0:
                self._compare(part)
            return moved

        self._queue.submit([partial(move, block) for block in blocks], read)

    def write(self, part: RecordPart, write: Transfer) -> None:
        """Starts to write a new version, or a waiting gradient."""
        blocks = self._blocks(part, attrgetter("write"))
        self._queue.submit([partial(self._seal, part), *blocks], write)

    def is_under_way(self, transfer: Transfer) -> bool:
        return self._queue.is_under_way(transfer)

    def sync(self) -> None:
        for file in self.files.values():
            file.sync()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_slots * file.slot_bytes for file in self._all_files())

    def close(self) -> None:
        self._queue.close()
        for file in self._scratch.values():
            file.close()
        self._opened.close()

    def _all_files(self) -> list[RecordFile]:
        return [*self.files.values(), *self._scratch.values()]

    def _blocks(
        self, part: RecordPart, move_of: Callable[[RecordFile], Callable[[int, memoryview], int]]
    ) -> list[Block]:
        return [
            partial(move_of(file), offset + begin, content[begin : begin + READ_BYTES])
            for file, offset, content in self._ranges(part)
            for begin in range(0, len(content), READ_BYTES)
        ]

    def _ranges(self, part: RecordPart) -> Iterator[tuple[RecordFile, int, memoryview]]:
        """File, offset and memory of each run of neighbouring sections."""
        layout, view = part.layout, host_view(part.record)
        runs: list[tuple[int, int]] = []
        for section in ORDER:
            if section not in part.sections:
                continue
            first, last = layout.place_of(section)
            if section == Sections.GRADIENT:
                file, place = self._parking_place(part)
                yield file, place * file.slot_bytes, view[first:last]
            elif runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], last)
            else:
                runs.append((first, last))
        if runs:
            assert part.version is not None
            file = self.files[layout.state_bytes]
            for first, last in runs:
                yield file, part.version.slot * file.slot_bytes + first, view[first:last]

    def _seal(self, part: RecordPart) -> int:
        """Notes the digests of the sections to be written."""
        if part.version is not None:
            part.version.digest, part.version.sections = part.layout.checksums(part.record)
        if Sections.GRADIENT in part.sections:
            gradient = part.layout.section(part.record, Sections.GRADIENT)
            self._parked[part.key] = checksum(gradient)
        return 0

    def _compare(self, part: RecordPart) -> None:
        expected = {} if part.version is None else dict(part.version.sections)
        if part.key in self._parked:
            expected[Sections.GRADIENT] = self._parked[part.key]
        for section in ORDER:
            known = expected.get(section)
            if section not in part.sections or known is None:
                continue
            if checksum(part.layout.section(part.record, section)) != known:
                file = self.files[part.layout.state_bytes]
                if section == Sections.GRADIENT:
                    file, _ = self._parking_place(part)
                raise CheckpointError(
                    f"{file.path}: expert {part.key.expert} of MoE layer {part.key.layer} is "
                    f"damaged: its {str(section.name).lower()} is not what this run wrote there; "
                    "check the disk, and go on from the last checkpoint"
                )

    def _parking_place(self, part: RecordPart) -> tuple[RecordFile, int]:
        size = part.layout.bytes_of(Sections.GRADIENT)
        if size not in self._scratch:
            self._scratch[size] = self._open(self.folder / f"gradients-{size}.scratch", size, 0)
        file = self._scratch[size]
        if part.key not in self._parking:
            self._parking[part.key] = file.take()
        return file, self._parking[part.key]
