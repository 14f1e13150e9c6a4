"""Dense weights that the processes of a group on one machine hold once.

The first of them reads the weights and copies them into a file in memory. The others lay the same
weights out without reading and map that file. Mappings are private: whoever writes to a weight gets
pages of its own, as from memory of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import psutil
import torch
from torch import Tensor

from moe_runtime.checkpoints.dense_weights import ALIGNED_BYTES, dense_memory
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, RankFailureError
from moe_runtime.memory.source import host_view
from moe_runtime.parallel.communication.transport import Transport, numbers_of_all, ranks_here

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = struct.Struct("3q")
"""At the start of the file: the state, and size and checksum of the layout."""
_LOADING, _READY, _FAILED = range(3)
_POLL_S = 0.01
_WRITTEN_BYTES = 2**30
"""Most bytes of one write; the system's limit is near twice as much."""


class Neighbours:
    """The processes of a group on this machine.

    Attributes:
        num_processes: their number, this one included.
        are_sharing: whether dense weights lie in memory that all of them map.
        reads: whether this process reads the dense weights from the checkpoint.
    """

    def __init__(self, transport: Transport, *, may_share: bool) -> None:
        """A collective call. ``may_share`` is the same in all processes."""
        here = ranks_here(transport)
        self.num_processes, self._here, self._transport = len(here), here, transport
        self._first, self._pid = here[0], 0
        self.are_sharing, self.reads = False, True
        if may_share and transport.size > 1:
            self._open_memory()

    def own_bytes(self, dense_bytes: int) -> int:
        """The part of dense weights that counts in the budget of this process."""
        return -(-dense_bytes // self.num_processes) if self.are_sharing else dense_bytes

    def any(self, is_so: bool) -> bool:
        """Whether it is so in any process of this machine; a collective call."""
        found = numbers_of_all(self._transport, [is_so])
        return any(found[rank][0] for rank in self._here)

    @contextlib.contextmanager
    def sharing(self, model: PreTrainedModel) -> Iterator[None]:
        """Loads weights in the block; at its end they lie in the shared memory, but are complete
        only after `wait`. Raises CapacityError: the system refuses the memory."""
        try:
            yield
            if self.are_sharing:
                self._share(model)
        except BaseException:
            if self.are_sharing and self.reads:
                self._announce(_FAILED)
            raise

    def wait(self) -> None:
        """Waits until the process that reads the weights has done so. Raises RankFailureError: it
        failed, or has other weights."""
        if not self.are_sharing:
            return
        while not self.reads:
            state, *layout = _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))
            if state == _FAILED or (state == _LOADING and not _is_alive(self._pid)):
                self._fail("did not load the dense weights that this process shares")
            if state == _READY:
                if layout != self._layout:
                    self._fail("has other dense weights than this process, which shares them")
                break
            time.sleep(_POLL_S)
        self._end()

    def _fail(self, words: str) -> NoReturn:
        raise RankFailureError(f"rank {self._first} {words}", ranks=(self._first,))

    def _open_memory(self) -> None:
        """Opens the file of this machine's first process, unless one of them cannot reach it."""
        is_first = self._transport.rank == self._first
        own = os.memfd_create("moe-runtime") if is_first and hasattr(os, "memfd_create") else None
        inode = 0 if own is None else os.fstat(own).st_ino
        numbers = [os.getpid(), -1 if own is None else own, inode, zlib.crc32(_boot_id())]
        of_first = numbers_of_all(self._transport, numbers)[self._first]
        self._pid, number, inode, boot = of_first
        if not is_first and number >= 0 and boot == numbers[-1]:
            own = _opened(Path(f"/proc/{self._pid}/fd/{number}"), inode)
        if own is not None:
            self._file, self._end = own, weakref.finalize(self, os.close, own)
        have_it = numbers_of_all(self._transport, [own is not None])
        self.are_sharing = len(self._here) > 1 and all(have_it[rank][0] for rank in self._here)
        self.reads = is_first or not self.are_sharing

    def _share(self, model: PreTrainedModel) -> None:
        parts = deque(dense_memory(model))
        spans: dict[int, list[int]] = {}  # first and last address by storage
        shapes = []
        for tensor, _ in parts:
            first, end = _span(tensor)
            span = spans.setdefault(tensor.untyped_storage().data_ptr(), [first, end])
            span[:] = min(span[0], first), max(span[1], end)
            shapes.append((tensor.dtype, tensor.shape, tensor.stride()))
        places, size = {}, mmap.PAGESIZE
        for storage, (first, end) in spans.items():
            places[storage] = size
            size += -(-(end - first) // ALIGNED_BYTES) * ALIGNED_BYTES
        self._layout = [size, zlib.crc32(repr((shapes, [*places.values()])).encode())]
        written = set()
        try:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            mapped = mmap.mmap(self._file, size, flags=mmap.MAP_PRIVATE)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
            while parts:
                # old memory is freed with its last tensor
                tensor, put = parts.popleft()
                (first, end), storage = _span(tensor), tensor.untyped_storage()
                base = storage.data_ptr()
                if self.reads and base not in written:
                    written.add(base)
                    stored = torch.empty(0, dtype=torch.uint8).set_(cast(Any, storage))
                    start, stop = (address - base for address in spans[base])
                    _write(self._file, places[base], stored[start:stop])
                    del stored
                place = places[base] + first - spans[base][0]
                moved = memory[place : place + end - first].view(tensor.dtype)
                put(moved.as_strided(tensor.shape, tensor.stride()))
                del tensor, put, storage
        except OSError as error:
            words = f"cannot allocate {format_bytes(size)} of memory for dense weights"
            raise CapacityError(f"{words}: {error.strerror}") from None
        if self.reads:
            self._announce(_READY)

    def _announce(self, state: int) -> None:
        layout = self._layout if state == _READY else (0, 0)
        os.pwrite(self._file, _HEAD.pack(state, *layout), 0)


def _boot_id() -> bytes:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_bytes() if path.is_file() else b""


def _opened(path: Path, inode: int) -> int | None:
    """The file of another process; None if this process cannot reach it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(file).st_ino == inode:
        return file
    os.close(file)
    return None


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one after its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.itemsize


def _write(file: int, place: int, stored: Tensor) -> None:
    buffer = host_view(stored)
    while buffer:
        moved = os.pwrite(file, buffer[:_WRITTEN_BYTES], place)
        buffer, place = buffer[moved:], place + moved
