"""The lock around state that reading and computing threads share, and what repairs that state.

An exception may strike on any line: Ctrl-C does, and so does a lack of memory. It may strike where
a lock is given back, so that no ``finally`` prevents every leak. The state is repaired instead:
whoever takes the lock next, or whoever unwinds, finds the operation that did not end.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from moe_runtime.errors import MoERuntimeError

PATIENCE_S = 1.0
"""A wait returns after this time at the latest: what the garbage collector finds wakes nobody."""

FORKED = (
    "this model was loaded before the process forked; start children with 'spawn' and load it there"
)

_OPEN: weakref.WeakSet[Changes] = weakref.WeakSet()
"""All locks of the process, for the one handler of forks: Python never takes a handler back."""


class Changes:
    """A lock that mends what it guards, and a condition to wait for.

    The block of a ``with`` statement is an operation. One that an exception cuts short leaves state
    that contradicts itself; then ``mend`` is called, with the lock held, before anybody else
    sees them. A hold that an exception left behind is noticed by the same thread's next operation,
    and given up by ``let_go``.

    ``with`` yields whether the operation is a thread's own: False inside of another one, as in what
    the garbage collector or a signal handler calls.

    Attributes:
        mend: makes the state whole from what an exception cannot have touched; set by their owner.
        events: counts what happened without the lock; an operation first takes note of it.
        seen: the events that were taken note of.
        has_new: whether something was put off until the operation ends.
    """

    def __init__(self) -> None:
        self.mend: Callable[[], None] = _nothing
        self.events = ctypes.c_int64()
        self.seen = 0
        self.has_new = False
        self._lock: Any = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._operation: FrameType | None = None  # who is at work, until all of it is done
        self._is_disturbed = False
        self._is_forked = False
        _OPEN.add(self)

    def __enter__(self) -> bool:
        if self._is_forked:
            raise MoERuntimeError(FORKED)
        lock, operation = self._lock, sys._getframe(1)
        if lock._is_owned():
            if self._is_under_way(operation):
                lock.acquire()
                return False
            self._release()
        lock.acquire()
        if self._operation is None and not self._is_disturbed and self.events.value == self.seen:
            self._operation = operation
        else:
            self._begin(operation)
        return True

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        lock = self._lock
        if not lock._is_owned():  # a wait was cut short before it had the lock back
            return
        if self._operation is sys._getframe(1):
            if kind is not None:
                self._repair()
            if self.has_new:
                self._start()
            self._operation = None
        lock.release()

    def wait(self) -> None:
        """Lets go of the lock until something has changed; it may return without a reason.

        To be called by the operation itself, with state that others may see.
        """
        operation, self._operation = self._operation, None
        self._sleep()
        assert operation is not None
        self._begin(operation)

    def notify_all(self) -> None:
        """Wakes all who wait; called with the lock held."""
        self._told.notify_all()

    def let_go(self) -> None:
        """Gives up what an exception left to this thread, and repairs the state if it needs it.

        To be called where an exception leaves the outermost function that uses the state.
        """
        if self._is_forked or self._is_under_way(sys._getframe(1)):
            return
        with self:
            pass

    def disturb(self, *_: object) -> None:
        """Has the state repaired before it is used again; takes no lock."""
        self._is_disturbed = True

    def check(self) -> None:
        """Proves that no exception left the lock held or an operation undone.

        Raises:
            AssertionError: one did.
        """
        if self._is_forked:
            raise MoERuntimeError(FORKED)
        operation = sys._getframe(1)
        assert self._is_under_way(operation) or not self._lock._is_owned(), "a lock was left held"
        with self._lock:
            assert self._operation is None or self._is_under_way(operation), "state was left torn"

    @property
    def is_forked(self) -> bool:
        """Whether the state belongs to the process that this one was forked from."""
        return self._is_forked

    def leave_to_parent(self) -> None:
        """This process is a fork: neither its reading threads nor the holders of locks exist."""
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._operation = None
        self._is_forked = True

    def _begin(self, operation: FrameType) -> None:
        """An operation begins, with the lock held; what another one left undone is mended."""
        is_torn = self._operation is not None or self._is_disturbed
        self._operation = operation
        if is_torn:
            self._repair()
        if self.events.value != self.seen:
            self._deliver()

    def _deliver(self) -> None:
        """Takes note of what happened since ``seen``."""
        self.seen = self.events.value

    def _start(self) -> None:
        """Has begin what was put off until the operation ends."""
        self.has_new = False

    def _sleep(self) -> None:
        """Waits without the lock and takes it again."""
        self._told.wait(PATIENCE_S)

    def _repair(self) -> None:
        self._is_disturbed = False  # first: what is lost meanwhile is for the next time
        self.mend()

    def _is_under_way(self, frame: FrameType | None) -> bool:
        """Whether the operation that holds the lock is one that this frame was called by."""
        operation = self._operation
        if operation is None:
            return False
        while frame is not None and frame is not operation:
            frame = frame.f_back
        return frame is not None

    def _release(self) -> None:
        while self._lock._is_owned():
            self._lock.release()


def _nothing() -> None:
    """Books that cannot be torn."""


def _leave_all_to_parent() -> None:
    for changes in tuple(_OPEN):
        changes.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
