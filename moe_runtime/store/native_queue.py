"""Reads served by threads that need no interpreter, and the lock of a store that is filled by them.

What ended is not announced by another thread: whoever takes the store's lock next finds it. So a
computing thread is interrupted by nothing, and one that waits is woken by the read itself.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence

from moe_runtime.errors import CapacityError, MoERuntimeError
from moe_runtime.kernels.native.library import NativeLibrary
from moe_runtime.store.transfer import Changes, OnDone, Priority, Read

_BLOCK = struct.Struct("5q")
_FIELDS = 6
_ROOM = 64
_FILE_ENDED = -1

BlockFault = Callable[[int, OSError | EOFError], MoERuntimeError]
"""Makes the error of a read of which some block failed: number of the block, reason."""


def pack_blocks(blocks: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """The blocks of a read as ``reads.c`` takes them.

    Args:
        blocks: for each the file descriptor, the offset in the file, the place in the slot, the
            bytes to read and how many of them must arrive.
    """
    return b"".join(_BLOCK.pack(*block) for block in blocks)


class NativeRead(Read):
    """One expert on its way; ``name`` is what the threads call it."""

    __slots__ = ("fault", "name")

    def __init__(self, priority: Priority, on_done: OnDone, fault: BlockFault) -> None:
        super().__init__(priority, on_done)
        self.name = 0
        self.fault = fault


class NativeReadQueue:
    """``ReadQueue`` for reads of files: the same order of service, by threads of ``reads.c``.

    What is submitted begins when ``changed`` is let go of, all of it at once: waking a thread takes
    a tenth of the time of a small read. A read's ``on_done`` is called, with ``changed`` held, by a
    thread that takes ``changed`` after the read has ended.

    Attributes:
        changed: the lock of whoever submits; every method is called with it held.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        """Starts the threads.

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
        self._close = weakref.finalize(self, library.reads_close, queue)
        self._close.atexit = False
        self._events = ctypes.c_int64.from_address(library.reads_events(queue))
        self._seen = 0
        self._has_new = False
        self._running: dict[int, NativeRead] = {}
        self._ended = (ctypes.c_int64 * (_FIELDS * _ROOM))()
        self.changed = _Delivery(self)

    def submit(
        self, blocks: bytes, address: int, priority: Priority, on_done: OnDone, fault: BlockFault
    ) -> Read:
        """Queues a read.

        Args:
            blocks: made by ``pack_blocks``.
            address: of the slot, which must stay where it is until the read has ended.
            priority: what the read is served as.
            on_done: see above.
            fault: says what went wrong if something does.
        """
        if self._queue is None:
            raise MoERuntimeError("the model's experts were closed; load it again")
        read = NativeRead(priority, on_done, fault)
        number, is_ahead = len(blocks) // _BLOCK.size, priority is not Priority.DEMAND
        read.name = self._library.reads_submit(self._queue, blocks, number, address, is_ahead)
        if not read.name:
            raise MemoryError("no memory to queue a read")
        self._running[read.name] = read
        self._has_new = True
        return read

    def start(self) -> None:
        """Has the threads serve what was submitted, if anything was since the last call."""
        if self._has_new and self._queue is not None:
            self._library.reads_start(self._queue)
        self._has_new = False

    def promote(self, read: Read) -> None:
        """Serves what is left of a read-ahead as a demand from now on."""
        if isinstance(read, NativeRead) and read.priority is not Priority.DEMAND:
            read.priority = Priority.DEMAND
            if self._running.get(read.name) is read:
                self._library.reads_promote(self._queue, read.name)

    def cancel(self, read: Read) -> bool:
        """Takes back a read of which no block has been begun; its ``on_done`` is never called.

        Returns:
            Whether it was taken back. A read under way is finished: its slot is being written to.
        """
        if not isinstance(read, NativeRead) or self._running.get(read.name) is not read:
            return False
        if not self._library.reads_cancel(self._queue, read.name):
            return False
        del self._running[read.name]
        return True

    def close(self) -> None:
        """Drops what waits, lets the blocks that are being moved finish, and ends the threads."""
        with self.changed:
            self._queue = None
            self._events = ctypes.c_int64(self._seen)
            self._running.clear()
        self._close()

    @property
    def has_news(self) -> bool:
        """Whether something happened since ``deliver``."""
        return self._events.value != self._seen

    def deliver(self) -> None:
        """Tells those who submitted them of the reads that have ended."""
        self._seen = self._events.value
        number = _ROOM
        while number == _ROOM:
            number = self._library.reads_take(self._queue, self._ended, _ROOM)
            for first in range(0, number * _FIELDS, _FIELDS):
                self._end(*self._ended[first : first + _FIELDS])

    def sleep(self, release: Callable[[], None]) -> None:
        """Waits for something to happen after ``deliver``.

        Args:
            release: lets go of the lock; called before falling asleep.

        Raises:
            MoERuntimeError: nothing will happen any more.
        """
        queue, seen = self._queue, self._seen
        self.start()
        release()
        if queue is None:
            raise MoERuntimeError("the model's experts were closed while they were waited for")
        self._library.reads_wait(queue, seen)

    def kick(self) -> None:
        """Wakes those who sleep; closing has woken them already."""
        if self._queue is not None:
            self._library.reads_kick(self._queue)

    def _end(
        self, name: int, num_bytes: int, error: int, block: int, offset: int, age_ns: int
    ) -> None:
        read = self._running.pop(name)
        read.num_bytes = num_bytes
        if error == _FILE_ENDED:
            read.error = read.fault(block, EOFError(f"the file ends at byte {offset}"))
        elif error:
            read.error = read.fault(block, OSError(error, os.strerror(error)))
        read.end(1e-9 * age_ns)


class _Delivery(Changes):
    """The condition of a store: taking it, or waking from a wait, delivers what has ended."""

    def __init__(self, queue: NativeReadQueue) -> None:
        self._queue = queue
        self._lock = threading.RLock()
        self._depth = 0
        self._sleepers = 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1 and self._queue.has_news:
            self._queue.deliver()
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._queue.start()
        self._lock.release()

    def wait(self) -> None:
        """Sleeps without the lock until something may have changed."""
        assert self._depth == 1, "a wait must let go of the lock"
        self._sleepers += 1
        self._depth = 0
        try:
            self._queue.sleep(self._lock.release)
        finally:
            self._lock.acquire()
            self._depth = 1
            self._sleepers -= 1
        if self._queue.has_news:
            self._queue.deliver()

    def notify_all(self) -> None:
        """Wakes all who wait."""
        if self._sleepers:
            self._queue.kick()
