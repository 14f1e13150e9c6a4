"""A peer in a process of its own, asked in lines of JSON (``peers/host.py`` is the other end)."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.suite.memory_cap import MemoryCap, forget, memory_cap
from moe_runtime.benchmarks.suite.runner import PeerFailedError
from moe_runtime.config import format_bytes

_HOST = Path(__file__).resolve().parents[1] / "peers" / "host.py"
_SHOWN = 300
# What an interpreter that is too old says of -P.
_OLD_PYTHON = "unknown option -P"


@dataclass(frozen=True, kw_only=True)
class PeerProgram:
    """Which peer, and what runs it.

    Attributes:
        name: in results and tables.
        file: the peer's file.
        python: the interpreter of its environment.
        settings: what its constructor is given.
        cap_bytes: of all its memory, page cache included; None for no cap.
        failure: why it cannot run, where that is known before it is asked to; else None.
        cache: the folder in the place of the user's for caches; None for the user's.
        gpus: which ones it sees, as CUDA counts or names them here; None for those of this process.
    """

    name: str
    file: Path
    python: Path
    settings: dict[str, Any]
    cap_bytes: int | None = None
    failure: str | None = None
    cache: Path | None = None
    gpus: str | None = None


class PeerProcess:
    """A running peer; one that stands still runs only while it is asked."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Any,
        timeout_s: float,
        cap: MemoryCap | None = None,
        *,
        stands_still: bool = False,
    ) -> None:
        self._process, self._stands_still = process, stands_still
        self._log = log
        self._timeout_s = timeout_s
        self._cap = cap
        self._unread = b""

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            PeerFailedError: the peer ended, or did not answer in time.
        """
        requests = self._process.stdin
        assert requests is not None
        self._signal(signal.SIGCONT)
        try:
            requests.write(json.dumps({"do": what, **more}).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            raise PeerFailedError(self._why()) from None
        answer = json.loads(self._line(what))
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerFailedError(answer["error"][:_SHOWN])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """Stops or continues all threads; a stop has come to all of them when this returns."""
        if self._stands_still and self._process.poll() is None:
            os.killpg(self._process.pid, number)
            if number == signal.SIGSTOP:
                # an end is left to be seen by `wait`
                os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _line(self, what: str) -> bytes:
        answers = self._process.stdout
        assert answers is not None
        end = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerFailedError(f"no answer to {what!r} after {self._timeout_s:.0f} s")
            part = os.read(answers.fileno(), 1 << 16)
            if not part:
                raise PeerFailedError(self._why())
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _why(self) -> str:
        code = self._process.wait(self._timeout_s)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        if _OLD_PYTHON in lines[:1]:
            return "its interpreter is older than Python 3.11, which peers need"
        if self._cap is not None and self._cap.num_oom_kills():
            return f"killed: it takes more than the cap of {format_bytes(self._cap.limit_bytes)}"
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (", for want of memory?" if name == "SIGKILL" else "")
        return last[:_SHOWN] or f"ended with exit code {code}"


@contextmanager
def started(
    program: PeerProgram, timeout_s: float, *, stands_still: bool = False
) -> Iterator[PeerProcess]:
    """Runs a peer within the block; it is killed with all that it started when the block ends.

    Under a cap the files of its model are dropped from the page cache first: pages that another
    process has read are charged to that one, and would cost this one nothing.

    Raises:
        PeerFailedError: its interpreter is not there, or it is known that it cannot run.
        CapUnavailableError: its memory cannot be capped here.
    """
    if program.failure is not None:
        raise PeerFailedError(program.failure)
    threads = program.settings["num_threads"]
    command = ["env", f"OMP_NUM_THREADS={threads}", "HF_HUB_OFFLINE=1"]
    command += [] if program.cache is None else [f"XDG_CACHE_HOME={program.cache}"]
    command += [] if program.gpus is None else [f"CUDA_VISIBLE_DEVICES={program.gpus}"]
    # -P: the folder of host.py is no place to import from.
    command += [str(program.python), "-P", str(_HOST), str(program.file)]
    if not program.python.is_file():
        raise PeerFailedError(f"{program.python} is not there")
    limit = program.cap_bytes
    with (
        tempfile.TemporaryFile() as log,
        nullcontext() if limit is None else memory_cap(limit) as cap,
    ):
        if cap is not None:
            command = cap.wrap(command)
            forget(files_under(Path(program.settings["model"])))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield PeerProcess(process, log, timeout_s, cap, stands_still=stands_still)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    # What a dead peer never read cannot be flushed.
                    _close(stream)


def why_unable(program: PeerProgram, timeout_s: float) -> str | None:
    """Why a peer cannot run, in one line; None where it starts in its environment.

    It is made there as for a measurement, which imports what it needs, and loads nothing.
    """
    try:
        with started(replace(program, cap_bytes=None), timeout_s) as process:
            process.ask("start", settings=program.settings)
    except PeerFailedError as error:
        return str(error)
    return None


def files_under(model: Path) -> list[Path]:
    """The file, or all files of the folder, that a model is."""
    return [file for file in (model, *model.rglob("*")) if file.is_file()]


def _close(stream: Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        return


def this_python() -> Path:
    """The interpreter of this process."""
    return Path(sys.executable)
