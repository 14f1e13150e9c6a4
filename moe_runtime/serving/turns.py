"""Turns of several engines: each computes alone, in the order in which they asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Lets one engine at a time compute, so that models share a machine's cores fairly.

    Who asks waits behind all who asked before: an engine with much to do cannot keep the others
    waiting for longer than one step of each.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = self._num_ended = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn, and has it within the block."""
        with self._changed:
            number = self._num_asked
            self._num_asked += 1
            self._changed.wait_for(lambda: self._num_ended == number)
        try:
            yield
        finally:
            with self._changed:
                self._num_ended += 1
                self._changed.notify_all()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the turn that somebody else has."""
        return self._num_asked - self._num_ended > 1
