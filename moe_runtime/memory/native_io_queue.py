"""Reads served by threads that need no interpreter, and the lock of a store that is filled by them.

What ended is not announced by another thread: whoever takes the store's lock next finds it. So a
computing thread is interrupted by nothing, and one that waits is woken by the read itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence

from moe_runtime.errors import CapacityError, MoERuntimeError
from moe_runtime.kernels.native.library import NativeLibrary
from moe_runtime.memory.changes import Changes
from moe_runtime.memory.io_queue import CLOSED, Priority, Read

_BLOCK, _STEP = struct.Struct("5q"), struct.Struct("7q")
_FIELDS = 6
_ROOM = 64
_FILE_ENDED = -1

ReadEnd = Callable[[int, OSError | EOFError | None], MoERuntimeError | None]
"""The error of a read that has ended, or None: number of the block that failed, and why it did."""


def pack_blocks(blocks: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """The blocks of a read as ``reads.c`` takes them.

    Args:
        blocks: for each the file descriptor, the offset in the file, the place in the slot, the
            bytes to read and how many of them must arrive.
    """
    return b"".join(_BLOCK.pack(*block) for block in blocks)


def pack_steps(steps: Iterable[tuple[int, ...]]) -> bytes:
    """What puts a read in order, as ``reads.c`` takes it: numbers of ``StorageOrder.step``."""
    return b"".join(_STEP.pack(*step) for step in steps)


class NativeReadQueue:
    """``ReadQueue`` for reads of files: the same order of service, by threads of ``reads.c``.

    What is submitted begins when ``changed`` is let go of, all of it at once: waking a thread takes
    a tenth of the time of a small read. A read is told of its end, with ``changed`` held, by a
    thread that takes ``changed`` after the read has ended.

    Attributes:
        changed: the lock of whoever submits; every method is called with it held.
    """

    def __init__(self, library: NativeLibrary, num_threads: int, keeps: object = None) -> None:
        """Starts the threads.

        Args:
            library: whose threads.
            num_threads: how many reads are served at once.
            keeps: what must live until the threads have ended: the files that they read.

        Raises:
            ValueError: there would be no thread.
            CapacityError: the system gives no thread.
        """
        if num_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {num_threads}")
        queue = library.reads_open(num_threads)
        if not queue:
            raise CapacityError(f"cannot start {num_threads} reading threads")
        self._library = library
        self._queue: int | None = queue
        # what the threads write into must not be given back before they have ended
        self._close = weakref.finalize(self, _close_queue, library, queue, keeps)
        self._close.atexit = False
        self._names = itertools.count(1)
        self._running: dict[int, tuple[Read, ReadEnd]] = {}
        self._ended = (ctypes.c_int64 * (_FIELDS * _ROOM))()
        self.changed = _Delivery(self)
        self.changed.events = ctypes.c_int64.from_address(library.reads_events(queue))

    def submit(
        self, blocks: bytes, address: int, read: Read, judge: ReadEnd, steps: bytes = b""
    ) -> None:
        """Queues a read.

        Args:
            blocks: made by ``pack_blocks``.
            address: of the slot, which must stay where it is until the read has ended.
            read: told when it has ended.
            judge: gives the error of the read when it has ended, if it has one.
            steps: made by ``pack_steps``: what is done before the read ends.

        Raises:
            MoERuntimeError: the queue was closed.
        """
        if self._queue is None:
            raise MoERuntimeError(CLOSED)
        count = len(steps) // _STEP.size
        number, is_ahead = len(blocks) // _BLOCK.size, read.priority is not Priority.DEMAND
        read.name = next(self._names)
        self._running[read.name] = (read, judge)  # first: no read may be under way that is unknown
        self.changed.has_new = True
        if not self._library.reads_submit(
            self._queue, read.name, blocks, number, steps, count, address, is_ahead
        ):
            raise MemoryError("no memory to queue a read")

    def start(self) -> None:
        """Has the threads serve what was submitted, if anything was since the last call."""
        if self.changed.has_new and self._queue is not None:
            self._library.reads_start(self._queue)
        self.changed.has_new = False

    def promote(self, read: Read) -> None:
        """Serves what is left of a read-ahead as a demand from now on."""
        if read.priority is not Priority.DEMAND:
            if self._queue is not None:
                self._library.reads_promote(self._queue, read.name)
            read.priority = Priority.DEMAND

    def cancel(self, read: Read) -> bool:
        """Takes back a read of which no block has been begun; its end is never told.

        Returns:
            Whether it was taken back. A read under way is finished: its slot is being written to.
        """
        if self._queue is None or not self._library.reads_cancel(self._queue, read.name):
            return False
        self._running.pop(read.name, None)
        return True

    def is_under_way(self, read: Read) -> bool:
        """Whether a read was submitted and its end is still to be told."""
        return read.name in self._running

    def close(self) -> None:
        """Lets the blocks that are being moved finish, and ends the threads and what waits.

        In a forked child there is nothing to end.
        """
        if self.changed.is_forked:
            return
        with self.changed:
            if self._queue is not None:
                self._library.reads_stop(self._queue)
                self.deliver()
            self._queue = None
            self.changed.events = ctypes.c_int64(self.changed.seen)
            for name, (read, _) in list(self._running.items()):
                read.refuse()
                self._running.pop(name, None)
        if not self.changed.has_sleepers:  # else whoever wakes up last gives the memory back
            self._close()

    def deliver(self) -> None:
        """Tells those who submitted them of the reads that have ended."""
        self.changed.seen = self.changed.events.value
        number = _ROOM
        while number == _ROOM:
            number = self._library.reads_ended(self._queue, self._ended, _ROOM)
            for first in range(0, number * _FIELDS, _FIELDS):
                self._end(*self._ended[first : first + _FIELDS])
            if number:
                self._library.reads_forget(self._queue, number)

    def mend(self) -> None:
        """After an exception cut something short: what ended is told of again, and what never
        reached the threads is not under way."""
        if self._queue is None:
            return
        self.changed.has_new = True
        self.changed.seen = self.changed.events.value - 1
        unknown = [n for n in self._running if not self._library.reads_knows(self._queue, n)]
        for name in unknown:
            self._running.pop(name, None)

    def sleep(self, release: Callable[[], None]) -> None:
        """Waits for something to happen after ``deliver``.

        Args:
            release: lets go of the lock; called before falling asleep.

        Raises:
            MoERuntimeError: nothing will happen any more.
        """
        queue, seen = self._queue, self.changed.seen
        self.start()
        if queue is None:
            raise MoERuntimeError(CLOSED)
        release()
        self._library.reads_wait(queue, seen)

    def kick(self) -> None:
        """Wakes those who sleep; closing has woken them already."""
        if self._queue is not None:
            self._library.reads_kick(self._queue)

    def leave_to_parent(self) -> None:
        """This process is a fork: the threads are the parent's, and so is their memory."""
        self._close.detach()
        self.changed.events = ctypes.c_int64(self.changed.seen)
        self._queue = None

    def _end(
        self, name: int, num_bytes: int, error: int, block: int, offset: int, age_ns: int
    ) -> None:
        found = self._running.get(name)
        if found is None:  # told of before an exception cut the delivery short
            return
        read, judge = found
        read.num_bytes = num_bytes
        reason: OSError | EOFError | None = None
        if error == _FILE_ENDED:
            reason = EOFError(f"the file ends before byte {offset}")
        elif error:
            reason = OSError(error, os.strerror(error))
        read.error = judge(block, reason)
        read.end(1e-9 * age_ns)
        self._running.pop(name, None)


def _close_queue(library: NativeLibrary, queue: int, _keeps: object) -> None:
    """Ends the threads; only then is what they read from let go of."""
    library.reads_close(queue)


class _Delivery(Changes):
    """The lock of a store: taking it, or waking from a wait, delivers what has ended."""

    def __init__(self, queue: NativeReadQueue) -> None:
        super().__init__()
        self._queue = queue
        self._sleepers = 0

    def notify_all(self) -> None:
        """Wakes all who wait."""
        if self._sleepers:
            self._queue.kick()

    @property
    def has_sleepers(self) -> bool:
        """Whether somebody waits, or is about to."""
        return self._sleepers > 0

    def leave_to_parent(self) -> None:
        """This process is a fork."""
        super().leave_to_parent()
        self._queue.leave_to_parent()

    def _deliver(self) -> None:
        self._queue.deliver()

    def _start(self) -> None:
        self._queue.start()

    def _repair(self) -> None:
        self._queue.mend()
        super()._repair()

    def _sleep(self) -> None:
        self._sleepers += 1
        try:
            self._queue.sleep(self._lock.release)
        finally:
            if not self._lock._is_owned():
                self._lock.acquire()
            self._sleepers -= 1
