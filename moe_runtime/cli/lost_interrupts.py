"""Interrupts that Python drops, since they come within a callback, are sent once more.

What is raised in a ``__del__``, in the callback of a weak reference or where an import releases its
lock goes to ``sys.unraisablehook`` and no further. Nothing is imported here but what Python has
loaded anyway.
"""

import _thread
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_LATER_S = 0.01
"""Seconds until the signal is sent again; it may come within a callback again, and so on."""


def send_later(number: int, thread: int) -> None:
    """Sends a signal to the thread of that identity, when its callback has ended by all odds."""

    def wait_and_send() -> None:
        time.sleep(_LATER_S)
        signal.pthread_kill(thread, number)

    _thread.start_new_thread(wait_and_send, ())


def resend_lost_interrupts(note: Callable[[], int] = lambda: signal.SIGINT) -> None:
    """From now on a signal comes again to the calling thread for each interrupt that Python drops.

    Args:
        note: called when one was dropped; returns the number of the signal to send.
    """
    before, thread = sys.unraisablehook, _thread.get_ident()

    def take_unraisable(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            send_later(note(), thread)
        else:
            before(lost)

    sys.unraisablehook = take_unraisable


def is_lost_from(frame: FrameType | None) -> bool:
    """Whether what is raised in this frame is printed and dropped, going by the functions' names.

    Of the callbacks these two have names that tell; the others are found out by the hook.
    """
    while frame is not None and frame.f_code.co_name not in ("__del__", "take_unraisable"):
        frame = frame.f_back
    return frame is not None
