"""Ctrl-C and SIGTERM: both end a session alike, and neither in the middle of making or removing."""

from __future__ import annotations

import signal

from moe_runtime.bench.memory_cap import INTERRUPTIONS


def stop_on_termination() -> None:
    """Turns SIGTERM into the exception of Ctrl-C, so that both clean up alike."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def release_interruptions() -> None:
    """Ends a hold that this process inherited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
