"""The case ``serve``: a server, started if wanted, and what its clients waited for.

A level (so many clients, or requests a second) is a system, each answered request a repetition.
Requests of a level are not independent: their interval says less than one of repetitions.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import psutil

from moe_runtime.benchmarks.cases.load import Level, MeasuredLevel, TimedAnswer, summarize
from moe_runtime.benchmarks.suite.memory_cap import drop_page_cache, memory_cap
from moe_runtime.benchmarks.suite.results import (
    JOULES,
    Metric,
    describe_system,
    facts,
    make_results,
)
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, Number, PeerFailedError

_LOOK_S, _ANSWER_S, _END_S = 0.2, 5.0, 20.0


class StartedServer:
    """What the kernel counts of a server's process, without processes that it starts.

    Attributes:
        disk_bytes_per_s: how fast its disk reads experts, if that was measured.
    """

    disk_bytes_per_s: float | None = None

    def __init__(self, process_id: int) -> None:
        self._files = [Path(f"/proc/{process_id}/{name}") for name in ("io", "status")]

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Bytes that it reads within the block, by calls and from storage, and its peak by then."""
        found: dict[str, float] = {}
        before = self._counts()
        yield found
        after = self._counts()
        if before and after:
            found["read_call_bytes"] = after["rchar"] - before["rchar"]
            found["storage_bytes"] = after["read_bytes"] - before["read_bytes"]
            found["peak_rss_bytes"] = after["VmHWM"] * 1024
            if self.disk_bytes_per_s is not None:
                found["reads_alone_s"] = found["read_call_bytes"] / self.disk_bytes_per_s

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
    """Starts a server of OpenAI's API and waits until it lists its models; ends it afterwards."""
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
    """Sends SIGTERM to all processes of the group; kills those that are left after a while."""
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


METRICS = {
    "time_to_first_token_s": Metric("s"),
    "later_first_token_s": Metric("s"),
    "inter_token_s": Metric("s"),
    **facts("s", "time_per_output_token_s"),
    "end_to_end_s": Metric("s"),
    **facts("s", "sent_s"),
    **facts("count", "prompt_tokens", "output_tokens"),
    **facts("count", "answered", better="more"),
    **facts("tokens/s", "input_tokens_per_s", "output_tokens_per_s", better="more"),
    **facts("requests/s", "requests_per_s", better="more"),
    **facts("share", "within_bounds", better="more"),
    **facts("s", "seconds", "reads_alone_s"),
    **facts("count", "failed", "unfinished"),
    **facts("bytes", "read_call_bytes", "storage_bytes"),
    "peak_rss_bytes": Metric("bytes"),
    **JOULES,
}


def name_of(level: Level) -> str:
    if level.concurrency is None:
        return f"{level.rate:g} requests/s"
    return f"{level.concurrency} at a time"


def serve_results(
    found: Sequence[MeasuredLevel],
    bounds: Mapping[str, float],
    *,
    settings: Mapping[str, Any],
    is_interrupted: bool,
) -> dict[str, Any]:
    rows = [(one, summarize(one, bounds)) for one in found]
    has_answers = any(row["answered"] for _, row in rows)
    ended = "interrupted" if is_interrupted else "most" if has_answers else "failed"
    return make_results(
        "serve",
        settings,
        ended,
        [describe_system(name_of(one.level), _measured(one, row), METRICS) for one, row in rows],
    )


def _measured(one: MeasuredLevel, row: Mapping[str, Any]) -> MeasuredSystem:
    good = [answer for answer in one.answers if answer.error is None]
    if not good:
        said = [f"{what['count']} failed: {what['first']}" for what in row["errors"].values()]
        return MeasuredSystem(failure="; ".join(said) or "no request was answered")
    names = ("answered", "input_tokens_per_s", "output_tokens_per_s", "requests_per_s")
    names += ("seconds", "failed", "unfinished")
    whole: dict[str, Number] = {name: row[name] for name in names if row[name] is not None}
    if "goodput" in row:
        whole["within_bounds"] = row["goodput"]["share"]
    whole |= one.counts
    return MeasuredSystem(repetitions=[*(_numbers(answer, one.began_s) for answer in good), whole])


def _numbers(answer: TimedAnswer, began_s: float) -> dict[str, Number]:
    found: dict[str, Number] = {
        "sent_s": answer.sent_s - began_s,
        "end_to_end_s": answer.whole_s,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
    }
    if answer.pieces_s:
        name = "later_first_token_s" if answer.turn else "time_to_first_token_s"
        found[name] = answer.first_token_s
    if answer.gaps_s:
        found["inter_token_s"] = answer.gaps_s
    if answer.per_token_s is not None:
        found["time_per_output_token_s"] = answer.per_token_s
    return found
