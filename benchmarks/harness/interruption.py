"""Ctrl-C and SIGTERM end a benchmark alike."""

from __future__ import annotations

import signal


def stop_on_termination() -> None:
    """Turns SIGTERM into the exception of Ctrl-C, so that both clean up alike."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
