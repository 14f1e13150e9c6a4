"""Standard streams that are closed, full, or read by nobody any more."""

import io
import os
import select
import sys
from typing import TextIO

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> list[str]:
    """Opens the null device in the place of standard streams that the process began without.

    Otherwise the next file that is opened takes the number, and what is printed ends up in it.

    Returns:
        The names of the streams that were closed.
    """
    closed = []
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is taken, which is this one.
            os.open(os.devnull, os.O_RDWR)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
            closed.append(name)
    return closed


def release_broken_streams() -> list[str]:
    """Writes out what was printed; a stream that cannot take it leads to the null device from now.

    Python would complain about such a stream again at its end, in lines of its own.

    Returns:
        The names of the streams that could not take it.
    """
    broken = []
    for name in _NAMES[1:]:
        stream = getattr(sys, name)
        try:
            stream.flush()
            is_broken = _is_broken(stream)
        except OSError:
            is_broken = True
        if is_broken:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            broken.append(name)
    return broken


def _is_broken(stream: TextIO) -> bool:
    """Whether a stream without a buffer (``python -u``), of which no flush says so, is broken.

    Raises:
        OSError: it is.
    """
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:  # it leads to no file
        return False
    os.write(number, b"")
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
