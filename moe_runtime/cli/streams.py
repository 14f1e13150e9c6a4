"""Standard streams that are closed, full, or without a reader; text on a terminal."""

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

_NAMES = ("stdin", "stdout", "stderr")
_NO_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def without_control(text: str) -> str:
    """Removes what a terminal would obey: a model can write escape sequences as well as text."""
    return text.translate(_NO_CONTROL)


def open_closed_streams() -> list[str]:
    """Opens the null device in place of standard streams that are closed; returns their names.

    Otherwise the next file that is opened takes the number, and gets what is printed.
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


class _Messages(io.FileIO):
    """Takes what cannot be written, and drops it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def outlive_stderr() -> None:
    """Drops messages that stderr cannot take: its disk is full, or its reader left."""
    old, raw = sys.stderr, _Messages(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=old.encoding, errors=old.errors, line_buffering=True
    )


def say_at_once(line: str) -> None:
    """Writes a line to stderr past its buffers, for signal handlers; dropped where it cannot."""
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError):  # no file: the text is collected
        print(line, file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        os.write(number, f"{line}\n".encode(errors="replace"))


def release_broken_streams() -> list[str]:
    """Flushes the streams; one that fails leads to the null device from now. Returns their names.

    Python would complain about such a stream again at its end.
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
    """Whether a stream without a buffer (`python -u`) is broken; a write may raise `OSError`."""
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:  # it leads to no file
        return False
    os.write(number, b"")
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class TextOutput:
    """Text on stdout as it comes, and a line break after it, also when an error cuts it short."""

    def __init__(self) -> None:
        self._used = False
        self._is_terminal = sys.stdout.isatty()

    def show_prompt(self, text: str) -> None:
        """Shows the prompt dimmed, so that the text reads as its continuation."""
        sys.stdout.write("\033[2m")
        self.write(text)
        sys.stdout.write("\033[0m")

    def write(self, piece: str) -> None:
        """Writes a piece of text, without what a terminal would obey."""
        self._used = True
        sys.stdout.write(without_control(piece) if self._is_terminal else piece)
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._used:
            self.write("\n")
