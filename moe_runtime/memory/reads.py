"""Reads: the lock of the state they change, the queues that serve them, and their throughput.

A read consists of blocks: several threads share it, and a demand overtakes a read-ahead between two
blocks. C threads read files if the native library is there, Python threads otherwise.
"""

from __future__ import annotations

import ctypes
import heapq
import importlib
import itertools
import os
import signal
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

from moe_runtime.errors import CLOSED, FORKED, CapacityError, MoERuntimeError
from moe_runtime.kernels.native import NativeLibrary
from moe_runtime.types import ExpertKey

PATIENCE_S = 1.0
"""Longest wait: then a thread looks for reads that were queued without waking it."""
INTERRUPT_S = 0.1
"""The main thread looks for Ctrl-C this often while it waits."""

_MAIN_THREAD = threading.main_thread().ident
# `signal` wraps results in enumerations, which takes ten times as long
_get_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal

_MONITORS: weakref.WeakSet[Monitor] = weakref.WeakSet()
"""All monitors, for one handler of forks: Python never removes such a handler."""


class Monitor:
    """The lock around state that reading and computing threads share, and its condition.

    The block of a ``with`` statement is an operation. Ctrl-C is deferred to its end. After any
    other exception the next operation first calls ``reset``, with the lock held.

    Attributes:
        reset: makes the state consistent; set by its owner.
        events: number of events without the lock; an operation first delivers them.
        seen: number of delivered events.
        has_unstarted: submitted reads wait for the end of the operation.
        may_be_interrupted: an exception may leave the operation now without a reset.
        is_forked: the state belongs to the parent of this process.
    """

    def __init__(self, reset: Callable[[], None] | None = None) -> None:
        self.reset = reset or (lambda: None)
        self.events = ctypes.c_int64()
        self.seen = 0
        self.has_unstarted = False
        self.may_be_interrupted = True
        self.is_forked = False
        self._is_torn = False
        self._depth = 0
        self._before: Any = None  # the handler of Ctrl-C while the main thread is in an operation
        self._is_interrupted = False
        self._make_lock()
        _MONITORS.add(self)

    def __enter__(self) -> Monitor:
        if self.is_forked:
            raise MoERuntimeError(FORKED)
        lock = self._lock
        if lock._is_owned():  # nested
            lock.acquire()
            self._depth += 1
            return self
        if threading.get_ident() == _MAIN_THREAD:
            before = _get_handler(signal.SIGINT)
            self._before = before if callable(before) else None
            if self._before is not None:
                _set_handler(signal.SIGINT, self._note)
        lock.acquire()
        self._depth, self.may_be_interrupted = 1, False
        if self._is_torn or self.events.value != self.seen:
            self._catch_up()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        if kind is not None and not self.may_be_interrupted:
            self._is_torn = True
        if self._depth > 1:
            self._depth -= 1
            self._lock.release()
            return
        if self.has_unstarted:
            self.start()
        self._depth, self.may_be_interrupted = 0, True
        self._lock.release()
        if threading.get_ident() == _MAIN_THREAD and self._before is not None:
            before, self._before = self._before, None
            _set_handler(signal.SIGINT, before)
            if self._is_interrupted:
                self._is_interrupted = False
                before(signal.SIGINT, None)

    def wait(self) -> None:
        """Releases the lock until the state may have changed. Ctrl-C may leave the operation here,
        so the state must be consistent."""
        depth, self.may_be_interrupted = self._depth, True
        self.sleep()
        self._depth = depth
        if threading.get_ident() == _MAIN_THREAD and self._is_interrupted:
            self._is_interrupted = False
            self._before(signal.SIGINT, None)
        self.may_be_interrupted = False
        if self._is_torn or self.events.value != self.seen:
            self._catch_up(is_entering=False)

    def notify_all(self) -> None:
        """Wakes all waiters; called with the lock held."""
        self._condition.notify_all()

    def deliver(self) -> None:
        """Handles the events since ``seen``; called with the lock held."""
        self.seen = self.events.value

    def start(self) -> None:
        """Starts the reads that the operation submitted."""
        self.has_unstarted = False

    def sleep(self) -> None:
        """Waits without the lock and takes it again."""
        is_main = threading.get_ident() == _MAIN_THREAD
        self._condition.wait(INTERRUPT_S if is_main else PATIENCE_S)

    def leave_to_parent(self) -> None:
        """Called in a fork, which has neither reading threads nor lock holders."""
        self._make_lock()
        self.is_forked = True

    def _make_lock(self) -> None:
        self._lock: Any = threading.RLock()
        self._condition = threading.Condition(self._lock)

    def _catch_up(self, *, is_entering: bool = True) -> None:
        """Resets torn state, and delivers events."""
        try:
            if self._is_torn:
                self.reset()
                self._is_torn = False
            if self.events.value != self.seen:
                self.deliver()
        except BaseException:
            if is_entering:
                self.__exit__(MoERuntimeError, None, None)
            raise

    def _note(self, *_: object) -> None:
        self._is_interrupted = True


def _leave_all_to_parent() -> None:
    for monitor in tuple(_MONITORS):
        monitor.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


Block = Callable[[], int]
"""Moves one block and returns its bytes; its exception becomes the error of the read."""

OnDone = Callable[["Transfer"], None]
"""Called once when a read has ended, by a reading thread or in an operation of the store."""


class Priority(IntEnum):
    """Order of service; smaller goes first."""

    DEMAND = 0
    READAHEAD = 1


class Transfer:
    """One expert on its way into a slot.

    Attributes:
        priority: of the waiting blocks.
        passes: the expert is used once: the tiers below need not keep it.
        num_bytes: moved so far.
        ended_s: its end by ``time.perf_counter``; 0 before.
        number: its number in the native queue.
    """

    __slots__ = ("_on_done", "ended_s", "error", "num_bytes", "number", "passes", "priority")

    def __init__(self, priority: Priority, on_done: OnDone, *, passes: bool = False) -> None:
        self.priority = priority
        self.passes = passes
        self.num_bytes = 0
        self.error: MoERuntimeError | None = None
        self.ended_s = 0.0
        self.number = 0
        self._on_done = on_done

    def end(self, ago_s: float = 0.0) -> None:
        """Announces its end, which was some seconds ago."""
        self.ended_s = time.perf_counter() - ago_s
        self._on_done(self)

    def refuse(self) -> None:
        """Ends it without data: the queue is closed."""
        self.error = self.error or MoERuntimeError(CLOSED)
        self.end()


@dataclass(slots=True, eq=False)
class _Work:
    """The rest of a read."""

    blocks: deque[Block]  # not begun
    num_blocks: int
    unfinished: int


class ReadQueue:
    """Threads that serve blocks of reads: demands first, then in order of submission."""

    def __init__(self, num_threads: int, *, num_for_demands: int = 0) -> None:
        """Starts the threads, and ``num_for_demands`` more that serve demands alone."""
        if num_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {num_threads}")
        self._works: dict[Transfer, _Work] = {}
        self._tickets: list[tuple[int, int, Transfer]] = []
        self._number = itertools.count()
        self._monitor = Monitor(self._reset)
        self._closed = False
        served = [Priority.READAHEAD] * num_threads + [Priority.DEMAND] * num_for_demands
        self._threads = [
            threading.Thread(target=self._serve, args=(last,), name=f"moe-read-{i}", daemon=True)
            for i, last in enumerate(served)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, blocks: Sequence[Block], read: Transfer, *, wakes: bool = True) -> None:
        """Queues a read; without ``wakes`` it begins after ``wake`` or within `PATIENCE_S`. Raises
        MoERuntimeError: the queue is closed."""
        if self._closed:
            raise MoERuntimeError(CLOSED)
        with self._monitor:
            waiting = deque(blocks or [int])
            self._works[read] = _Work(waiting, len(waiting), len(waiting))
            self._push(read, len(waiting), wakes=wakes)

    def wake(self) -> None:
        """Wakes the threads for reads that were submitted without ``wakes``."""
        with self._monitor:
            self._monitor.notify_all()

    def promote(self, read: Transfer) -> None:
        """Serves the rest of a read-ahead as a demand."""
        with self._monitor:
            if read.priority is not Priority.DEMAND:
                read.priority = Priority.DEMAND
                work = self._works.get(read)
                self._push(read, len(work.blocks) if work else 0)

    def cancel(self, read: Transfer) -> bool:
        """Cancels a read if no block of it has begun; its end is then never announced. Returns
        whether it was cancelled."""
        with self._monitor:
            work = self._works.get(read)
            if work is None or len(work.blocks) < work.num_blocks:
                return False
            del self._works[read]
            return True

    def is_under_way(self, read: Transfer) -> bool:
        """Whether the end of a submitted read is still to be announced."""
        with self._monitor:
            return read in self._works

    def close(self) -> None:
        """Waits for running blocks, ends the threads and refuses waiting reads; nothing in a
        fork."""
        if self._monitor.is_forked:
            return
        with self._monitor:
            self._closed = True
            self._monitor.notify_all()
        for thread in self._threads:
            thread.join()
        for read in list(self._works):
            read.refuse()
            self._works.pop(read)

    def _push(self, read: Transfer, num_blocks: int, *, wakes: bool = True) -> None:
        for _ in range(num_blocks):
            heapq.heappush(self._tickets, (read.priority, next(self._number), read))
        condition, is_demand = self._monitor._condition, read.priority is Priority.DEMAND
        if wakes:  # some threads serve no read-aheads
            condition.notify(num_blocks) if is_demand else condition.notify_all()

    def _reset(self) -> None:
        """A ticket for every waiting block, in the order of submission."""
        self._tickets.clear()
        for read, work in self._works.items():
            self._push(read, len(work.blocks))

    def _serve(self, last: Priority) -> None:
        while not self._closed:
            with _Caught(is_reported=True):
                if (found := self._take(last)) is not None:
                    self._move(*found)
                del found  # a waiting thread must hold no slot

    def _take(self, last: Priority) -> tuple[Transfer, _Work, Block] | None:
        """Waits for the next block; None once the queue is closed."""
        with self._monitor:
            while not self._closed:
                while self._tickets and self._tickets[0][0] <= last:
                    read = heapq.heappop(self._tickets)[2]
                    # a promoted read has two tickets for each block; the later ones find none
                    work = self._works.get(read)
                    if work is not None and work.blocks:
                        return read, work, work.blocks.popleft()
                self._monitor.wait()
        return None

    def _move(self, read: Transfer, work: _Work, block: Block) -> None:
        moved, caught = 0, _Caught(is_reported=False)
        with caught:
            moved = block()
        with self._monitor:
            read.num_bytes += moved
            read.error = read.error or caught.error()
            work.unfinished -= 1
            has_ended = work.unfinished == 0
        if has_ended:
            for _ in range(2):  # a failure resets the store; then it is announced again
                with _Caught(is_reported=True):
                    read.end()
                    break
            self._works.pop(read, None)


class _Caught:
    """Keeps or reports an exception of its block; the reading thread goes on."""

    def __init__(self, *, is_reported: bool) -> None:
        self._is_reported = is_reported
        self._failure: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> bool:
        if self._is_reported and kind is not None:
            found = (kind, failure, trace, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(found))
        self._failure = failure
        return True

    def error(self) -> MoERuntimeError | None:
        """The exception as the error of a read."""
        failure = self._failure
        if failure is None or isinstance(failure, MoERuntimeError):
            return failure
        reason = (str(failure) or "no reason given").splitlines()[0]
        error = MoERuntimeError(f"a read failed with {type(failure).__name__}: {reason}")
        error.__cause__ = failure
        return error


_BLOCK, _STEP = struct.Struct("5q"), struct.Struct("7q")
_FIELDS = 6
_ROOM = 64
_FILE_ENDED = -1

ReadJudge = Callable[[int, OSError | EOFError | None], MoERuntimeError | None]
"""The error of an ended read, or None, given the number of the failed block and the reason."""


def pack_blocks(blocks: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """Blocks for ``reads.c``: descriptor, file offset, place in the slot, bytes, needed bytes."""
    return b"".join(_BLOCK.pack(*block) for block in blocks)


def pack_reorderings(steps: Iterable[tuple[int, ...]]) -> bytes:
    """Reorderings for ``reads.c``: numbers of ``StorageOrder.step``."""
    return b"".join(_STEP.pack(*step) for step in steps)


class NativeReadQueue(Monitor):
    """``ReadQueue`` for files, with C threads, and its own monitor.

    Every method is called with its lock held. Submitted reads begin together when the operation
    ends: waking a thread takes a tenth of a small read. The next operation of any thread delivers
    ended reads; a read wakes waiting threads.
    """

    def __init__(self, library: NativeLibrary, num_threads: int, keeps: object = None) -> None:
        """Starts the threads; ``keeps`` lives until they end: their files. Raises ValueError for
        less than one thread, and CapacityError if the system gives no thread."""
        if num_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {num_threads}")
        queue = library.reads_open(num_threads)
        if not queue:
            raise CapacityError(f"cannot start {num_threads} reading threads")
        super().__init__()
        self._library = library
        self._queue: int | None = queue
        # slots must not be freed before the threads have ended
        self._close = weakref.finalize(self, _close_queue, library, queue, keeps)
        self._close.atexit = False
        self._numbers = itertools.count(1)
        self._running: dict[int, tuple[Transfer, ReadJudge]] = {}
        self._ended = (ctypes.c_int64 * (_FIELDS * _ROOM))()
        self._sleepers = 0
        self.events = ctypes.c_int64.from_address(library.reads_events(queue))

    def submit(
        self, blocks: bytes, address: int, read: Transfer, judge: ReadJudge, steps: bytes = b""
    ) -> None:
        """Queues a read.

        Args:
            blocks: made by ``pack_blocks``.
            address: of the slot, which must stay where it is until the read has ended.
            judge: gives the error of the ended read, if it has one.
            steps: made by ``pack_reorderings``.
        """
        if self._queue is None:
            raise MoERuntimeError(CLOSED)
        num_blocks, num_steps = len(blocks) // _BLOCK.size, len(steps) // _STEP.size
        is_ahead = read.priority is not Priority.DEMAND
        read.number = next(self._numbers)
        # first: no unknown read may be under way
        self._running[read.number] = read, judge
        self.has_unstarted = True
        if not self._library.reads_submit(
            self._queue, read.number, blocks, num_blocks, steps, num_steps, address, is_ahead
        ):
            del self._running[read.number]
            raise MemoryError("no memory to queue a read")

    def start(self) -> None:
        if self.has_unstarted and self._queue is not None:
            self._library.reads_start(self._queue)
        self.has_unstarted = False

    def promote(self, read: Transfer) -> None:
        if read.priority is not Priority.DEMAND:
            if self._queue is not None:
                self._library.reads_promote(self._queue, read.number)
            read.priority = Priority.DEMAND

    def cancel(self, read: Transfer) -> bool:
        if self._queue is None or not self._library.reads_cancel(self._queue, read.number):
            return False
        self._running.pop(read.number, None)
        return True

    def is_under_way(self, read: Transfer) -> bool:
        return read.number in self._running

    def close(self) -> None:
        if self.is_forked:
            return
        with self:
            if self._queue is not None:
                self._library.reads_stop(self._queue)
                self.deliver()
            self._queue = None
            self.events = ctypes.c_int64(self.seen)
            for number, (read, _) in list(self._running.items()):
                read.refuse()
                self._running.pop(number, None)
        if not self._sleepers:  # else the last of them to wake up gives the memory back
            self._close()

    def deliver(self) -> None:
        """Announces ended reads; a read whose announcement failed is announced again."""
        assert self._queue is not None
        seen, number = self.events.value, _ROOM
        while number == _ROOM:
            number = self._library.reads_ended(self._queue, self._ended, _ROOM)
            for first in range(0, number * _FIELDS, _FIELDS):
                self._end(*self._ended[first : first + _FIELDS])
            if number:
                self._library.reads_forget(self._queue, number)
        self.seen = seen

    def sleep(self) -> None:
        """Waits without the lock for an event after ``deliver``; MoERuntimeError once closed."""
        queue, seen = self._queue, self.seen
        self.start()
        if queue is None:
            raise MoERuntimeError(CLOSED)
        self._sleepers += 1
        state = self._lock._release_save()
        try:
            self._library.reads_wait(queue, seen)
        finally:
            self._lock._acquire_restore(state)
            self._sleepers -= 1

    def notify_all(self) -> None:
        if self._sleepers and self._queue is not None:
            self._library.reads_kick(self._queue)

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._close.detach()
        self.events = ctypes.c_int64(self.seen)
        self._queue = None

    def _end(
        self, number: int, num_bytes: int, error: int, block: int, offset: int, age_ns: int
    ) -> None:
        found = self._running.get(number)
        if found is None:  # announced before an exception cut the delivery short
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
        self._running.pop(number, None)


def _close_queue(library: NativeLibrary, queue: int, _keeps: object) -> None:
    """Ends the threads before their files are given up."""
    library.reads_close(queue)


FORGET = 0.98
"""Decay of older transfers at each new one: about the last fifty count."""


class LinkMeter:
    """Running mean of throughput, over the time in which transfers were under way.

    Attributes:
        under_way: transfers that have not ended.
        on_other_link: transfers among these that use another link.
    """

    def __init__(self) -> None:
        self.under_way = self.on_other_link = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0
        self._demands = 0
        self._demands_since_s = 0.0
        self._demand_s = 0.0

    def seconds_for(self, num_bytes: int) -> float:
        """Seconds of a transfer on an idle link; 0 before the first transfer ended."""
        return num_bytes * self._busy_s / self._bytes if self._bytes > 0 else 0.0

    @property
    def demand_s(self) -> float:
        """Seconds so far in which a demand was under way."""
        running_s = time.perf_counter() - self._demands_since_s if self._demands else 0.0
        return self._demand_s + running_s

    def begin(self, *, is_demand: bool) -> None:
        if self.under_way == self.on_other_link:
            self._since_s = time.perf_counter()
        self.under_way += 1
        if is_demand:
            self.begin_demand()

    def begin_demand(self) -> None:
        """A read-ahead that is under way becomes a demand."""
        if self._demands == 0:
            self._demands_since_s = time.perf_counter()
        self._demands += 1

    def end(self, num_bytes: int, *, is_demand: bool, now_s: float) -> None:
        """A transfer ended, or was cancelled (0 bytes)."""
        self.under_way -= 1
        if is_demand:
            self._demands -= 1
            if self._demands == 0:
                self._demand_s += max(0.0, now_s - self._demands_since_s)
        if num_bytes:
            self._busy_s = FORGET * self._busy_s + max(0.0, now_s - self._since_s)
            self._bytes = FORGET * self._bytes + num_bytes
            self._since_s = now_s

    def recount(self, under_way: int, demands: int) -> None:
        """Sets the numbers of transfers and demands that are under way."""
        now_s = time.perf_counter()
        self._demand_s = self.demand_s
        self.under_way, self._demands = under_way, demands
        self._since_s = self._demands_since_s = now_s


class Fetcher(Protocol):
    """Fills the slots of a tier, from files or from the tier below. All but ``close`` is called
    with ``monitor`` held, which guards the entries of that tier."""

    monitor: Monitor

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        """Starts to fill a slot; the end of the read is announced later."""
        ...

    # as of ``ReadQueue``
    def promote(self, key: ExpertKey, read: Transfer) -> None: ...
    def cancel(self, read: Transfer) -> bool: ...
    def is_under_way(self, read: Transfer) -> bool: ...
    def close(self) -> None: ...
