"""A server for minutes under everything clients do: `python benchmarks/serve_soak.py --save`.

Eight clients send requests of random lengths, leave in the middle of answers, and send what is no
request; some experts cannot be read for seconds. At the end SIGTERM comes during long answers. The
exit code is 1 unless all of this holds:

- resident memory does not grow: its slope over the last two thirds is within the noise;
- every accepted request is answered or fails in OpenAI's form, and none is stuck or left behind;
- experts that cannot be read fail some requests: the engine's second tries have met them;
- the peak of resident memory, less what was held before loading, is within the budget;
- the running answers are finished, and the process ends as by SIGTERM (exit code 143).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx2
import numpy as np
import psutil
from scipy.stats import theilslopes

from moe_runtime.benchmarks.cases.load import draw_words
from moe_runtime.benchmarks.harness.scripting import (
    ScriptResults,
    present_folder,
    results_parser,
)
from moe_runtime.benchmarks.suite.results import Metric, facts
from moe_runtime.config import format_bytes, parse_bytes
from moe_runtime.files import write_text
from moe_runtime.models.pocket import pocket_path

HERE = Path(__file__).resolve().parent
CLIENTS = 8
SAMPLE_S = 0.5
BLOCKS = 24
"""Medians of so many stretches of time stand for the samples, whose neighbours are alike."""
CONFIDENCE = 0.99
MAX_TOKENS = 1024
"""Of all requests at a time."""
KEPT_BYTES = 1 << 10
"""What a request that is never let go of keeps at the very least: its tokens, text and events."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDED_BY_SIGTERM = 128 + signal.SIGTERM
METRICS = {
    "used_bytes": Metric("bytes"),
    **facts("bytes", "peak_rss_bytes", "budget_bytes", "rss_bytes"),
    **facts("bytes", "least_growth_bytes", "allowed_growth_bytes"),
    **facts("count", "requests", "answered_requests", "failed_requests", "refused_requests"),
    **facts("count", "cancelled_requests", "wrong", "tracebacks", "generated_tokens"),
    **facts("count", "injected_errors", "broken_experts", "expert_misses"),
    **facts("count", "preemptions", "prefix_hit_tokens"),
}


def growth(samples: Sequence[tuple[float, int]], num_requests: int) -> dict[str, Any]:
    """Whether resident memory grew over the last two thirds of the time."""
    begin_s, end_s = samples[0][0], samples[-1][0]
    late = np.array([one for one in samples if one[0] >= begin_s + (end_s - begin_s) / 3])
    blocks = np.array_split(late, min(BLOCKS, len(late)))
    medians = np.array([np.median(block, axis=0) for block in blocks])
    found = theilslopes(medians[:, 1], medians[:, 0], CONFIDENCE)
    slope, _, low, high = cast(Sequence[float], found)
    seconds = late[-1, 0] - late[0, 0]
    allowed = KEPT_BYTES * num_requests * 2 / 3
    return {
        "bytes_per_s": float(slope),
        "bytes_per_s_low": float(low),
        "bytes_per_s_high": float(high),
        "least_growth_bytes": float(low * seconds),
        "allowed_growth_bytes": allowed,
        "is_leak": bool(low * seconds > allowed),
    }


@dataclass
class Tally:
    """What clients and the watch on memory found."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)
    peak_bytes: int = 0
    metrics: str = ""
    num_requests: int = 0


async def press(address: str, process: subprocess.Popen[str], minutes: float) -> Tally:
    """Lets the clients ask for minutes, then ends the server while it answers all of them."""
    found = Tally()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    async with httpx2.AsyncClient(
        base_url=f"{address}/v1/", timeout=None, limits=limits, trust_env=False
    ) as http:
        clients = [Client(http, found, Random(f"0 {number}")) for number in range(CLIENTS)]
        await ask_for_minutes(clients, minutes, process.pid, found)
        found.metrics = (await http.get(f"{address}/metrics")).text
        await end_while_answering(clients, process, found)
    return found


async def ask_for_minutes(
    clients: Sequence[Client], minutes: float, pid: int, found: Tally
) -> None:
    """Whatever clients do, until all of their requests have ended."""
    watched = psutil.Process(pid)
    end_s = time.monotonic() + 60 * minutes
    tasks = [asyncio.ensure_future(one.run(lambda: time.monotonic() >= end_s)) for one in clients]
    pending = set(tasks)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=SAMPLE_S)
        if time.monotonic() < end_s:
            found.samples.append((time.monotonic(), watched.memory_info().rss))
    for task in tasks:
        task.result()
    found.num_requests = found.counts.total()
    await asyncio.sleep(1.0)  # the server notices last that clients went away


async def end_while_answering(
    clients: Sequence[Client], process: subprocess.Popen[str], found: Tally
) -> None:
    """Sends SIGTERM when every client has the beginning of a long answer."""
    begun: set[int] = set()

    async def ask(number: int, client: Client) -> None:
        body = {"model": MODEL, "prompt": "The", "max_tokens": 100, "stream": True}
        body |= {"ignore_eos": True, "seed": number}
        await client.ask("completions", body, on_begun=lambda: begun.add(number))

    tasks = [asyncio.ensure_future(ask(number, one)) for number, one in enumerate(clients)]
    while len(begun) < len(clients) and not all(task.done() for task in tasks):
        await asyncio.sleep(0.02)
    found.peak_bytes = peak_of(process.pid)
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)


def peak_of(pid: int) -> int:
    """Highest resident memory of a living process, by the kernel's own counter."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise RuntimeError("the server has ended by itself")
    return int(found[1]) * 1024


def metric(text: str, name: str) -> float:
    """Sum of a metric over its labels."""
    lines = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in lines)


def with_template(model: Path, folder: Path) -> Path:
    """The checkpoint, or a copy in `folder` that has a chat template if it has none."""
    settings = json.loads((model / "tokenizer_config.json").read_text())
    if settings.get("chat_template") or (model / "chat_template.jinja").exists():
        return model
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    changed = json.dumps(settings | {"chat_template": TEMPLATE})
    write_text(folder / "tokenizer_config.json", changed)
    return folder


def soak(
    arguments: argparse.Namespace, folder: Path
) -> tuple[Tally, dict[str, Any], dict[str, Any]]:
    """What clients found, numbers of the server, and what else it said."""
    model = with_template(arguments.model, folder / "model")
    command = [sys.executable, "-P", str(HERE / "harness" / "soak_server.py"), str(model)]
    command += ["--name", MODEL, "--port", "0", "--max-tokens", str(MAX_TOKENS)]
    command += ["--host-memory", arguments.host_memory]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first.startswith('{"address"'):
                raise SystemExit(f"the server did not start:\n{(folder / 'log').read_text()}")
            said = json.loads(first)
            tally = asyncio.run(press(said.pop("address"), process, arguments.minutes))
            exit_code = process.wait(60)
        finally:
            process.kill()
            process.wait()
    lines = (folder / "log").read_text().splitlines()
    injected = [line for line in lines if line.startswith('{"injected"')]
    numbers: dict[str, Any] = {"wrong": len(tally.wrong), "requests": tally.counts.total()}
    numbers |= {f"{way}_requests": count for way, count in tally.counts.items()}
    numbers |= {
        "generated_tokens": tally.tokens,
        "tracebacks": sum("Traceback" in line for line in lines),
        "injected_errors": len(injected),
        "broken_experts": len(set(injected)),
        "expert_misses": metric(tally.metrics, "moe:expert_misses_total"),
        "preemptions": metric(tally.metrics, "vllm:num_preemptions_total"),
        "prefix_hit_tokens": metric(tally.metrics, "vllm:prefix_cache_hits_total"),
        "used_bytes": tally.peak_bytes - said["baseline_rss_bytes"],
        "peak_rss_bytes": tally.peak_bytes,
        "budget_bytes": parse_bytes(arguments.host_memory),  # a part of which is the model's
    }
    waiting = ("running", "waiting")
    left = {name: metric(tally.metrics, f"vllm:num_requests_{name}") for name in waiting}
    memory = growth(tally.samples, tally.num_requests)
    numbers |= {name: memory.pop(name) for name in ("least_growth_bytes", "allowed_growth_bytes")}
    return tally, numbers, said | {"left_behind": left, "memory": memory, "exit_code": exit_code}


def broken(numbers: Mapping[str, float], facts: Mapping[str, Any]) -> list[str]:
    injected, failed = numbers["injected_errors"], numbers.get("failed_requests", 0)
    used, budget = numbers["used_bytes"], numbers["budget_bytes"]
    checks = {
        f"{numbers['wrong']} wrong answers": numbers["wrong"],
        f"{numbers['tracebacks']} tracebacks in the log": numbers["tracebacks"],
        f"requests left behind: {facts['left_behind']}": any(facts["left_behind"].values()),
        f"{injected} read errors failed {failed} requests": not (injected and failed),
        f"memory grows by {facts['memory']['bytes_per_s']:.0f} bytes/s": facts["memory"]["is_leak"],
        f"{format_bytes(used)} used of a budget of {format_bytes(budget)}": used > budget,
        f"exit code {facts['exit_code']}": facts["exit_code"] != ENDED_BY_SIGTERM,
    }
    return [what for what, is_so in checks.items() if is_so]


def main() -> int:
    parser = results_parser(__doc__)
    add = parser.add_argument
    add("--model", type=present_folder, default=pocket_path(), help="(default: the pocket one)")
    add("--minutes", type=float, default=15.0)
    add("--host-memory", default="40MiB", help="the server's budget (default: %(default)s)")
    options = parser.parse_args()
    if not 0 < options.minutes < float("inf"):
        parser.error(f"argument --minutes: expected a number above 0, got {options.minutes:g}")
    settings = {"minutes": options.minutes, "host_memory": options.host_memory}
    settings |= {"max_tokens": MAX_TOKENS, "model": options.model.name, "clients": CLIENTS}
    results = ScriptResults("serve-soak", options, settings, METRICS)
    with tempfile.TemporaryDirectory() as folder:
        tally, numbers, found = soak(options, Path(folder))
    results.settings |= found
    results.add("server", [numbers | {"rss_bytes": [size for _, size in tally.samples]}])
    print(json.dumps(found, indent=1))
    complaints = [f"wrong: {line}" for line in tally.wrong[:20]]
    complaints += [f"BROKEN: {line}" for line in broken(numbers, found)]
    print(*complaints, sep="\n")
    return results.finish() or int(bool(complaints))


MODEL = "soaked"
STUCK_S = 120.0
"""A request that takes longer is stuck; those that are asked take a second or two."""
_ERROR_FIELDS = {"message", "type", "param", "code"}
_SHARED = [draw_words(40 * number, Random(number)) for number in range(1, 4)]
"""What conversations begin with, as system prompts do."""
_BAD: tuple[tuple[str, Sequence[Any]], ...] = (
    (
        "completions",
        (b"{", [], {"prompt": 5}, {"prompt": [-1, 10**9]}, {"prompt": "word " * 20000}),
    ),
    ("completions", ({"prompt": "a", "max_tokens": -1}, {"prompt": "a", "temperature": "hot"})),
    ("completions", ({"prompt": "a", "no_such_field": 1}, {"prompt": "a", "model": "absent"})),
    ("completions", ({"prompt": "a", "n": 0},)),
    ("chat/completions", ({"messages": []}, {"messages": [{"role": "user"}]}, {"messages": "hi"})),
    ("no/such/path", ({},)),
)


def is_error(value: Any) -> bool:
    """Whether a body is an error in OpenAI's form."""
    error = value.get("error") if isinstance(value, dict) else None
    return isinstance(error, dict) and set(error) >= _ERROR_FIELDS and bool(error["message"])


def draw_request(random: Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a sound request of random length."""
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": random.choice((1, 4, 16, 48)),
        "stream": random.random() < 0.6,
    }
    if random.random() < 0.3:
        body |= {"temperature": 1.0, "seed": random.randrange(100), "top_p": 0.9}
    if random.random() < 0.2:
        body["n"] = 2
    if random.random() < 0.2:
        body["stop"] = ["the", "."]
    if random.random() < 0.4:
        text = f"{random.choice(_SHARED)} {draw_words(random.randint(1, 20), random)}"
        return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    if random.random() < 0.2:
        body["logprobs"] = 2
    return "completions", body | {"prompt": draw_words(random.randint(1, 200), random)}


class Client:
    def __init__(self, http: httpx2.AsyncClient, tally: Tally, random: Random) -> None:
        self._http, self._tally, self._random = http, tally, random

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Asks until it is over; the last request is brought to its end."""
        while not is_over():
            kind = self._random.random()
            if kind < 0.15:
                await self.guarded(self._ask_badly())
            else:
                path, body = draw_request(self._random)
                goes = self._random.randint(0, 12) if kind < 0.35 else None
                await self.guarded(self.ask(path, body, goes_after=goes))

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Sees a request to its end, or notes what came instead."""
        try:
            async with asyncio.timeout(STUCK_S):
                await work
        except TimeoutError:
            self._tally.wrong.append(f"stuck: no end after {STUCK_S:g} s")
        except httpx2.HTTPError as error:
            self._tally.wrong.append(f"connection: {type(error).__name__}: {error}")

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        *,
        goes_after: int | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        if body["stream"]:
            await self._stream(path, body, goes_after, on_begun)
            return
        try:
            async with asyncio.timeout(None if goes_after is None else goes_after / 100):
                self._judge(await self._http.post(path, json=body))
        except TimeoutError:
            self._tally.counts["cancelled"] += 1

    async def _stream(
        self, path: str, body: dict[str, Any], goes_after: int | None, on_begun: Callable[[], None]
    ) -> None:
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._judge(response)
                return
            seen, failed, last = 0, False, ""
            async for event in httpx2.EventSource(response):
                on_begun()
                last = event.data
                if last == "[DONE]":
                    continue
                seen += 1
                chunk = json.loads(last)
                if "error" in chunk:
                    failed = True
                    self._judge_error(200, chunk)
                if goes_after is not None and seen > goes_after:
                    self._tally.counts["cancelled"] += 1
                    return
        if last != "[DONE]":
            self._tally.wrong.append(
                f"cut off after {seen} events, the last of which is {last:.80}"
            )
        elif not failed:
            self._tally.counts["answered"] += 1
            self._tally.tokens += seen

    def _judge(self, response: httpx2.Response) -> None:
        value = response.json()
        if response.status_code == 200:
            self._tally.counts["answered"] += 1
            self._tally.tokens += value["usage"]["completion_tokens"]
        else:
            self._judge_error(response.status_code, value)

    def _judge_error(self, status: int, value: Any) -> None:
        if not is_error(value):
            self._tally.wrong.append(f"status {status}, not in OpenAI's form: {value!r:.200}")
        elif "injected read error" in value["error"]["message"]:
            self._tally.counts["failed"] += 1
        else:
            self._tally.wrong.append(f"a sound request got status {status}: {value['error']}")

    async def _ask_badly(self) -> None:
        path, bodies = self._random.choice(_BAD)
        body = self._random.choice(bodies)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = await self._http.post(path, content=content, headers=headers)
        if 400 <= response.status_code < 500 and is_error(response.json()):
            self._tally.counts["refused"] += 1
        else:
            said = f"status {response.status_code}: {response.text:.200}"
            self._tally.wrong.append(f"a bad request to {path}, {content[:80]!r}, got {said}")


if __name__ == "__main__":
    sys.exit(main())
