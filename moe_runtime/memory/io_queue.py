"""Reads in flight: a priority queue of blocks, served by a few threads.

A read is cut into blocks so that several threads share it and a demand overtakes a read-ahead
between two blocks instead of waiting for a whole expert.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.changes import Changes

Block = Callable[[], int]
"""Moves one block and returns its number of bytes; what it raises becomes the error of its read."""

OnDone = Callable[["Read"], None]
"""Called when a read has ended, from a reading thread or by whoever looks next. Once, unless an
exception struck while it was called."""

CLOSED = "the model's experts were closed; load it again"


class Priority(IntEnum):
    """Order of service; smaller goes first."""

    DEMAND = 0
    READAHEAD = 1


class Read:
    """One expert on its way into a slot.

    Attributes:
        priority: what the blocks that are still waiting are served as.
        passes: the expert is wanted once (a prompt): a tier on its way need not keep it.
        num_bytes: bytes moved so far.
        error: why the read failed, if it did.
        ended_s: when it ended, as ``time.perf_counter`` has it; 0 before.
        name: a number that the queue gives it.
    """

    __slots__ = ("_on_done", "ended_s", "error", "name", "num_bytes", "passes", "priority")

    def __init__(self, priority: Priority, on_done: OnDone, *, passes: bool = False) -> None:
        self.priority = priority
        self.passes = passes
        self.num_bytes = 0
        self.error: MoERuntimeError | None = None
        self.ended_s = 0.0
        self.name = 0
        self._on_done = on_done

    def end(self, ago_s: float = 0.0) -> None:
        """Tells who submitted it that it has ended, some seconds ago."""
        self.ended_s = time.perf_counter() - ago_s
        self._on_done(self)

    def refuse(self) -> None:
        """Ends it without its data, because the threads that would have read it are gone."""
        self.error = self.error or MoERuntimeError(CLOSED)
        self.end()


@dataclass(slots=True, eq=False)
class _Work:
    """What is left of a read."""

    blocks: deque[Block]  # not begun
    num_blocks: int
    unfinished: int


class ReadQueue:
    """Threads that serve the blocks of submitted reads, demands first, in order of submission."""

    def __init__(self, num_threads: int, *, num_for_demands: int = 0) -> None:
        """Starts the threads, and more of them that serve demands alone.

        Raises:
            ValueError: there would be no thread.
        """
        if num_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {num_threads}")
        self._works: dict[Read, _Work] = {}
        self._tickets: list[tuple[int, int, Read]] = []
        self._number = itertools.count()
        self._changed = Changes()
        self._changed.mend = self._mend
        self._closed = False
        served = [Priority.READAHEAD] * num_threads + [Priority.DEMAND] * num_for_demands
        self._threads = [
            threading.Thread(target=self._serve, args=(last,), name=f"moe-read-{i}", daemon=True)
            for i, last in enumerate(served)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, blocks: Sequence[Block], read: Read, *, wakes: bool = True) -> None:
        """Queues a read, whose end is told from a thread; one that is not woken looks by itself.

        Raises:
            MoERuntimeError: the queue was closed.
        """
        with self._changed:
            if self._closed:
                raise MoERuntimeError(CLOSED)
            waiting = deque(blocks or [_move_nothing])
            self._works[read] = _Work(waiting, len(waiting), len(waiting))
            self._push(read, len(waiting), wakes=wakes)

    def promote(self, read: Read) -> None:
        """Serves what is left of a read-ahead as a demand from now on."""
        with self._changed:
            if read.priority is not Priority.DEMAND:
                read.priority = Priority.DEMAND
                work = self._works.get(read)
                self._push(read, len(work.blocks) if work else 0)

    def cancel(self, read: Read) -> bool:
        """Takes back a read of which no block has been begun; its end is never told.

        Returns:
            Whether it was taken back. A read under way is finished: its slot is being written to.
        """
        with self._changed:
            work = self._works.get(read)
            if work is None or len(work.blocks) < work.num_blocks:
                return False
            del self._works[read]
            return True

    def is_under_way(self, read: Read) -> bool:
        """Whether a read was submitted and its end is still to be told."""
        with self._changed:
            return read in self._works

    def let_go(self) -> None:
        """Gives up what an exception left to this thread."""
        self._changed.let_go()

    def close(self) -> None:
        """Lets the blocks that are being moved finish, and ends the threads and what waits.

        In a forked child there is nothing to end.
        """
        if self._changed.is_forked:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for read in list(self._works):
            read.refuse()
            self._works.pop(read)

    def _push(self, read: Read, num_blocks: int, *, wakes: bool = True) -> None:
        for _ in range(num_blocks):
            heapq.heappush(self._tickets, (read.priority, next(self._number), read))
        told, is_demand = self._changed._told, read.priority is Priority.DEMAND
        if wakes:  # not all serve read-aheads
            told.notify(num_blocks) if is_demand else told.notify_all()

    def _mend(self) -> None:
        """A ticket for every block that waits, in the order in which the reads were submitted."""
        self._tickets.clear()
        for read, work in self._works.items():
            self._push(read, len(work.blocks))

    def _serve(self, last: Priority) -> None:
        hands, reported = _Hands(), _Reported()
        while not self._closed:
            with reported:
                if hands.found is None:
                    self._take(hands, last)
                if hands.found is not None:
                    self._move(hands, *hands.found)
            with reported:
                self._tell(hands, reported)
            if reported.has_struck:
                reported.has_struck = False
                with reported:
                    self._changed.let_go()

    def _take(self, hands: _Hands, last: Priority) -> None:
        """Takes the next block that it serves, or waits; not for long if it has ends to tell."""
        with self._changed:
            while not self._closed:
                while self._tickets and self._tickets[0][0] <= last:
                    read = heapq.heappop(self._tickets)[2]
                    # A promoted read has tickets twice; the second ones find nothing to do.
                    work = self._works.get(read)
                    if work is not None and work.blocks:
                        hands.found = read, work, work.blocks.popleft()
                        return
                self._changed.wait()
                if hands.untold:
                    return

    def _move(self, hands: _Hands, read: Read, work: _Work, block: Block) -> None:
        attempt = _Attempt()
        with attempt:
            attempt.moved = block()
        with self._changed:
            moved, error = read.num_bytes + attempt.moved, read.error or attempt.error
            left = work.unfinished - 1
            untold = hands.untold if left else (*hands.untold, read)
            after = moved, error, left, None, untold
            # all or nothing of one line
            read.num_bytes, read.error, work.unfinished, hands.found, hands.untold = after

    def _tell(self, hands: _Hands, reported: _Reported) -> None:
        """Tells of the ends that a thread knows of; what an exception prevents is for next time."""
        for read in hands.untold:
            with reported:
                read.end()
                self._works.pop(read, None)
                hands.untold = tuple(other for other in hands.untold if other is not read)


def _move_nothing() -> int:
    return 0


class _Hands:
    """What a reading thread has begun: an exception on any line must not lose it.

    Attributes:
        found: the block that it moves; once more if an exception struck outside of the block.
        untold: reads of which it moved the last block, until who submitted them was told.
    """

    found: tuple[Read, _Work, Block] | None = None
    untold: tuple[Read, ...] = ()


class _Attempt:
    """Keeps whatever a block raises: it is the error of a read, not the end of a thread."""

    moved = 0
    error: MoERuntimeError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, MoERuntimeError):
            self.error = error
        elif error is not None:
            reason = str(error) or "no reason given"
            self.error = MoERuntimeError(
                f"a read failed with {type(error).__name__}: {reason.splitlines()[0]}"
            )
            self.error.__cause__ = error
        return True


class _Reported:
    """Reports what is raised as the end of a thread would, but lets the thread go on."""

    has_struck = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None:
            self.has_struck = True
            thread = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, thread)))
        return True
