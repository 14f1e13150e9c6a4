"""A tier's memory, and reads of experts into it from the files of a checkpoint.

A slab is one allocation of equal slots. An expert is read past the page cache as a few extents:
ranges of a file, extended to whole blocks for direct I/O, one after another in a slot. Its tensors
are views of the slot. No byte is moved after the read, except quantised numbers whose order no
kernel reads.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CLOSED, CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.native.pages import madvise, populate
from moe_runtime.memory.reads import (
    Monitor,
    NativeReadQueue,
    Priority,
    ReadJudge,
    ReadQueue,
    Transfer,
    pack_blocks,
    pack_reorderings,
)
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized.storage_order import StorageOrder


HUGE_PAGE_BYTES = 2 * 2**20
PART_BYTES = 16 * 2**20
"""Slots are touched in parts of this size."""


class Slab:
    """Preallocated slots of one tier; ``bytes`` is all of them. Host slabs are page-aligned
    anonymous memory in huge pages."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Allocates by ``aligned_bytes`` or ``allocate``. Raises ValueError if a size is not
        positive, and CapacityError if the allocation fails."""
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"a slab needs a slot of a byte, got {num_slots} of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.bytes = (allocate or aligned_bytes)(num_slots * slot_bytes)
        self._slots = [*self.bytes.split(slot_bytes)]

    def slot(self, index: int) -> torch.Tensor:
        """One slot, ``uint8`` of ``slot_bytes``; MoERuntimeError once closed."""
        if not self._slots:
            raise MoERuntimeError(CLOSED)
        return self._slots[index]

    def extend(self, num_slots: int) -> range:
        """Adds slots in memory of their own, and returns their numbers; may raise CapacityError."""
        first = self.num_slots
        if num_slots > 0:
            self._slots[first:] = aligned_bytes(num_slots * self.slot_bytes).split(self.slot_bytes)
            self.num_slots += num_slots
        return range(first, self.num_slots)

    def close(self) -> None:
        """Frees the memory once there is no view of it."""
        self._slots, self.bytes = [], self.bytes.new_empty(0)

    def parts(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """All memory, in parts of this size."""
        yield from self.bytes.split(num_bytes)


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Page-aligned zeroed ``uint8`` host memory, in huge pages if possible; or CapacityError."""
    lead = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    # shared memory, Python's default, gets no huge pages
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, num_bytes + lead, flags=private)
    except (OSError, OverflowError) as error:
        size = format_bytes(num_bytes)
        raise CapacityError(f"cannot allocate {size} of host memory: {error}") from None
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % HUGE_PAGE_BYTES if lead else 0
    # the last, partly used page stays small
    whole_pages = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole_pages)
    return mapped[start : start + num_bytes]


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous ``uint8`` host tensor, to read into."""
    array: Any = tensor.numpy()
    return memoryview(array)


@contextlib.contextmanager
def touched_meanwhile(slab: Slab) -> Iterator[None]:
    """Touches the pages of a host slab in a thread until the block ends.

    The first write to a page waits until the system has cleared it: in a virtual machine that may
    take longer than reading a page from a disk.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_touch, args=(slab, stop), name="moe-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _touch(slab: Slab, stop: threading.Event) -> None:
    for part in slab.parts(PART_BYTES):
        if stop.is_set() or not populate(part):
            return


def give_back(memory: torch.Tensor) -> None:
    """Returns whole pages to the system; they read as zeros afterwards."""
    advise = madvise()
    if advise is None:
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        advise(first, last - first, mmap.MADV_DONTNEED)


READ_BYTES = 4 * 2**20
"""Bytes of one positional read: enough for full bandwidth, few enough to be overtaken."""


FileVersion = tuple[int, int, int, int]
"""Device, inode, bytes and time in nanoseconds: changes when a file is written or replaced."""


def file_version(file: Path | int) -> FileVersion:
    """The version of a file, by its path or descriptor; raises OSError."""
    return FileStamp.of(file).version


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The state of a file at some moment.

    Attributes:
        changed_ns: changes even if the time of writing is restored.
        num_links: number of names; a new one changes ``changed_ns`` too.
    """

    version: FileVersion
    changed_ns: int
    num_links: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """The stamp of a file, by its path or descriptor; raises OSError."""
        found = os.stat(file)
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return cls(version, found.st_ctime_ns, found.st_nlink)

    def require(self, file: Path | int, path: Path) -> None:
        """Raises CheckpointError if the file was written or replaced since."""
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
    """An open file, read past the page cache if the file system allows it: the cache would hold a
    second copy of every expert within the same memory limit."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Raises CheckpointError if the file cannot be opened."""
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

        The file may end after ``needed_bytes``; before, EOFError is raised. Raises CheckpointError
        if the file has changed since it was opened, and OSError.
        """
        done = 0
        while done < needed_bytes:
            try:
                moved = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError:  # for example direct I/O past the end of a shortened file
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
        return file_version(self._fd)

    def require_unchanged(self) -> None:
        """Raises CheckpointError if the file was written after it was opened."""
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
                # tmpfs and some network file systems have no direct I/O
                self.direct = False
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)


class ExpertSource:
    """The slowest tier: reads experts by byte range from the checkpoint's files. ``monitor`` guards
    the entries of the tier that is filled."""

    def __init__(
        self, layouts: Mapping[ExpertKey, ExpertLayout], *, io_threads: int = 4, direct: bool = True
    ) -> None:
        """Opens the files; ``direct`` goes past the page cache if possible. Raises CheckpointError
        if a file cannot be opened, and ValueError for less than one thread."""
        self._layouts = dict(layouts)
        paths = {extent.file for layout in layouts.values() for extent in layout.extents}
        library = native_library()
        self._files: dict[Path, CheckpointFile] = {}
        self._native = library and NativeReadQueue(library, io_threads, self._files)
        self._queue = None if self._native else ReadQueue(io_threads)
        self.monitor: Monitor = self._native or Monitor()
        self._packed: dict[ExpertKey, tuple[bytes, ReadJudge, bytes]] = {}
        try:
            for path in sorted(paths):
                self._files[path] = CheckpointFile(path, direct=direct)
        except CheckpointError:
            self.close()
            raise

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        """Starts to read an expert into a slot. Python threads announce the end; for native threads
        the next operation under ``monitor`` does."""
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
                steps = pack_reorderings(
                    order.step(*at) for order, *at in self._layouts[key].reorderings
                )
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
        if self._layouts[key].reorderings:
            blocks = [partial(self._read_in_order, key, blocks, slot)]
        self._queue.submit(blocks, read)

    def read(self, slots: Mapping[ExpertKey, torch.Tensor]) -> None:
        """Reads experts into slots and waits; raises CheckpointError."""

        def announce(_: Transfer) -> None:
            with self.monitor:
                self.monitor.notify_all()

        reads = {key: Transfer(Priority.DEMAND, announce) for key in slots}
        with self.monitor:
            for key, read in reads.items():
                self.fetch(key, slots[key], read)
            while not all(read.ended_s for read in reads.values()):
                self.monitor.wait()
        for read in reads.values():
            if read.error is not None:
                raise read.error

    def versions(self) -> set[FileVersion]:
        """The versions of the open files."""
        return {file.version for file in self._files.values()}

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        self._threads.promote(read)

    def cancel(self, read: Transfer) -> bool:
        return self._threads.cancel(read)

    def is_under_way(self, read: Transfer) -> bool:
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
        """Reads an expert and reorders its numbers, as the native threads do."""
        from moe_runtime.kernels.quantized.storage_order import put_in_order

        moved = sum(block() for block in blocks)
        for order, source, place in self._layouts[key].reorderings:
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
        """The error of a read by native threads, if any."""
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


BLOCK_BYTES = 4096
"""Alignment of offsets, lengths and addresses that every direct I/O accepts."""

MERGE_GAP_BYTES = 64 * 1024
"""Ranges of a file closer than this are read as one."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor of an expert, as a strided view over bytes of a checkpoint file.

    Attributes:
        offset: absolute byte offset of the view's first element.
        span_bytes: bytes from the first element to the end of the last one.
        stride: in elements.
        order: order of the numbers in the file, if it differs from the view's.
    """

    file: Path
    offset: int
    span_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: StorageOrder | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers in the file, without padding of rows."""
        if self.order is not None and self.order.moves:
            return self.span_bytes
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, stored: torch.Tensor) -> torch.Tensor:
        """The numbers, given the bytes of the range (``uint8``)."""
        if self.order is not None:
            from moe_runtime.kernels.quantized.storage_order import put_in_order

            stored = put_in_order(self.order, stored)
        return stored.view(self.dtype).as_strided(self.shape, self.stride)

    @classmethod
    def of(
        cls,
        file: Path,
        name: str,
        offset: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> TensorRange:
        """A view of the tensor ``name`` of a file; raises CheckpointError for an offset that is no
        multiple of the elements' size."""
        if offset % dtype.itemsize:
            raise CheckpointError(
                f"{file}: {name} starts at byte {offset}, which is not a multiple of its "
                f"{dtype.itemsize}-byte elements; save the checkpoint again with safetensors"
            )
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return cls(file, offset, (last + 1) * dtype.itemsize, dtype, shape, stride)


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of whole blocks of a file and its place in the slot.

    Attributes:
        offset: in the file, a multiple of the block size.
        num_bytes: a multiple of the block size; the file may end before that.
        needed_bytes: bytes to the end of the last tensor; they must be in the file.
    """

    file: Path
    offset: int
    num_bytes: int
    needed_bytes: int
    slot_offset: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The reads of one expert, and the places of its tensors in a slot.

    Attributes:
        extents: the reads, in slot order.
        slot_offsets: byte offset in the slot of each of ``tensors``.
        read_offsets: the same after the read, before some are reordered.
        more_bytes: bytes of the slot after the extents, for reordered tensors.
    """

    extents: tuple[Extent, ...]
    tensors: tuple[TensorRange, ...]
    slot_offsets: tuple[int, ...]
    read_offsets: tuple[int, ...]
    more_bytes: int

    @property
    def slot_bytes(self) -> int:
        last = self.extents[-1]
        return last.slot_offset + last.num_bytes + self.more_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the expert in the files, without alignment."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def reorderings(self) -> list[tuple[StorageOrder, int, int]]:
        """Reorderings after the read: order, and offsets of source and target in the slot."""
        places = zip(self.tensors, self.read_offsets, self.slot_offsets, strict=True)
        return [(t.order, source, place) for t, source, place in places if t.order is not None]

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for experts with the same views of a slot."""
        return self.slot_offsets, tuple((t.dtype, t.shape, t.stride) for t in self.tensors)

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The expert's tensors as views into a filled slot (``uint8``, at least ``slot_bytes``)."""
        views = []
        typed: dict[torch.dtype, torch.Tensor] = {}
        for tensor, start in zip(self.tensors, self.slot_offsets, strict=True):
            assert start + tensor.span_bytes <= slot.numel()
            if tensor.dtype not in typed:
                typed[tensor.dtype] = slot[: self.slot_bytes].view(tensor.dtype)
            base = typed[tensor.dtype]
            place = base.storage_offset() + start // tensor.dtype.itemsize
            views.append(base.as_strided(tensor.shape, tensor.stride, place))
        return views


def lay_out(tensors: Sequence[TensorRange]) -> ExpertLayout:
    """Plans the reads of one expert: neighbours share a read, and a read has whole blocks."""
    extents: list[Extent] = []
    slot_offset = 0
    for file, start, end in _merge_ranges(tensors):
        offset = start // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = -(-(end - offset) // BLOCK_BYTES) * BLOCK_BYTES
        extents.append(Extent(file, offset, num_bytes, end - offset, slot_offset))
        slot_offset += num_bytes
    read_at = tuple(_slot_offset(tensor, extents) for tensor in tensors)
    placed, end = [*read_at], slot_offset
    for number, tensor in enumerate(tensors):
        if tensor.order is not None and tensor.order.moves:
            placed[number] = end
            end += tensor.order.result_bytes
    more_bytes = -(-(end - slot_offset) // BLOCK_BYTES) * BLOCK_BYTES
    return ExpertLayout(tuple(extents), tuple(tensors), tuple(placed), read_at, more_bytes)


def _merge_ranges(tensors: Iterable[TensorRange]) -> list[tuple[Path, int, int]]:
    merged: list[tuple[Path, int, int]] = []
    ranges = sorted((t.file, t.offset, t.offset + t.span_bytes) for t in tensors)
    for file, start, end in ranges:
        if merged and merged[-1][0] == file and start <= merged[-1][2] + MERGE_GAP_BYTES:
            merged[-1] = (file, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((file, start, end))
    return merged


def _slot_offset(tensor: TensorRange, extents: Iterable[Extent]) -> int:
    for extent in extents:
        begin = tensor.offset - extent.offset
        if extent.file == tensor.file and 0 <= begin < extent.needed_bytes:
            return extent.slot_offset + begin
    raise AssertionError(f"no extent covers {tensor}")
