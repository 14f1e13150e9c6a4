"""A peer in a process of its own that takes turns with ours, and stands still between its turns.

Threads of a peer may go on spinning after its call, and so take a core while ours is timed: between
its answers every one of them is stopped by the kernel, not asked to wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

KT_KERNEL = Path(__file__).parent / "kt_kernel.py"


class PeerEndedError(RuntimeError):
    """The process is no more."""


class WaitingProcess:
    """A program that answers a line with one that begins with `= `; it runs only while it is asked.

    Leaving its `with` block, by any way, ends it.

    Attributes:
        pid: of the process.
        first_answer: what it said of itself, without having been asked.

    Raises:
        PeerEndedError: it ended before it answered.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._process.pid
        try:
            self.first_answer = self._line()
            self._stop()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_ms(self, num_calls: int) -> list[float]:
        """Milliseconds of each of these calls, as it says."""
        assert self._process.stdin is not None
        os.kill(self.pid, signal.SIGCONT)
        try:
            print(num_calls, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerEndedError("the peer ended between two calls") from None
        times = [float(word) for word in self._line().split()]
        self._stop()
        return times

    def close(self) -> None:
        """Ends the process, stopped or not. Again: does nothing."""
        self._process.kill()  # a stopped one too
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):  # a line that it did not take
                    pipe.close()

    def _stop(self) -> None:
        """Returns when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        # an end is left to be seen by `wait`
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # a peer may print lines of its own
            if line.startswith("= "):
                return line[2:]
        raise PeerEndedError("the peer ended early: it may not take these sizes or this processor")


def kt_kernel(folder: Path, kind: str, sizes: tuple[int, ...], threads: int) -> WaitingProcess:
    """kt-kernel's experts; the first answer is the relative error of one token.

    Args:
        folder: its wheel, unpacked.
        kind: a format that it has.
        sizes: experts, choices a token, model width, hidden width, tokens.
        threads: that compute.

    Raises:
        PeerEndedError: it aborts on sizes that it does not take, or on this processor.
    """
    words = [str(word) for word in (folder, kind, *sizes, threads)]
    return WaitingProcess([sys.executable, "-P", str(KT_KERNEL), *words])
