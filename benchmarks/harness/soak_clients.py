"""Clients of a soak: what they ask, when they go away, and how each answer is judged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2

from moe_runtime.benchmarks.load.workload import draw_words

MODEL = "soaked"
STUCK_S = 120.0
"""A request that takes longer is stuck; those that are asked take a second or two."""
_ERROR_FIELDS = {"message", "type", "param", "code"}
_SHARED = [draw_words(40 * number, Random(number)) for number in range(1, 4)]
"""What conversations begin with, as system prompts do."""
_BAD: tuple[tuple[str, Any], ...] = (
    ("completions", b"{"),
    ("completions", []),
    ("completions", {"prompt": 5}),
    ("completions", {"prompt": "a", "max_tokens": -1}),
    ("completions", {"prompt": "a", "temperature": "hot"}),
    ("completions", {"prompt": "a", "no_such_field": 1}),
    ("completions", {"prompt": "a", "model": "absent"}),
    ("completions", {"prompt": "word " * 20000}),
    ("completions", {"prompt": [-1, 10**9]}),
    ("completions", {"prompt": "a", "n": 0}),
    ("chat/completions", {"messages": []}),
    ("chat/completions", {"messages": [{"role": "user"}]}),
    ("chat/completions", {"messages": "hello"}),
    ("no/such/path", {}),
)


@dataclass
class Tally:
    """What became of requests.

    Attributes:
        counts: of answered, cancelled, refused and failed requests, by those words.
        wrong: what should not have been: one line each.
        tokens: that were generated for whole answers.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0


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
    """One client, which asks one thing after the other.

    Args:
        http: connections to the server's ``v1/``.
        tally: filled.
        random: decides what is asked.
        has_failures: whether reads fail, so that sound requests may fail too.
    """

    def __init__(
        self, http: httpx2.AsyncClient, tally: Tally, random: Random, *, has_failures: bool
    ) -> None:
        self._http = http
        self._tally = tally
        self._random = random
        self._has_failures = has_failures

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
        """A sound request.

        Args:
            path: below ``v1/``.
            body: as JSON.
            goes_after: events after which the connection is closed, if they come; a request that is
                not streamed is left after as many hundredths of a second.
            on_begun: called with each event.
        """
        if body["stream"]:
            await self._stream(path, body, goes_after, on_begun)
        elif goes_after is not None:
            try:
                async with asyncio.timeout(goes_after / 100):
                    self._judge(await self._http.post(path, json=body))
            except TimeoutError:
                self._tally.counts["cancelled"] += 1
        else:
            self._judge(await self._http.post(path, json=body))

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
        elif self._has_failures and "injected read error" in value["error"]["message"]:
            self._tally.counts["failed"] += 1
        else:
            self._tally.wrong.append(f"a sound request got status {status}: {value['error']}")

    async def _ask_badly(self) -> None:
        path, body = self._random.choice(_BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = await self._http.post(path, content=content, headers=headers)
        if 400 <= response.status_code < 500 and is_error(response.json()):
            self._tally.counts["refused"] += 1
        else:
            said = f"status {response.status_code}: {response.text:.200}"
            self._tally.wrong.append(f"a bad request to {path}, {content[:80]!r}, got {said}")
