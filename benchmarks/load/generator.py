"""Requests in flight: so many at a time, or as they arrive whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Protocol

from moe_runtime.benchmarks.load.client import (
    LoadClient,
    LoadError,
    TimedAnswer,
    connect,
    is_this_machine,
)
from moe_runtime.benchmarks.load.workload import (
    Lengths,
    LoadRequest,
    TokenCount,
    arrivals,
    draw_words,
    make_requests,
)
from moe_runtime.benchmarks.suite.energy import EnergyMeter

_LOOK_S = 0.05
_PROBE_WORDS = (16, 48)


class Meter(Protocol):
    """Counts something while a level is measured, as `EnergyMeter` does."""

    def measured(self) -> AbstractContextManager[Mapping[str, float]]:
        """Of a block: what was counted, by metric, once the block has ended."""
        ...


class Level(NamedTuple):
    """How hard a server is pressed; one of the two is None.

    Attributes:
        concurrency: clients, each of which asks again when it has its answer: a closed loop.
        rate: requests that arrive in a second, however many are being answered: an open loop.
    """

    concurrency: int | None
    rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """What is measured.

    Attributes:
        url: of the server, with or without ``/v1``.
        key: for it; None where it wants none.
        model: None for the server's first one; of several, with commas between, each request asks
            the next.
        chat: asks for conversations, else for texts.
        ignore_eos: answers have all the tokens they may have; servers that do not know the field
            refuse it.
        timeout_s: seconds that a request may take.
        levels: one after the other.
        num_requests: of each level.
        num_warm_up: requests that come before the first level, as hard as the hardest.
        prompt: tokens of prompts.
        output: tokens of answers.
        texts: prompts to send instead of drawn ones.
        seed: of all that is drawn.
    """

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


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """What became of a level's requests.

    Attributes:
        level: that it was.
        began_s: when, by the event loop's clock.
        seconds: until the last answer, or until it was stopped.
        num_requests: that were to be sent.
        answers: in the order in which they ended; those cut off by a stop are missing.
        counts: what meters counted meanwhile, by metric.
    """

    level: Level
    began_s: float
    seconds: float
    num_requests: int
    answers: list[TimedAnswer]
    counts: Mapping[str, float] = field(default_factory=dict)


def measure(
    settings: LoadSettings,
    *,
    on_answer: Callable[[Level, list[TimedAnswer]], None],
    is_stopping: Callable[[], bool],
    meters: Sequence[Meter] = (),
) -> tuple[str, list[MeasuredLevel]]:
    """Measures every level; `run_load` over connections of its own.

    Joules of this machine are counted too, if the server runs on it.

    Raises:
        LoadError: the address is none, the server is not there, or it refuses a first request.
    """

    async def run() -> tuple[str, list[MeasuredLevel]]:
        async with connect(settings.url, settings.key) as http:
            fields = {"temperature": 0.0} | ({"ignore_eos": True} if settings.ignore_eos else {})
            client = LoadClient(
                http, chat=settings.chat, fields=fields, timeout_s=settings.timeout_s
            )
            return await run_load(
                client,
                settings,
                on_answer=on_answer,
                is_stopping=is_stopping,
                meters=[*meters, *([EnergyMeter()] if is_this_machine(http.base_url.host) else [])],
            )

    return asyncio.run(run())


async def run_load(
    client: LoadClient,
    settings: LoadSettings,
    *,
    on_answer: Callable[[Level, list[TimedAnswer]], None],
    is_stopping: Callable[[], bool],
    meters: Sequence[Meter] = (),
) -> tuple[str, list[MeasuredLevel]]:
    """Measures every level.

    Args:
        client: asks.
        settings: what to measure.
        on_answer: called with the answers so far whenever one has come.
        is_stopping: whether to leave the rest; looked at all the time.
        meters: count while a level is measured.

    Returns:
        The model's name, empty where it did not come to that, and what was measured, as far as it
        came.

    Raises:
        LoadError: the server is not there, or refuses a first small request.
    """
    first = asyncio.ensure_future(_first_requests(client, settings))
    if await _run([first], is_stopping):
        return settings.model or "", []
    model, count = first.result()
    found: list[MeasuredLevel] = []

    async def level_of(
        level: Level, number: int, size: int, on_answer: Callable[[Level, list[TimedAnswer]], None]
    ) -> MeasuredLevel:
        # Each level asks what no level before it asked, so that no prefix cache knows it.
        random = Random(f"{settings.seed} {number}")
        requests = make_requests(
            size,
            prompt=settings.prompt,
            output=settings.output,
            count=count,
            texts=settings.texts,
            random=random,
        )
        times = [] if level.rate is None else arrivals(len(requests), level.rate, random)
        return await run_level(
            client.ask, requests, level, times, on_answer=on_answer, is_stopping=is_stopping
        )

    if settings.num_warm_up:
        await level_of(max(settings.levels, key=_hardness), -1, settings.num_warm_up, _unheard)
    for number, level in enumerate(settings.levels):
        if is_stopping():
            break
        with ExitStack() as stack:
            counted = [stack.enter_context(meter.measured()) for meter in meters]
            measured = await level_of(level, number, settings.num_requests, on_answer)
        counts = {name: value for one in counted for name, value in one.items()}
        found.append(replace(measured, counts=counts))
    return model, found


def _hardness(level: Level) -> float:
    return level.concurrency or level.rate or 0.0


def _unheard(level: Level, answers: list[TimedAnswer]) -> None:
    del level, answers


async def run_level(
    ask: Callable[[LoadRequest], Awaitable[TimedAnswer]],
    requests: Sequence[LoadRequest],
    level: Level,
    times: Sequence[float],
    *,
    on_answer: Callable[[Level, list[TimedAnswer]], None],
    is_stopping: Callable[[], bool],
) -> MeasuredLevel:
    """Sends the requests of a level.

    Args:
        ask: sends one.
        requests: all.
        level: in a closed loop, how many at a time.
        times: in an open loop, seconds from the start at which each is sent.
        on_answer: as of `run_load`.
        is_stopping: likewise.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answers: list[TimedAnswer] = []

    async def one(request: LoadRequest) -> None:
        answers.append(await ask(request))
        on_answer(level, answers)

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
    return MeasuredLevel(level, began_s, last_s - began_s, len(requests), answers)


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
    """The model's name and what it makes of words."""
    model = settings.model or await client.first_model()
    client.choose(model)
    return model, await _count_tokens(client, settings)


async def _count_tokens(client: LoadClient, settings: LoadSettings) -> TokenCount:
    """Asks for one token each after two prompts, and compares what the server counts in them."""
    random = Random(f"{settings.seed} probe")
    counts = []
    # the last one is asked last: servers that keep prefixes answer the level's first ones cold
    texts = settings.texts[-1:] or [draw_words(words, random) for words in _PROBE_WORDS]
    for text in texts:
        # One token may be half a character, which has no text yet.
        answer = await client.ask(LoadRequest(text, min(settings.output.high, 8)))
        if answer.error is not None and answer.error != "no text":
            raise LoadError(f"a first request failed: {answer.error}: {answer.message}")
        counts.append((len(text.split()), answer.prompt_tokens))
    return TokenCount() if settings.texts else TokenCount.of(*counts)
