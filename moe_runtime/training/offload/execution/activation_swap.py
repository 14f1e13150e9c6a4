"""Activations that wait for the backward pass on the disk.

A tensor that is packed is copied to page-aligned memory and written from there while the forward
pass goes on; what is unpacked is read, and so are the ones packed before it, which the backward
pass wants next. Buffers under way are bounded: who packs waits for earlier ones to be written.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.reads import Monitor, Priority, Read, ReadQueue
from moe_runtime.memory.slab import aligned_bytes, host_view
from moe_runtime.training.offload.states.record_file import RecordFile

SLOT_BYTES = 2**20
"""Tensors are cut into slots of the file of this size; smaller ones are not worth a transfer."""


class Swapped:
    """A tensor that was packed; its place in the file is free when nobody holds it any more.

    Attributes:
        shape, dtype, device: of the tensor.
        slots: of the file.
        buffer: its bytes, while they are in memory.
        is_written: whether the disk has them.
        is_read: whether `buffer` holds them for who unpacks.
    """

    def __init__(self, tensor: Tensor, slots: list[int], release: Callable[[list[int]], None]):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.slots = slots
        self.buffer: Tensor | None = None
        self.is_written = False
        self.is_read = False
        weakref.finalize(self, release, slots).atexit = False


class ActivationSwap:
    """Packs and unpacks tensors by way of a file.

    Args:
        folder: for the file, which holds nothing that outlives the run.
        io_threads: reads and writes in flight at once.
        direct: go past the page cache where possible.
        buffer_bytes: of tensors on their way, in either direction.
        smallest_bytes: of a tensor; smaller ones stay as they are.

    Attributes:
        buffer_bytes: as given.
        written_bytes, read_bytes: so far, whole slots.
    """

    def __init__(
        self,
        folder: Path,
        *,
        io_threads: int = 2,
        direct: bool = True,
        buffer_bytes: int = 64 * 2**20,
        smallest_bytes: int = SLOT_BYTES,
    ) -> None:
        self._file = RecordFile(folder / "activations.scratch", SLOT_BYTES, 0, direct=direct)
        with contextlib.ExitStack() as opened:
            opened.callback(self._remove)
            self._queue = ReadQueue(io_threads)
            opened.pop_all()
        self._changed = Monitor()
        self.buffer_bytes = buffer_bytes
        self._smallest_bytes = smallest_bytes
        self._writing_bytes = self._reading_bytes = 0
        self._stack: list[weakref.ref[Swapped]] = []
        self._failure: MoERuntimeError | None = None
        self.written_bytes = self.read_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor | Swapped:
        """Begins to write a tensor; small ones are given back.

        Raises:
            MoERuntimeError: the disk is full, or an earlier transfer failed.
        """
        size = tensor.numel() * tensor.element_size()
        if size < self._smallest_bytes:
            return tensor
        num_slots = -(-size // SLOT_BYTES)
        with self._changed:
            self._wait_for(lambda: self._writing_bytes + size <= self.buffer_bytes, size)
            held = Swapped(tensor, [self._file.take() for _ in range(num_slots)], self._release)
            self._writing_bytes += num_slots * SLOT_BYTES
            self._stack = [ref for ref in self._stack if ref() is not None]
            self._stack.append(weakref.ref(held))
        held.buffer = aligned_bytes(num_slots * SLOT_BYTES)
        held.buffer[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._move(held, self._file.write, Priority.READAHEAD, partial(self._leave, held))
        return held

    def unpack(self, held: Tensor | Swapped) -> Tensor:
        """The tensor, its bits as they were.

        Raises:
            MoERuntimeError: it could not be written or read.
        """
        if isinstance(held, Tensor):
            return held
        with self._changed:
            self._begin_read(held, Priority.DEMAND)
            self._read_ahead(held)
            self._wait_for(lambda: held.buffer is not None and held.is_read, 0)
            buffer = held.buffer
            assert buffer is not None
        flat = buffer[: held.num_bytes].view(held.dtype).view(held.shape)
        return flat if held.device.type == "cpu" else flat.to(held.device)

    def measure(self) -> tuple[float, float]:
        """Bytes a second of writing and reading, by a short trial of sixteen slots."""
        tensor = torch.zeros(16 * SLOT_BYTES, dtype=torch.uint8)
        started = time.perf_counter()
        held = self.pack(tensor)
        with self._changed:
            self._wait_for(lambda: self._writing_bytes == 0, 0)
        written = time.perf_counter()
        self.unpack(held)
        ended = time.perf_counter()
        size = tensor.numel()
        return size / max(written - started, 1e-9), size / max(ended - written, 1e-9)

    def close(self) -> None:
        """Ends the transfers and removes the file."""
        self._queue.close()
        self._remove()

    def _remove(self) -> None:
        self._file.close()
        self._file.path.unlink(missing_ok=True)

    def _move(
        self,
        held: Swapped,
        move: Callable[[int, memoryview], int],
        priority: Priority,
        done: Callable[[Read], None],
    ) -> None:
        assert held.buffer is not None
        view = host_view(held.buffer)
        blocks = [
            partial(move, slot * SLOT_BYTES, view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES])
            for i, slot in enumerate(held.slots)
        ]
        self._queue.submit(blocks, Read(priority, done))

    def _leave(self, held: Swapped, write: Read) -> None:
        with self._changed:
            self._failure = self._failure or write.error
            size = len(held.slots) * SLOT_BYTES
            self._writing_bytes -= size
            self.written_bytes += size
            held.is_written = True
            # who wants it already takes it from memory
            if not held.is_read:
                held.buffer = None
            self._changed.notify_all()

    def _arrive(self, held: Swapped, read: Read) -> None:
        with self._changed:
            self._failure = self._failure or read.error
            size = len(held.slots) * SLOT_BYTES
            self._reading_bytes -= size
            self.read_bytes += size
            held.is_read = True
            self._changed.notify_all()

    # What follows is called with the lock held.

    def _begin_read(self, held: Swapped, priority: Priority) -> None:
        if held.buffer is not None:
            held.is_read = held.is_read or not held.is_written
            return
        size = len(held.slots) * SLOT_BYTES
        held.buffer = aligned_bytes(size)
        self._reading_bytes += size
        self._move(held, self._file.fetch, priority, partial(self._arrive, held))

    def _read_ahead(self, held: Swapped) -> None:
        """Begins to read what was packed before a tensor, as far as the buffers go."""
        alive = [x for ref in self._stack if (x := ref()) is not None]
        before = alive[: alive.index(held)] if held in alive else []
        for earlier in reversed(before):
            size = len(earlier.slots) * SLOT_BYTES
            ready = sum(len(x.slots) * SLOT_BYTES for x in before if x.buffer is not None)
            if ready + size > self.buffer_bytes:
                return
            self._begin_read(earlier, Priority.READAHEAD)

    def _release(self, slots: list[int]) -> None:
        with self._changed:
            for slot in slots:
                self._file.drop(slot)

    def _wait_for(self, is_done: Callable[[], bool], size: int) -> None:
        # a tensor larger than the buffers goes alone
        while self._failure is None and not is_done() and not (size and not self._writing_bytes):
            self._changed.wait()
        if self._failure is not None:
            raise self._failure
