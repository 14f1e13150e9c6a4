"""Ctrl-C and SIGTERM: both end a session alike, and neither in the middle of making or removing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


def stop_on_termination() -> None:
    """Turns SIGTERM into the exception of Ctrl-C, so that both clean up alike."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Holds interruptions back until the block is left; then they arrive.

    For steps that must be remembered to be undone: a process that has started but is not yet
    assigned to a name would outlive its parent. Processes started inside inherit the hold.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interruptions() -> None:
    """Ends a hold that this process inherited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
