"""A server that a benchmark starts, under a memory cap if wanted, and ends."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import psutil

from moe_runtime.benchmarks.suite.memory_cap import drop_page_cache, memory_cap
from moe_runtime.benchmarks.suite.runner import PeerFailedError

_LOOK_S, _ANSWER_S, _END_S = 0.2, 5.0, 20.0


class StartedServer:
    """What the kernel counts of a server's process, without processes that it starts."""

    def __init__(self, process_id: int) -> None:
        self._files = [Path(f"/proc/{process_id}/{name}") for name in ("io", "status")]

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Bytes that it reads within the block, by calls and from storage, and its peak by then.

        They are there once the block has ended, unless the server has ended too.
        """
        found: dict[str, float] = {}
        before = self._counts()
        yield found
        after = self._counts()
        if before and after:
            found["read_call_bytes"] = after["rchar"] - before["rchar"]
            found["storage_bytes"] = after["read_bytes"] - before["read_bytes"]
            found["peak_rss_bytes"] = after["VmHWM"] * 1024

    def _counts(self) -> dict[str, int]:
        try:
            rows = [line.split() for file in self._files for line in file.read_text().splitlines()]
            named = {row[0].rstrip(":"): row[1] for row in rows if len(row) > 1}
            return {name: int(named[name]) for name in ("rchar", "read_bytes", "VmHWM")}
        except (OSError, KeyError):
            return {}


@contextmanager
def started_server(
    words: Sequence[str],
    url: str,
    *,
    cap_bytes: int | None,
    timeout_s: float,
    is_stopping: Callable[[], bool],
) -> Iterator[StartedServer]:
    """Starts a server of OpenAI's API and waits until it lists its models; ends it afterwards.

    Args:
        words: its command.
        url: where it will answer.
        cap_bytes: of all its memory, page cache included; the cache is emptied before, where this
            user may do that.
        timeout_s: seconds that it may take.
        is_stopping: whether to wait no longer.

    Raises:
        ValueError: something answers there already, or the command cannot be run.
        PeerFailedError: it ended, or took too long.
        CapUnavailableError: memory cannot be capped here.
    """
    if _answers(url):
        raise ValueError(f"--start: something answers at {url} already; end it or change the port")
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        command = list(words)
        if cap_bytes is not None:
            command = stack.enter_context(memory_cap(cap_bytes)).wrap(words)
            drop_page_cache()
        try:
            # In a session of its own, so that Ctrl-C reaches this process alone.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"--start: cannot run {words[0]}: {error.strerror}") from None
        stack.callback(_end, process)
        begin = time.monotonic()
        while not is_stopping() and not _answers(url):
            if process.poll() is not None:
                raise PeerFailedError(
                    f"the server ended with exit code {process.returncode} before it answered at "
                    f"{url}{_last_line(said)}"
                )
            if time.monotonic() - begin > timeout_s:
                raise PeerFailedError(f"the server does not answer at {url} after {timeout_s:g} s")
            time.sleep(_LOOK_S)
        yield StartedServer(process.pid)


def _answers(url: str) -> bool:
    """Whether a server is there and ready: one that wants a key says so at once."""
    base = url.rstrip("/")
    try:
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"{base.removesuffix('/v1')}/v1/models", timeout=_ANSWER_S):
            return True
    except HTTPError as error:
        return error.code < 500
    except (URLError, OSError):
        return False
    except ValueError:
        raise ValueError(
            f"--url {url}: expected an address such as http://127.0.0.1:8000"
        ) from None


def _last_line(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all of its processes; those that have not ended after a while are killed, and at
    once where somebody does not want to wait."""
    is_over = False
    try:
        _signal(process, signal.SIGTERM)
        is_over = _ends(process)
    finally:
        if not is_over:
            _signal(process, signal.SIGKILL)
            _ends(process)


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Whether all of its processes end within a while, which is waited for."""
    begin = time.monotonic()
    while process.poll() is None or _runs_in_group(process.pid):
        if time.monotonic() - begin > _END_S:
            return False
        time.sleep(_LOOK_S / 4)
    return True


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)


def _runs_in_group(group: int) -> bool:
    """Whether a process of a group is left that has not ended: the first one may be gone before."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False
