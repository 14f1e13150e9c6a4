"""The load on a server: requests at a fixed concurrency or rate, and their latencies.

Answers are streamed, and the arrival of each piece is timed.
"""

import asyncio
import ipaddress
import itertools
import json
import re
from collections import ChainMap, Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import httpx2
import numpy as np

from moe_runtime.benchmarks.suite import Number
from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.config import nearest
from moe_runtime.errors import MoERuntimeError

_MOST_TOKENS = 1 << 20
_WORDS = """
    the of and to in that is was he for it with as his on be at by had not are but from or have
    an they which one you were her all she there would their we him been has when who will more
    no if out so said what up its about into than them can only other new some could time these
    two may then do first any my now such like our over man me even most made after also did many
"""
"""Common English words, mostly single tokens."""


class Lengths(NamedTuple):
    """A number of tokens, drawn uniformly from `low` to `high`."""

    low: int
    high: int


def parse_lengths(text: str, name: str) -> Lengths:
    """Parse ``N`` or ``LOW:HIGH``."""
    found = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise ValueError(
            f"{name} must be a number of tokens or LOW:HIGH, from 1 to {_MOST_TOKENS}, got {text!r}"
        )
    return Lengths(low, high)


class LoadRequest(NamedTuple):
    """A request. ``said`` holds earlier prompts and answers in turn, ``later`` the prompts of later
    turns."""

    prompt: str
    max_tokens: int
    said: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def next_turn(self, answer: str) -> "LoadRequest":
        prompt, *later = self.later
        return LoadRequest(prompt, self.max_tokens, (*self.said, self.prompt, answer), tuple(later))


class TokenCount(NamedTuple):
    """The server's tokens per word, found by two short requests."""

    per_word: float = 1.0
    around: float = 0.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> "TokenCount":
        """From words and tokens of two prompts; one token per word if they make no sense."""
        per_word = (long[1] - short[1]) / max(long[0] - short[0], 1)
        return cls(per_word, max(short[1] - per_word * short[0], 0.0)) if per_word > 0 else cls()

    def words(self, tokens: int) -> int:
        """The number of words that comes closest to ``tokens``; at least one."""
        return max(round((tokens - self.around) / self.per_word), 1)


def draw_words(count: int, random: Random) -> str:
    """Random words; no two texts begin alike except by chance."""
    return " ".join(random.choices(_WORDS.split(), k=count))


def make_requests(
    num_requests: int,
    prompt: Lengths,
    output: Lengths,
    count: TokenCount,
    texts: Sequence[str],
    random: Random,
    num_turns: int = 1,
) -> list[LoadRequest]:
    """Requests with ``texts`` in turn, or with random words. Later turns are as long as answers."""
    found = []
    for number in range(num_requests):
        drawn = count.words(random.randint(*prompt)) if not texts else 0
        text = texts[number % len(texts)] if texts else draw_words(drawn, random)
        size = random.randint(*output)
        later = [f" {draw_words(count.words(size), random)}" for _ in range(num_turns - 1)]
        found.append(LoadRequest(text, size, later=tuple(later)))
    return found


def arrivals(num_requests: int, rate: float, random: Random) -> list[float]:
    """Arrival times of a Poisson process in seconds; the first is 0."""
    gaps = (random.expovariate(rate) for _ in range(num_requests - 1))
    return [*itertools.accumulate(gaps, initial=0.0)]


_CONNECT_S = 30.0
_LONGEST_MESSAGE = 300
_MOST_COUNTED = 1 << 40
_NOT_THE_API = (ValueError, KeyError, TypeError, RecursionError)
"""Errors of reading a response that is not JSON or not OpenAI's API."""
_TEXTS = ("text", "content", "reasoning_content", "reasoning", "tool_calls")


class LoadError(MoERuntimeError):
    """A server cannot be measured: it does not answer, or refuses the requests."""


@dataclass(slots=True)
class TimedAnswer:
    """The outcome of one request. Times are those of the event loop, in seconds."""

    sent_s: float
    ended_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = False
    is_finished: bool = False
    error: str | None = None
    message: str = ""
    turn: int = 0
    text: str = ""

    @property
    def first_token_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces."""
        return [after - before for before, after in itertools.pairwise(self.pieces_s)]

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        others = self.output_tokens - 1
        return (self.pieces_s[-1] - self.pieces_s[0]) / others if others > 0 else None


class RequestFailed(Exception):
    """A request failed: an error status, a broken stream, or an empty answer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = " ".join(message.split())[:_LONGEST_MESSAGE]


class LoadClient:
    """A client of OpenAI's API, with any number of requests in flight."""

    def __init__(
        self, http: httpx2.AsyncClient, *, chat: bool, fields: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._http = http
        self._chat = chat
        self._fields = dict(fields)
        self._timeout_s = timeout_s
        self._models: Iterator[str] = iter(())

    async def first_model(self) -> str:
        url = self._http.base_url
        try:
            response = await self._http.get("models", timeout=self._timeout_s)
            if response.status_code != 200:
                raise _refusal(response)
            return str(response.json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            said = ": ".join(filter(None, (_kind(error), str(error))))
            raise LoadError(f"{url}: {said}") from None
        except RequestFailed as failure:
            raise LoadError(f"{url}: {failure.kind}: {failure.message}") from None
        except (*_NOT_THE_API, IndexError):
            raise LoadError(
                f"{url}models does not list models as OpenAI's API does; give the address of that "
                "API, or --model"
            ) from None

    def choose(self, model: str) -> None:
        """Use this model for all further requests; several, separated by commas, take turns."""
        self._models = itertools.cycle(model.split(","))

    async def ask(self, request: LoadRequest) -> TimedAnswer:
        """Send a request and read its whole answer. A failure is recorded in the result."""
        loop = asyncio.get_running_loop()
        answer = TimedAnswer(loop.time(), turn=len(request.said) // 2)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(request, answer)
        except TimeoutError:
            answer.error = "timed out"
            answer.message = f"not whole after {self._timeout_s:g} s"
        except httpx2.HTTPError as error:
            answer.error, answer.message = _kind(error), str(error)
        except RequestFailed as failure:
            answer.error, answer.message = failure.kind, failure.message
        answer.ended_s = loop.time()
        return answer

    async def _stream(self, request: LoadRequest, answer: TimedAnswer) -> None:
        loop = asyncio.get_running_loop()
        texts = *request.said, request.prompt
        path, prompt = "completions", {"prompt": "".join(texts)}
        if self._chat:
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": next(roles), "content": text} for text in texts]
            path, prompt = "chat/completions", {"messages": messages}
        body = {**self._fields, **prompt, "max_tokens": request.max_tokens, "stream": True}
        body |= {"model": model} if (model := next(self._models, None)) else {}
        body["stream_options"] = {"include_usage": True}
        async with self._http.stream(
            "POST", path, json=body, timeout=httpx2.Timeout(None, connect=_CONNECT_S)
        ) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response)
            is_whole = False
            async for event in httpx2.EventSource(response):
                is_whole = event.data.strip() == "[DONE]"
                if is_whole:
                    break
                _take(event.data, answer, loop.time())
        if not (is_whole or answer.is_finished):
            raise RequestFailed("cut off", "the stream ended without [DONE]")
        if not answer.pieces_s:
            raise RequestFailed("no text", "the answer is empty")
        if not answer.is_counted:
            answer.output_tokens = len(answer.pieces_s)


def connect(url: str, key: str | None) -> httpx2.AsyncClient:
    """Connect to a server, without a proxy and without a limit on connections."""
    address = address_of(url)
    path = address.path.rstrip("/")
    return httpx2.AsyncClient(
        base_url=address.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"),
        headers={"authorization": f"Bearer {key}"} if key else {},
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        # a proxy would be measured too
        trust_env=False,
    )


def address_of(url: str) -> httpx2.URL:
    """Parse and check a server's address."""
    try:
        address = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise LoadError(f"--url {url}: {error}") from None
    is_port = address.port is None or 0 < address.port < 1 << 16
    if address.scheme not in ("http", "https") or not address.host or not is_port:
        raise LoadError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
    return address


def is_this_machine(host: str) -> bool:
    """Whether a host name means this machine, as ``localhost`` and 127.0.0.1 do."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _take(data: str, answer: TimedAnswer, now_s: float) -> None:
    """Record one event of a stream."""
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise RequestFailed("error in the stream", _message(chunk["error"]))
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if usage:
            answer.prompt_tokens = _tokens(usage["prompt_tokens"])
            answer.output_tokens = _tokens(usage["completion_tokens"])
            answer.is_counted = True
        answer.is_finished |= any(choice.get("finish_reason") for choice in choices or ())
        parts = [choice.get("delta") or choice for choice in choices or ()]
        if any(part.get(name) for part in parts for name in _TEXTS):
            answer.pieces_s.append(now_s)
        answer.text += "".join(part.get("text") or part.get("content") or "" for part in parts)
    except (*_NOT_THE_API, AttributeError) as error:
        raise RequestFailed("not understood", f"{data:.100}: {error}") from None


def _tokens(value: Any) -> int:
    """A token count from JSON."""
    if type(value) is not int or not 0 <= value <= _MOST_COUNTED:
        raise ValueError(f"expected a number of tokens, got {value!r:.40}")
    return value


def _refusal(response: httpx2.Response) -> RequestFailed:
    kind = f"HTTP {response.status_code}"
    try:
        return RequestFailed(kind, _message(response.json()["error"]))
    except _NOT_THE_API:
        return RequestFailed(kind, response.text)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _kind(error: httpx2.HTTPError) -> str:
    """The name of a connection error."""
    if isinstance(error, httpx2.TimeoutException):
        return "timed out"
    if isinstance(error, httpx2.SSEError):
        return "no event stream"
    return "no connection" if isinstance(error, httpx2.ConnectError) else "connection lost"


_LOOK_S = 0.05
_PROBE_WORDS = (16, 48)


class Level(NamedTuple):
    """The load on a server; one of the two is None."""

    concurrency: int | None
    rate: float | None

    def __str__(self) -> str:
        if self.concurrency is None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} at a time"


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
    meters: Sequence[Any] = (),
) -> tuple[str, list[MeasuredLevel]]:
    """Measure all levels with connections of its own, by `run_load`.

    Args:
        meters: context managers that count while a level is measured, such as `EnergyMeter`.
    """

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
    meters: Sequence[Any] = (),
) -> tuple[str, list[MeasuredLevel]]:
    first = asyncio.ensure_future(_first_requests(client, settings))
    if await _run([first], is_stopping):
        return settings.model or "", []
    model, count = first.result()
    found: list[MeasuredLevel] = []

    async def level_of(level: Level, number: int, size: int, on_answer: OnAnswer) -> MeasuredLevel:
        # Each level sends new prompts, which no prefix cache knows.
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
        found.append(replace(measured, counts=dict(ChainMap(*counted))))
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
    """Wait for all tasks; return those cut off by a stop."""
    pending = set(tasks)
    while pending and not is_stopping():
        _, pending = await asyncio.wait(pending, timeout=_LOOK_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return pending


async def _first_requests(client: LoadClient, settings: LoadSettings) -> tuple[str, TokenCount]:
    """The model's name and the tokens per word, from one short request for each of two prompts."""
    model = settings.model or await client.first_model()
    client.choose(model)
    random, counts = Random(f"{settings.seed} probe"), []
    # the last text comes last, so that prefix caches do not know the first ones of a level
    texts = settings.texts[-1:] or [draw_words(words, random) for words in _PROBE_WORDS]
    for text in texts:
        # One token may be half a character, which has no text yet.
        answer = await client.ask(LoadRequest(text, min(settings.output.high, 8)))
        if answer.error is not None and answer.error != "no text":
            raise LoadError(f"a first request failed: {answer.error}: {answer.message}")
        counts.append((len(text.split()), answer.prompt_tokens))
    return model, TokenCount() if settings.texts else TokenCount.of(*counts)


SPREADS = (
    *("time_to_first_token_s", "later_first_token_s", "inter_token_s"),
    *("time_per_output_token_s", "end_to_end_s"),
)
_UNITS = {"ms": 1e-3, "s": 1.0}
_BOUNDED = ("ttft", "itl", "e2e")


def parse_goodput(text: str) -> dict[str, float]:
    """Parse bounds such as ``ttft=200ms,itl=50ms,e2e=2s``, in seconds."""
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
    """A level as a JSON object; times are in seconds."""
    good = [answer for answer in measured.answers if answer.error is None]
    seconds = measured.seconds
    tokens_in = sum(answer.prompt_tokens for answer in good)
    tokens_out = sum(answer.output_tokens for answer in good)
    every = [numbers_of(answer, measured.began_s) for answer in good]
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
        **{name: spread([one[name] for one in every if name in one]) for name in SPREADS},
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


def numbers_of(answer: TimedAnswer, began_s: float) -> dict[str, Number]:
    """The metrics of `bench serve` for one answer, `SPREADS` included."""
    found: dict[str, Number] = {
        "sent_s": answer.sent_s - began_s,
        "end_to_end_s": answer.whole_s,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
    }
    if answer.pieces_s:
        found[SPREADS[answer.turn > 0]] = answer.first_token_s
    if answer.gaps_s:
        found["inter_token_s"] = answer.gaps_s
    if answer.per_token_s is not None:
        found["time_per_output_token_s"] = answer.per_token_s
    return found


def spread(values: Sequence[Number]) -> dict[str, float] | None:
    """Mean and interpolated percentiles; None for no values."""
    if not values:
        return None
    found = np.concatenate([np.atleast_1d(one) for one in values])
    percents = {f"p{percent}": float(np.percentile(found, percent)) for percent in (50, 90, 99)}
    return {"mean": float(found.mean())} | percents


def errors_by_kind(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, Any]]:
    """The number of failures of each kind, with the first message."""
    kinds = Counter(answer.error for answer in answers if answer.error is not None)
    first = {answer.error: answer.message for answer in reversed(answers)}
    return {kind: {"count": count, "first": first[kind]} for kind, count in kinds.items()}


def _is_within(answer: TimedAnswer, bounds: Mapping[str, float]) -> bool:
    per_token_s = answer.per_token_s
    took = {"ttft": answer.first_token_s, "itl": per_token_s or 0.0, "e2e": answer.whole_s}
    return all(took[name] <= bound for name, bound in bounds.items())


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
