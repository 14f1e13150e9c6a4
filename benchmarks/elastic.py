"""A server whose processes come and go: `python benchmarks/elastic.py [--save]`.

Six requests run while processes join `serve --elastic`, and one is killed. Measured of each change:
experts that moved, and the longest wait of any request for a token. All answers must be those of
the server's one process. Processes share this machine's cores: this measures no speed.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.errors import MoERuntimeError
from moe_runtime.models.pocket import pocket_path

PROMPTS = (
    "The for statement is used to iterate",
    "A class definition is an executable statement.",
    "The import system",
    "def function(argument):",
    "Strings are sequences of",
    "An exception is raised when",
)
METRICS = {
    **facts("count", "experts_moved"),
    "longest_wait_s": Metric("s"),
    **facts("s", "longest_wait_before_s"),
}
QUIET_S, PATIENCE_S = 2.0, 300.0
"""Seconds between two changes; the longest time until one has taken place."""
_MOVED = re.compile(r"(\d+) processes divide the model; (\d+) experts moved")


class TokenTimes:
    def __init__(self, num_requests: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num_requests)]

    def add(self, request: int) -> None:
        self._times[request].append(time.perf_counter())

    def longest_wait_s(self, begin_s: float, end_s: float) -> float:
        """The longest time between two tokens of a request that overlaps an interval."""
        waits = [
            after - before
            for times in self._times
            for before, after in itertools.pairwise(times)
            if after >= begin_s and before <= end_s
        ]
        return max(waits, default=0.0)


class Server(contextlib.ExitStack):
    """`serve --elastic`, and the processes that join it."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("localhost", 0)) as free:
            self._port = free.getsockname()[1]
        self._log = Path(self.enter_context(tempfile.TemporaryDirectory()), "log")
        first = self.start("--elastic", f"1:3@{self._port}", stdout=subprocess.PIPE)
        assert first.stdout is not None
        self.address = json.loads(first.stdout.readline())["address"]

    def start(self, *words: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-P", "-m", "moe_runtime.cli.program", "serve"]
        given = [*program, str(pocket_path()), "--exact", "--json", "--port", "0", *words]
        with open(self._log if "--elastic" in words else os.devnull, "ab") as log:
            process = subprocess.Popen(given, stdout=stdout, stderr=log)
        self.callback(process.wait)
        self.callback(process.kill)
        return process

    def join(self) -> subprocess.Popen[bytes]:
        return self.start("--join", f"localhost:{self._port}")

    def changes(self) -> list[tuple[int, int]]:
        """Processes and moved experts of all groups so far."""
        return [(int(size), int(moved)) for size, moved in _MOVED.findall(self._log.read_text())]

    def answer(self, prompt: str, num_tokens: int, on_token: Callable[[], None]) -> str:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), headers
        )
        text = ""
        with urllib.request.urlopen(asked) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    on_token()
        return text


def measure(
    server: Server, times: TokenTimes, change: Callable[[], object], size: int
) -> dict[str, float]:
    """Of a change to so many processes."""
    quiet_s = time.perf_counter()
    time.sleep(QUIET_S)
    begin_s, before = time.perf_counter(), len(server.changes())
    change()
    while not (found := server.changes()[before:]) or found[-1][0] != size:
        if time.perf_counter() > begin_s + PATIENCE_S:
            raise MoERuntimeError(f"the change did not take place in {PATIENCE_S:g} s")
        time.sleep(0.05)
    time.sleep(QUIET_S)
    return {
        "experts_moved": sum(moved for _, moved in found),
        "longest_wait_s": times.longest_wait_s(begin_s, time.perf_counter()),
        "longest_wait_before_s": times.longest_wait_s(quiet_s, begin_s),
    }


def run(rounds: int, num_tokens: int, results: ScriptResults) -> None:
    """Adds the numbers of each change, in every round."""
    with Server() as server:
        expected = [server.answer(prompt, num_tokens, lambda: None) for prompt in PROMPTS]
        times = TokenTimes(len(PROMPTS))
        got: list[list[str]] = [[] for _ in PROMPTS]
        ends = threading.Event()

        def ask(number: int) -> None:
            while not ends.is_set():
                on_token = partial(times.add, number)
                got[number].append(server.answer(PROMPTS[number], num_tokens, on_token))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        joined: list[subprocess.Popen[bytes]] = []

        def join() -> None:
            joined.append(server.join())

        def kill() -> None:
            joined.pop(0).send_signal(signal.SIGKILL)

        changes = {
            "1 to 2 processes": (join, 2),
            "2 to 3 processes": (join, 3),
            "3 to 2 processes, one is killed": (kill, 2),
            "2 to 1 process, one is killed": (kill, 1),
        }
        systems = {name: partial(measure, server, times, *one) for name, one in changes.items()}
        try:
            results.add_rounds(systems, rounds)
        finally:
            ends.set()
            for thread in threads:
                thread.join()
    if any(text != one for texts, one in zip(got, expected, strict=True) for text in texts):
        raise MoERuntimeError("an answer differs from that of one process")
    print(f"all {sum(map(len, got))} answers are those of one process")


@script(rounds=option(3, "times all changes are made"), new_tokens=option(240, "of each answer"))
def main(options: Namespace) -> int:
    settings = {"model": "pocket", "requests": len(PROMPTS), "new_tokens": options.new_tokens}
    results = ScriptResults("elastic", options, settings, METRICS)
    run(options.rounds, options.new_tokens, results)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
