"""Signals that let running work finish; standard streams closed, full or without a reader.

Imports only what Python has loaded anyway.
"""

import _thread
import contextlib
import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TextIO

_NAMES = ("stdin", "stdout", "stderr")
_NO_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def without_control(text: str) -> str:
    """Removes control characters: a model can write escape sequences to the terminal."""
    return text.translate(_NO_CONTROL)


def open_closed_streams() -> list[str]:
    """Opens the null device for closed standard streams; returns their names.

    Otherwise the next opened file would take the number and receive all that is printed.
    """
    closed = []
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number is this one
            os.open(os.devnull, os.O_RDWR)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
            closed.append(name)
    return closed


class _Messages(io.FileIO):
    """Drops data that cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def outlive_stderr() -> None:
    """Drops messages that stderr cannot write: its disk is full, or its reader left."""
    old, raw = sys.stderr, _Messages(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=old.encoding, errors=old.errors, line_buffering=True
    )


def say_at_once(line: str) -> None:
    """Writes a line to stderr without buffers, for signal handlers; errors are dropped."""
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError):  # no file: the text is collected
        print(line, file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        os.write(number, f"{line}\n".encode(errors="replace"))


def release_broken_streams() -> list[str]:
    """Flushes the streams and redirects broken ones to the null device; returns their names.

    Python would complain about a broken stream again at its end.
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


def streams_on_full_disks() -> list[str]:
    """Names of streams that are files on a full disk. Without a buffer nothing else tells that
    they cannot be written: `release_broken_streams` then finds them sound."""
    found = []
    for name in _NAMES[1:]:
        with contextlib.suppress(io.UnsupportedOperation):  # it leads to no file
            number = getattr(sys, name).fileno()
            if stat.S_ISREG(os.fstat(number).st_mode) and not os.fstatvfs(number).f_bavail:
                found.append(name)
    return found


class TextOutput:
    """Text on stdout as it comes, and a line break at its end, also after an error."""

    def __init__(self) -> None:
        self._used = False
        self._is_terminal = sys.stdout.isatty()

    def show_prompt(self, text: str) -> None:
        """Shows the prompt dimmed: the text continues it."""
        sys.stdout.write("\033[2m")
        self.write(text)
        sys.stdout.write("\033[0m")

    def write(self, piece: str) -> None:
        """Writes a piece of text; on a terminal without control characters."""
        self._used = True
        sys.stdout.write(without_control(piece) if self._is_terminal else piece)
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._used:
            self.write("\n")


_TERMINATING = (signal.SIGTERM, signal.SIGHUP)
_LATER_S = 0.01
"""Seconds until a lost signal is sent again; it may be lost again."""
_ENDING = "ending; Ctrl-C once more ends at once and leaves what is half written as NAME.part"


class StopRequest:
    """Whether a signal asked the command to stop, and how many did."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.num_signals = 0

    @property
    def is_set(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number; that of Ctrl-C if another process got the signal."""
        return 128 + (self.signal_number or signal.SIGINT)


def handlers_in_force() -> dict[signal.Signals, Any]:
    """The handlers of signals that end a command, except ignored ones, as under `nohup`."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, *_TERMINATING)}
    return {number: old for number, old in found.items() if old != signal.SIG_IGN}


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], before: Mapping[signal.Signals, Any]
) -> Iterator[None]:
    """Handles signals within the block; afterwards restores handlers that were not replaced."""
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, old)


@contextlib.contextmanager
def stop_on_signals(
    *messages: str,
    is_held: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = say_at_once,
) -> Iterator[StopRequest]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP only set the request; a later one acts.

    Args:
        messages: shown at the first signals, one for each.
        is_held: whether later signals also only set the request.
        say: shows a message, within the handler; on stderr when omitted.
    """
    request, before = StopRequest(), handlers_in_force()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        request.num_signals += 1
        if request.num_signals >= len(messages) and not is_held():
            for watched, old in before.items():
                signal.signal(watched, old)
        if request.num_signals <= len(messages):
            say(messages[request.num_signals - 1])
        elif not is_held():
            signal.raise_signal(number)

    with handling(note, before):
        yield request


@contextlib.contextmanager
def terminable() -> Iterator[StopRequest]:
    """Within the block SIGTERM and SIGHUP end the work as Ctrl-C does: outputs are finished.

    Further ones have no effect. The next Ctrl-C prints that the work is ending; later ones raise
    `KeyboardInterrupt` again. Ignored signals, and those with another handler, stay as they are. An
    interrupt that Python drops within a callback is raised after it.
    """
    request = StopRequest()
    before: dict[signal.Signals, Any] = {}
    hook = sys.unraisablehook
    is_terminated = has_warned = is_lost = False

    def note_lost() -> int:
        nonlocal is_lost
        is_lost = True
        return request.signal_number or signal.SIGINT

    if threading.current_thread() is threading.main_thread():
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: old for number, old in handlers_in_force().items() if old in defaults}
        resend_lost_interrupts(note_lost)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_terminated, has_warned, is_lost
        if is_lost_from(frame):
            send_later(number, threading.get_ident())
            return
        if is_lost:  # the handler has noted it before
            is_lost = False
            raise KeyboardInterrupt
        if number != signal.SIGINT and is_terminated:
            return
        is_ending, request.signal_number = request.is_set, number
        is_terminated = is_terminated or number != signal.SIGINT
        if is_ending and not has_warned:
            has_warned = True
            say_at_once(_ENDING)
            return
        raise KeyboardInterrupt

    try:
        with handling(interrupt, before):
            yield request
    finally:
        sys.unraisablehook = hook


def send_later(number: int, thread: int) -> None:
    """Sends a signal to a thread after its callback has probably ended."""

    def wait_and_send() -> None:
        time.sleep(_LATER_S)
        signal.pthread_kill(thread, number)

    _thread.start_new_thread(wait_and_send, ())


def resend_lost_interrupts(note: Callable[[], int] = lambda: signal.SIGINT) -> None:
    """Sends the signal `note()` again for each interrupt that Python drops."""
    before, thread = sys.unraisablehook, _thread.get_ident()

    def take_unraisable(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            send_later(note(), thread)
        else:
            before(lost)

    sys.unraisablehook = take_unraisable


def is_lost_from(frame: FrameType | None) -> bool:
    """Whether Python drops exceptions of this frame, by names; the hook finds other callbacks."""
    while frame is not None and frame.f_code.co_name not in ("__del__", "take_unraisable"):
        frame = frame.f_back
    return frame is not None
