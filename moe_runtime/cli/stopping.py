"""Ctrl-C that lets the work in hand finish."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether somebody asked the command to stop, and how.

    Attributes:
        signal_number: the signal that came; None while none has.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects after this signal: 128 and its number.

        As after Ctrl-C where the signal came to another process that works on the same.
        """
        return 128 + (self.signal_number or signal.SIGINT)


@contextlib.contextmanager
def stop_on_signals(message: str) -> Iterator[StopRequest]:
    """Within the block the first SIGINT or SIGTERM only sets the request; the second acts at once.

    Args:
        message: shown on stderr when the first one comes.
    """
    request = StopRequest()
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for watched_number in watched:
            signal.signal(watched_number, before[watched_number])
        print(message, file=sys.stderr, flush=True)

    for number in watched:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in watched:
            signal.signal(number, before[number])
