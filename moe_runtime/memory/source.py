"""Experts in the files of a checkpoint: positional reads of whole experts, past the page cache."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.native.library import native_library
from moe_runtime.memory.layout import ExpertLayout
from moe_runtime.memory.reads import (
    Monitor,
    NativeReadQueue,
    Priority,
    Read,
    ReadEnd,
    ReadQueue,
    pack_blocks,
    pack_steps,
)
from moe_runtime.memory.slab import host_view
from moe_runtime.types import ExpertKey

READ_BYTES = 4 * 2**20
"""Of one positional read: large enough for full bandwidth, small enough to be overtaken."""


FileVersion = tuple[int, int, int, int]
"""Device, inode, bytes and time in nanoseconds: changes when a file is written or replaced."""


def file_version(file: Path | int) -> FileVersion:
    """The version of a file, by its path or descriptor; OSError where there is none."""
    return FileStamp.of(file).version


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file at some moment.

    Attributes:
        changed_ns: changes too where the time of writing is restored.
        num_links: names of the file; a change of their number changes ``changed_ns`` as well.
    """

    version: FileVersion
    changed_ns: int
    num_links: int

    @classmethod
    def of(cls, file: Path | int) -> "FileStamp":
        """The stamp of a file, by its path or descriptor; OSError where there is none."""
        found = os.stat(file)
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return cls(version, found.st_ctime_ns, found.st_nlink)

    def require(self, file: Path | int, path: Path) -> None:
        """CheckpointError if the file was written or replaced since; the message names the path."""
        try:
            now = FileStamp.of(file)
        except OSError as error:
            raise CheckpointError(f"{path} has changed: {error.strerror}") from None
        is_renamed = now.num_links != self.num_links
        if now.version != self.version or not (is_renamed or now.changed_ns == self.changed_ns):
            raise CheckpointError(
                f"{path} has changed since it was opened, so its weights are no longer those of "
                "this model; load it again"
            )


class CheckpointFile:
    """One open file, read past the page cache where the file system allows it. The page cache would
    hold a second copy of every expert within the same memory limit."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """CheckpointError where the file cannot be opened."""
        self.path = path
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._fd = self._open()
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from None
        self._stamp = FileStamp.of(self._fd)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    def read(self, offset: int, into: memoryview, needed_bytes: int) -> int:
        """Fills a buffer from whole blocks of the file; returns the bytes read.

        The file may end behind ``needed_bytes``. Raises CheckpointError: the file has changed since
        it was opened. Raises OSError: the disk reports an error. Raises EOFError: it ends too
        early.
        """
        done = 0
        while done < needed_bytes:
            try:
                moved = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError:  # as direct I/O behind the end of a file that got shorter
                self.require_unchanged()
                raise
            if moved == 0:
                self.require_unchanged()
                raise EOFError(f"the file ends before byte {offset + done}")
            done += moved
        return done

    @property
    def fileno(self) -> int:
        return self._fd

    @property
    def version(self) -> FileVersion:
        """Which file is open, as it was written last."""
        return file_version(self._fd)

    def require_unchanged(self) -> None:
        """CheckpointError if the file was written after it was opened."""
        found, stamp = os.fstat(self._fd), self._stamp
        times = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if times != (*stamp.version[2:], stamp.changed_ns):
            stamp.require(self._fd, self.path)

    def close(self) -> None:
        self._close()

    def _open(self) -> int:
        if self.direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                # tmpfs and some network file systems know no direct I/O
                self.direct = False
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)


class ExpertSource:
    """The slowest tier: experts read by byte range from the checkpoint's files. ``changed`` guards
    the entries of the tier that is filled."""

    def __init__(
        self, layouts: Mapping[ExpertKey, ExpertLayout], *, io_threads: int = 4, direct: bool = True
    ) -> None:
        """Opens the files; ``direct`` goes past the page cache where possible. Raises
        CheckpointError: a file cannot be opened. Raises ValueError: there would be no reading
        thread."""
        self._layouts = dict(layouts)
        paths = {extent.file for layout in layouts.values() for extent in layout.extents}
        library = native_library()
        self._files: dict[Path, CheckpointFile] = {}
        self._native = library and NativeReadQueue(library, io_threads, self._files)
        self._queue = None if self._native else ReadQueue(io_threads)
        self.changed: Monitor = self._native or Monitor()
        self._packed: dict[ExpertKey, tuple[bytes, ReadEnd, bytes]] = {}
        try:
            for path in sorted(paths):
                self._files[path] = CheckpointFile(path, direct=direct)
        except CheckpointError:
            self.close()
            raise

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to read an expert into a slot. Python threads announce its end themselves; that of
        native ones is delivered by the next operation under ``changed``."""
        if self._native:
            packed = self._packed.get(key)
            if packed is None:
                assert self._layouts[key].slot_bytes <= slot.nbytes
                files = self._files
                blocks = pack_blocks(
                    [
                        (files[file].fileno, at, place, size, needed)
                        for file, at, place, size, needed in self._blocks(key)
                    ]
                )
                steps = pack_steps(order.step(*at) for order, *at in self._layouts[key].steps)
                used = [files[f] for f in {extent.file for extent in self._layouts[key].extents}]
                packed = self._packed[key] = blocks, partial(self._judge, key, used), steps
            blocks, judge, steps = packed
            self._native.submit(blocks, slot.data_ptr(), read, judge, steps)
            return
        assert self._queue is not None
        buffer = host_view(slot)
        blocks = [
            partial(self._read_block, key, number, *block, buffer)
            for number, block in enumerate(self._blocks(key))
        ]
        if self._layouts[key].steps:
            blocks = [partial(self._read_in_order, key, blocks, slot)]
        self._queue.submit(blocks, read)

    def read(self, slots: Mapping[ExpertKey, torch.Tensor]) -> None:
        """Reads experts into slots and waits; CheckpointError where one cannot be read."""

        def announce(_: Read) -> None:
            with self.changed:
                self.changed.notify_all()

        reads = {key: Read(Priority.DEMAND, announce) for key in slots}
        with self.changed:
            for key, read in reads.items():
                self.fetch(key, slots[key], read)
            while not all(read.ended_s for read in reads.values()):
                self.changed.wait()
        for read in reads.values():
            if read.error is not None:
                raise read.error

    def versions(self) -> set[FileVersion]:
        """The files that experts are read from, as they were opened."""
        return {file.version for file in self._files.values()}

    def promote(self, key: ExpertKey, read: Read) -> None:
        self._threads.promote(read)

    def cancel(self, read: Read) -> bool:
        return self._threads.cancel(read)

    def is_under_way(self, read: Read) -> bool:
        return self._threads.is_under_way(read)

    def close(self) -> None:
        self._threads.close()
        for file in self._files.values():
            file.close()

    @property
    def _threads(self) -> NativeReadQueue | ReadQueue:
        threads = self._native or self._queue
        assert threads is not None
        return threads

    def _blocks(self, key: ExpertKey) -> list[tuple[Path, int, int, int, int]]:
        """Positional reads: file, offset there, place in the slot, bytes, needed bytes."""
        return [
            (
                extent.file,
                extent.offset + begin,
                extent.slot_offset + begin,
                min(READ_BYTES, extent.num_bytes - begin),
                max(0, min(READ_BYTES, extent.needed_bytes - begin)),
            )
            for extent in self._layouts[key].extents
            for begin in range(0, extent.num_bytes, READ_BYTES)
        ]

    def _read_block(
        self,
        key: ExpertKey,
        number: int,
        path: Path,
        offset: int,
        place: int,
        size: int,
        needed: int,
        buffer: memoryview,
    ) -> int:
        file = self._files[path]
        try:
            num_bytes = file.read(offset, buffer[place : place + size], needed)
        except (OSError, EOFError) as error:
            raise self._fault(key, number, error) from None
        file.require_unchanged()
        return num_bytes

    def _read_in_order(
        self, key: ExpertKey, blocks: list[Callable[[], int]], slot: torch.Tensor
    ) -> int:
        """Reads an expert and puts its numbers in order, as the native threads do."""
        from moe_runtime.kernels.quantized.storage_order import put_in_order

        moved = sum(block() for block in blocks)
        for order, source, place in self._layouts[key].steps:
            found = put_in_order(order, slot[source : source + order.stored_bytes])
            slot[place : place + found.numel()] = found
        return moved

    def _judge(
        self,
        key: ExpertKey,
        files: Sequence[CheckpointFile],
        number: int,
        error: OSError | EOFError | None,
    ) -> CheckpointError | None:
        """The fault of an expert that native threads have read, if any."""
        try:
            for file in files:
                file.require_unchanged()
        except CheckpointError as changed:
            return changed
        return None if error is None else self._fault(key, number, error)

    def _fault(self, key: ExpertKey, number: int, error: OSError | EOFError) -> CheckpointError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return CheckpointError(
            f"cannot read expert {key.expert} of MoE layer {key.layer} "
            f"from {self._blocks(key)[number][0].name}: {reason}"
        )
