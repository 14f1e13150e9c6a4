"""Requests in flight, so many at a time or as they arrive, and the figures of a level."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_runtime.benchmarks.load.client import (
    Lengths,
    LoadClient,
    LoadError,
    LoadRequest,
    TimedAnswer,
    TokenCount,
    arrivals,
    connect,
    draw_words,
    is_this_machine,
    make_requests,
)
from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.config import nearest

_LOOK_S = 0.05
_PROBE_WORDS = (16, 48)


class Meter(Protocol):
    """Counts something while a level is measured, as `EnergyMeter` does."""

    def measured(self) -> AbstractContextManager[Mapping[str, float]]:
        """Of a block: what was counted, by metric, once the block has ended."""
        ...


class Level(NamedTuple):
    """How hard a server is pressed; one of the two is None."""

    concurrency: int | None
    rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    url: str
    key: str | None
    model: str | None
    chat: bool
    ignore_eos: bool
    timeout_s: float
    levels: Sequence[Level]
    num_requests: int
    prompt: Lengths
    output: Lengths
    texts: Sequence[str]
    seed: int
    num_warm_up: int = 0
    num_turns: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    level: Level
    began_s: float
    seconds: float
    num_requests: int
    answers: list[TimedAnswer]
    counts: Mapping[str, float] = field(default_factory=dict)


OnAnswer = Callable[[Level, list[TimedAnswer]], None]


def measure(
    settings: LoadSettings,
    *,
    on_answer: OnAnswer,
    is_stopping: Callable[[], bool],
    meters: Sequence[Meter] = (),
) -> tuple[str, list[MeasuredLevel]]:
    """Measures every level; `run_load` over connections of its own."""

    async def run() -> tuple[str, list[MeasuredLevel]]:
        async with connect(settings.url, settings.key) as http:
            fields = {"temperature": 0.0} | ({"ignore_eos": True} if settings.ignore_eos else {})
            rest = {"chat": settings.chat, "timeout_s": settings.timeout_s}
            client = LoadClient(http, fields=fields, **rest)
            all_meters = [*meters, *[EnergyMeter()] * is_this_machine(http.base_url.host)]
            given = {"on_answer": on_answer, "is_stopping": is_stopping}
            return await run_load(client, settings, meters=all_meters, **given)

    return asyncio.run(run())


async def run_load(
    client: LoadClient,
    settings: LoadSettings,
    *,
    on_answer: OnAnswer,
    is_stopping: Callable[[], bool],
    meters: Sequence[Meter] = (),
) -> tuple[str, list[MeasuredLevel]]:
    first = asyncio.ensure_future(_first_requests(client, settings))
    if await _run([first], is_stopping):
        return settings.model or "", []
    model, count = first.result()
    found: list[MeasuredLevel] = []

    async def level_of(level: Level, number: int, size: int, on_answer: OnAnswer) -> MeasuredLevel:
        # Each level asks what no level before it asked, so that no prefix cache knows it.
        random = Random(f"{settings.seed} {number}")
        given = settings.prompt, settings.output, count, settings.texts, random
        requests = make_requests(size, *given, settings.num_turns)
        times = [] if level.rate is None else arrivals(len(requests), level.rate, random)
        return await run_level(
            client.ask, requests, level, times, on_answer=on_answer, is_stopping=is_stopping
        )

    if settings.num_warm_up:
        hardest = max(settings.levels, key=lambda one: one.concurrency or one.rate or 0.0)
        await level_of(hardest, -1, settings.num_warm_up, lambda *_: None)
    for number, level in enumerate(settings.levels):
        if is_stopping():
            break
        with ExitStack() as stack:
            counted = [stack.enter_context(meter.measured()) for meter in meters]
            measured = await level_of(level, number, settings.num_requests, on_answer)
        counts = {name: value for one in counted for name, value in one.items()}
        found.append(replace(measured, counts=counts))
    return model, found


async def run_level(
    ask: Callable[[LoadRequest], Awaitable[TimedAnswer]],
    requests: Sequence[LoadRequest],
    level: Level,
    times: Sequence[float],
    *,
    on_answer: OnAnswer,
    is_stopping: Callable[[], bool],
) -> MeasuredLevel:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answers: list[TimedAnswer] = []

    async def one(request: LoadRequest) -> None:
        while True:
            answer = await ask(request)
            answers.append(answer)
            on_answer(level, answers)
            if not request.later or answer.error is not None:
                return
            request = request.next_turn(answer.text)

    async def client_of(rest: Iterator[LoadRequest]) -> None:
        for request in rest:
            await one(request)

    async def arrive(request: LoadRequest, at_s: float) -> None:
        await asyncio.sleep(began_s + at_s - loop.time())
        await one(request)

    if level.concurrency is not None:
        rest = iter(requests)
        work = [client_of(rest) for _ in range(min(level.concurrency, len(requests)))]
    else:
        work = [arrive(request, at_s) for request, at_s in zip(requests, times, strict=True)]
    tasks = [asyncio.ensure_future(one_of) for one_of in work]
    pending = await _run(tasks, is_stopping)
    for task in tasks:
        if not task.cancelled():
            task.result()
    last_s = loop.time() if pending else max(answer.ended_s for answer in answers)
    num_requests = sum(1 + len(request.later) for request in requests)
    return MeasuredLevel(level, began_s, last_s - began_s, num_requests, answers)


async def _run(
    tasks: Sequence[asyncio.Task[Any]], is_stopping: Callable[[], bool]
) -> set[asyncio.Task[Any]]:
    """Waits for all of them; gives those that a stop cut off."""
    pending = set(tasks)
    while pending and not is_stopping():
        _, pending = await asyncio.wait(pending, timeout=_LOOK_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return pending


async def _first_requests(client: LoadClient, settings: LoadSettings) -> tuple[str, TokenCount]:
    """The model's name and what it makes of words: asks for a token or so after two prompts, and
    compares what the server counts in them."""
    model = settings.model or await client.first_model()
    client.choose(model)
    random, counts = Random(f"{settings.seed} probe"), []
    # the last one is asked last: servers that keep prefixes answer the level's first ones cold
    texts = settings.texts[-1:] or [draw_words(words, random) for words in _PROBE_WORDS]
    for text in texts:
        # One token may be half a character, which has no text yet.
        answer = await client.ask(LoadRequest(text, min(settings.output.high, 8)))
        if answer.error is not None and answer.error != "no text":
            raise LoadError(f"a first request failed: {answer.error}: {answer.message}")
        counts.append((len(text.split()), answer.prompt_tokens))
    return model, TokenCount() if settings.texts else TokenCount.of(*counts)


_PERCENTILES = (50, 90, 99)
_UNITS = {"ms": 1e-3, "s": 1.0}
_BOUNDED = ("ttft", "itl", "e2e")


def parse_goodput(text: str) -> dict[str, float]:
    """Reads bounds such as ``ttft=200ms,itl=50ms,e2e=2s``, in seconds."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)=([0-9]*\.?[0-9]+)(ms|s)\s*", part)
        if found is None or not float(found[2]):
            raise ValueError(
                f"--goodput must be bounds such as ttft=200ms,itl=50ms,e2e=2s, got {part!r}"
            )
        name = found[1]
        if name not in _BOUNDED:
            raise ValueError(f"--goodput: unknown bound {name!r}; {nearest(name, _BOUNDED)}")
        if name in bounds:
            raise ValueError(f"--goodput has {name} twice; give one bound for it")
        bounds[name] = float(found[2]) * _UNITS[found[3]]
    return bounds


def summarize(measured: MeasuredLevel, bounds: Mapping[str, float]) -> dict[str, Any]:
    """A level as a JSON object; lengths of time are in seconds."""
    good = [answer for answer in measured.answers if answer.error is None]
    seconds = measured.seconds
    tokens_in = sum(answer.prompt_tokens for answer in good)
    tokens_out = sum(answer.output_tokens for answer in good)
    per_token = [answer.per_token_s for answer in good]
    row: dict[str, Any] = {
        **measured.level._asdict(),
        "requests": measured.num_requests,
        "answered": len(good),
        "failed": len(measured.answers) - len(good),
        "unfinished": measured.num_requests - len(measured.answers),
        "errors": errors_by_kind(measured.answers),
        "seconds": seconds,
        "requests_per_s": _rate(len(good), seconds),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "input_tokens_per_s": _rate(tokens_in, seconds),
        "output_tokens_per_s": _rate(tokens_out, seconds),
        "total_tokens_per_s": _rate(tokens_in + tokens_out, seconds),
        "are_tokens_counted": all(answer.is_counted for answer in good),
        "time_to_first_token_s": spread(one.first_token_s for one in good if not one.turn),
        "later_first_token_s": spread(one.first_token_s for one in good if one.turn),
        "inter_token_s": spread(gap for answer in good for gap in answer.gaps_s),
        "time_per_output_token_s": spread(value for value in per_token if value is not None),
        "end_to_end_s": spread(answer.whole_s for answer in good),
        **measured.counts,
    }
    if bounds:
        within = sum(_is_within(answer, bounds) for answer in good)
        row["goodput"] = {
            "bounds_s": dict(bounds),
            "requests": within,
            "share": within / len(measured.answers) if measured.answers else None,
            "requests_per_s": _rate(within, seconds),
        }
    return row


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles, between two values by a straight line; None where there are none."""
    found = np.fromiter(values, np.float64)
    if not found.size:
        return None
    percentiles = np.percentile(found, _PERCENTILES)
    return {"mean": float(found.mean())} | {
        f"p{percent}": float(value)
        for percent, value in zip(_PERCENTILES, percentiles, strict=True)
    }


def errors_by_kind(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, Any]]:
    """How many failures of each kind there were, and what the first one said."""
    kinds: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if answer.error is not None:
            kind = kinds.setdefault(answer.error, {"count": 0, "first": answer.message})
            kind["count"] += 1
    return kinds


def _is_within(answer: TimedAnswer, bounds: Mapping[str, float]) -> bool:
    per_token_s = answer.per_token_s
    took = {"ttft": answer.first_token_s, "itl": per_token_s or 0.0, "e2e": answer.whole_s}
    return all(took[name] <= bound for name, bound in bounds.items())


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
