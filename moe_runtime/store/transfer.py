"""Reads in flight: a priority queue of blocks, served by a few threads.

A read is cut into blocks so that several threads share it and a demand overtakes a read-ahead
between two blocks instead of waiting for a whole expert.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

from moe_runtime.errors import MoERuntimeError

Block = Callable[[], int]
"""Moves one block and returns its number of bytes; raises ``MoERuntimeError`` when it cannot."""


OnDone = Callable[["Read"], None]
"""Called once when a read has ended, from a reading thread or by whoever looks next."""


class Changes(Protocol):
    """What guards the books of those who submit reads and wakes who waits for a change.

    ``threading.Condition`` is one.
    """

    def __enter__(self) -> bool: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    def wait(self) -> object:
        """Lets go of the lock until something has changed; it may return without a reason."""
        ...

    def notify_all(self) -> None:
        """Wakes all who wait; called with the lock held."""
        ...


class Priority(IntEnum):
    """Order of service; smaller goes first."""

    DEMAND = 0
    READAHEAD = 1


class Read:
    """One expert on its way into a slot.

    Attributes:
        priority: what the blocks that are still waiting are served as.
        num_bytes: bytes moved so far.
        error: why the read failed, if it did.
        ended_s: when it ended, as ``time.perf_counter`` has it; 0 before.
    """

    __slots__ = ("_on_done", "ended_s", "error", "num_bytes", "priority")

    def __init__(self, priority: Priority, on_done: OnDone) -> None:
        self.priority = priority
        self.num_bytes = 0
        self.error: MoERuntimeError | None = None
        self.ended_s = 0.0
        self._on_done = on_done

    def end(self, ago_s: float = 0.0) -> None:
        """Tells who submitted it that it has ended, some seconds ago."""
        self.ended_s = time.perf_counter() - ago_s
        self._on_done(self)


class _BlockRead(Read):
    """A read by blocks that the threads of the interpreter move."""

    __slots__ = ("blocks", "num_blocks", "unfinished")

    def __init__(self, blocks: Sequence[Block], priority: Priority, on_done: OnDone) -> None:
        super().__init__(priority, on_done)
        self.blocks = list(blocks)
        self.num_blocks = self.unfinished = len(self.blocks)


class ReadQueue:
    """Threads that serve the blocks of submitted reads, demands first, in order of submission."""

    def __init__(self, num_threads: int) -> None:
        """Starts the threads.

        Raises:
            ValueError: there would be no thread.
        """
        if num_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {num_threads}")
        self._work: list[tuple[int, int, _BlockRead]] = []
        self._ticket = itertools.count()
        self._ready = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"moe-read-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, blocks: Sequence[Block], priority: Priority, on_done: OnDone) -> Read:
        """Queues a read. ``on_done`` is called once, from a reading thread, when it ended."""
        read = _BlockRead(blocks, priority, on_done)
        with self._ready:
            self._push(read, len(blocks))
        return read

    def promote(self, read: Read) -> None:
        """Serves what is left of a read-ahead as a demand from now on."""
        assert isinstance(read, _BlockRead)
        with self._ready:
            if read.priority is not Priority.DEMAND:
                read.priority = Priority.DEMAND
                self._push(read, len(read.blocks))

    def cancel(self, read: Read) -> bool:
        """Takes back a read of which no block has been begun; its ``on_done`` is never called.

        Returns:
            Whether it was taken back. A read under way is finished: its slot is being written to.
        """
        assert isinstance(read, _BlockRead)
        with self._ready:
            if len(read.blocks) < read.num_blocks:
                return False
            read.blocks.clear()
            return True

    def close(self) -> None:
        """Drops what waits, lets the blocks that are being moved finish, and ends the threads."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _push(self, read: _BlockRead, num_blocks: int) -> None:
        for _ in range(num_blocks):
            heapq.heappush(self._work, (read.priority, next(self._ticket), read))
        self._ready.notify(num_blocks)

    def _serve(self) -> None:
        while True:
            with self._ready:
                while not self._work and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                read = heapq.heappop(self._work)[2]
                # A promoted read stands in the queue twice; its second tickets find nothing to do.
                block = read.blocks.pop(0) if read.blocks else None
            if block is not None:
                self._move(read, block)

    def _move(self, read: _BlockRead, block: Block) -> None:
        moved, error = 0, None
        try:
            moved = block()
        except MoERuntimeError as failure:
            error = failure
        with self._ready:
            read.num_bytes += moved
            read.error = read.error or error
            read.unfinished -= 1
            done = read.unfinished == 0
        if done:
            read.end()
