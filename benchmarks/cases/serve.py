"""The case ``serve``: what the clients of a server wait for.

A level (a number of clients or a request rate) is a system, and each answered request is a
repetition. Requests of a level are not independent, so their interval is too narrow.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.cases.load import MeasuredLevel, numbers_of, summarize
from moe_runtime.benchmarks.suite.memory_cap import drop_page_cache, memory_cap
from moe_runtime.benchmarks.suite.programs import running

_LOOK_S, _ANSWER_S, _END_S = 0.2, 5.0, 20.0


class StartedServer:
    """The kernel's counters of a server's process, without its children.

    Attributes:
        disk_bytes_per_s: measured speed of reading experts, if any.
    """

    disk_bytes_per_s: float | None = None

    def __init__(self, process_id: int) -> None:
        self._files = [Path(f"/proc/{process_id}/{name}") for name in ("io", "status")]

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Bytes read within the block, by calls and from storage, and the peak memory so far."""
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
    """Start a server of OpenAI's API, wait until it lists its models, and end it afterwards."""
    if _answers(url):
        raise ValueError(f"--start: something answers at {url} already; end it or change the port")
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        command = list(words)
        if cap_bytes is not None:
            command = stack.enter_context(memory_cap(cap_bytes)).wrap(words)
            drop_page_cache()
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        try:
            program = running(command, asked=signal.SIGTERM, grace_s=_END_S, **pipes)
            process = stack.enter_context(program)
        except OSError as error:
            raise ValueError(f"--start: cannot run {words[0]}: {error.strerror}") from None
        begin = time.monotonic()
        while not is_stopping() and not _answers(url):
            if process.poll() is not None:
                raise suite.PeerFailedError(
                    f"the server ended with exit code {process.returncode} before it answered at "
                    f"{url}{_last_line(said)}"
                )
            if time.monotonic() - begin > timeout_s:
                raise suite.PeerFailedError(
                    f"the server does not answer at {url} after {timeout_s:g} s"
                )
            time.sleep(_LOOK_S)
        yield StartedServer(process.pid)


def _answers(url: str) -> bool:
    """Whether a server is ready. One that asks for a key is ready too."""
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


METRICS = {
    "time_to_first_token_s": suite.Metric("s"),
    "later_first_token_s": suite.Metric("s"),
    "inter_token_s": suite.Metric("s"),
    **suite.facts("s", "time_per_output_token_s"),
    "end_to_end_s": suite.Metric("s"),
    **suite.facts("s", "sent_s"),
    **suite.facts("count", "prompt_tokens", "output_tokens"),
    **suite.facts("count", "answered", better="more"),
    **suite.facts("tokens/s", "input_tokens_per_s", "output_tokens_per_s", better="more"),
    **suite.facts("requests/s", "requests_per_s", better="more"),
    **suite.facts("share", "within_bounds", better="more"),
    **suite.facts("s", "seconds", "reads_alone_s"),
    **suite.facts("count", "failed", "unfinished"),
    **suite.facts("bytes", "read_call_bytes", "storage_bytes"),
    "peak_rss_bytes": suite.Metric("bytes"),
    **suite.JOULES,
}


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
    return suite.make_results(
        "serve",
        settings,
        ended,
        [suite.describe_system(str(one.level), _measured(one, row), METRICS) for one, row in rows],
    )


def _measured(one: MeasuredLevel, row: Mapping[str, Any]) -> suite.MeasuredSystem:
    good = [answer for answer in one.answers if answer.error is None]
    if not good:
        said = [f"{what['count']} failed: {what['first']}" for what in row["errors"].values()]
        return suite.MeasuredSystem(failure="; ".join(said) or "no request was answered")
    names = ("answered", "input_tokens_per_s", "output_tokens_per_s", "requests_per_s")
    names += ("seconds", "failed", "unfinished")
    whole: dict[str, suite.Number] = {name: row[name] for name in names if row[name] is not None}
    if "goodput" in row:
        whole["within_bounds"] = row["goodput"]["share"]
    whole |= one.counts
    return suite.MeasuredSystem(
        repetitions=[*(numbers_of(answer, one.began_s) for answer in good), whole]
    )
