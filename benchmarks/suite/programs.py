"""Programs that a benchmark starts and stops."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_LOOK_S = 0.05
_KILLED_S = 10.0  # how long killed processes may take to disappear


@contextmanager
def running(
    command: Sequence[str | Path],
    *,
    asked: signal.Signals | None = None,
    grace_s: float = 0.0,
    **options: Any,
) -> "Iterator[subprocess.Popen[Any]]":
    """Run a program within the block, in its own session, so that Ctrl-C reaches only this process.

    At the end of the block all processes of the session get the signal ``asked``, if given, and are
    killed after ``grace_s`` seconds.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        try:
            if asked is not None:
                _signal(process, asked)
                _wait(process, grace_s)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
            _wait(process, _KILLED_S)
            for stream in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):  # a dead program's input cannot be flushed
                    stream.close()


def _signal(process: "subprocess.Popen[Any]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while _is_left(process) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _is_left(process: "subprocess.Popen[Any]") -> bool:
    """Whether any process of the session still runs: the first may end before others."""
    if process.poll() is None:
        return True
    for one in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            is_over = one.info["status"] == psutil.STATUS_ZOMBIE
            if not is_over and os.getpgid(one.pid) == process.pid:
                return True
    return False
