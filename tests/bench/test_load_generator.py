"""The load generator against servers whose every delay is known, in time that nobody waits for."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx2
import pytest
from counted_energy import CountedEnergy
from virtual_time import Part, events, pieces, run_virtually, scripted

from moe_runtime.benchmarks.cases.load import (
    Lengths,
    Level,
    LoadClient,
    LoadError,
    LoadRequest,
    LoadSettings,
    MeasuredLevel,
    TimedAnswer,
    arrivals,
    parse_goodput,
    parse_lengths,
    run_level,
    run_load,
    summarize,
)
from moe_runtime.benchmarks.cases.serve import serve_results

NEAR = 1e-6
"""Seconds; the loop's clock adds up waits, each rounded to a float of some seconds."""
Script = Callable[[dict[str, Any]], Sequence[Part] | httpx2.Response]


def measured_level(
    script: Script,
    level: Level,
    *,
    num_requests: int,
    times: Sequence[float] = (),
    stop_after: int = 10**6,
    timeout_s: float = 100.0,
) -> MeasuredLevel:
    """Requests "0", "1" and so on to a script."""

    async def work() -> MeasuredLevel:
        answers: list[TimedAnswer] = []
        async with scripted(script) as http:
            client = LoadClient(http, chat=False, fields={}, timeout_s=timeout_s)
            return await run_level(
                client.ask,
                [LoadRequest(str(number), 8) for number in range(num_requests)],
                level,
                times,
                on_answer=lambda _, so_far: answers.append(so_far[-1]),
                is_stopping=lambda: len(answers) >= stop_after,
            )

    return run_virtually(work)


def test_every_figure_is_that_of_the_delays():
    """Two clients and four answers: first tokens after 0.1 to 0.4 s, then gaps of 10 and 30 ms."""

    def script(body: dict[str, Any]) -> Sequence[Part]:
        return pieces([0.1 * (int(body["prompt"]) + 1), 0.01, 0.03], prompt_tokens=50)

    measured = measured_level(script, Level(2, None), num_requests=4)
    row = summarize(measured, parse_goodput("ttft=250ms,itl=20.5ms,e2e=1s"))
    # One client has requests 0 and 2 or 3, the other the rest: 0.14 + 0.34 and 0.24 + 0.44 s.
    assert row["seconds"] == pytest.approx(0.68, abs=NEAR)
    assert (row["answered"], row["failed"], row["unfinished"]) == (4, 0, 0)
    assert (row["input_tokens"], row["output_tokens"], row["are_tokens_counted"]) == (200, 12, True)
    assert row["requests_per_s"] == pytest.approx(4 / 0.68, rel=NEAR)
    assert row["input_tokens_per_s"] == pytest.approx(200 / 0.68, rel=NEAR)
    assert row["output_tokens_per_s"] == pytest.approx(12 / 0.68, rel=NEAR)
    assert row["total_tokens_per_s"] == pytest.approx(212 / 0.68, rel=NEAR)
    for name, values in {
        "time_to_first_token_s": [0.1, 0.2, 0.3, 0.4],
        "inter_token_s": [0.01, 0.03] * 4,
        "time_per_output_token_s": [0.02] * 4,
        "end_to_end_s": [0.14, 0.24, 0.34, 0.44],
    }.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert row[name] == pytest.approx(
            {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]},
            abs=NEAR,
        )
    assert row["goodput"]["share"] == 0.5
    assert row["goodput"]["requests_per_s"] == pytest.approx(2 / 0.68, rel=NEAR)
    results = serve_results([measured], {}, settings={}, is_interrupted=False)
    (level,) = results["measurements"]
    sent = sorted(one["sent_s"] for one in level["repetitions"] if "sent_s" in one)
    assert sent == pytest.approx([0, 0, 0.14, 0.24], abs=NEAR)


@pytest.mark.parametrize("chat", [False, True])
def test_turns_go_on_from_the_answers_before_them(chat):
    asked: list[Any] = []

    def script(body: dict[str, Any]) -> Sequence[Part]:
        asked.append(body["messages"] if chat else body["prompt"])
        part = {"delta": {"content": "so"}} if chat else {"text": "so"}
        return events({"choices": [part]}, "[DONE]", waits_s=[0.5 / len(asked)])

    async def work() -> MeasuredLevel:
        async with scripted(script) as http:
            client = LoadClient(http, chat=chat, fields={}, timeout_s=100.0)
            return await run_level(
                client.ask,
                [LoadRequest("one", 8, later=(" two", " three"))],
                Level(1, None),
                (),
                on_answer=lambda *_: None,
                is_stopping=lambda: False,
            )

    measured = run_virtually(work)
    row = summarize(measured, {})
    if chat:
        texts, roles = ["one", "so", " two", "so", " three"], ["user", "assistant"] * 3
        said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        assert asked == [said[:1], said[:3], said]
    else:
        assert asked == ["one", "oneso two", "oneso twoso three"]
    assert (row["requests"], row["answered"]) == (3, 3)
    assert row["time_to_first_token_s"]["mean"] == pytest.approx(0.5, abs=NEAR)
    assert row["later_first_token_s"]["mean"] == pytest.approx((0.25 + 0.5 / 3) / 2, abs=NEAR)


def test_an_open_loop_waits_for_nobody():
    """Answers take 10 s, and requests still go out as they arrive."""
    times = arrivals(6, 2.0, Random(1))
    measured = measured_level(
        lambda body: pieces([10.0]), Level(None, 2.0), num_requests=6, times=times
    )
    sent = [answer.sent_s - measured.began_s for answer in measured.answers]
    assert sent == pytest.approx(times, abs=NEAR)
    assert measured.seconds == pytest.approx(times[-1] + 10.0, abs=NEAR)


def test_arrivals_are_a_poisson_process():
    times = arrivals(4001, 8.0, Random(0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert (times[0], times) == (0.0, arrivals(4001, 8.0, Random(0)))
    # The mean of 4000 exponential gaps of mean and deviation 1/8, to five of its deviations; the
    # deviation of such gaps' deviation is sqrt(2) times that of their mean.
    error = 5 * (1 / 8) / math.sqrt(4000)
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, abs=error)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, abs=math.sqrt(2) * error)


TEXT = {"choices": [{"text": "a"}]}
FAILURES: dict[str, tuple[Script, str, str]] = {
    "refused": (
        lambda _: httpx2.Response(429, json={"error": {"message": "too many wait"}}),
        "HTTP 429",
        "too many wait",
    ),
    "proxy": (lambda _: httpx2.Response(502, text="<html>\n bad"), "HTTP 502", "<html> bad"),
    "late error": (
        lambda _: events(TEXT, {"error": {"message": "a read failed"}}, "[DONE]"),
        "error in the stream",
        "a read failed",
    ),
    "cut off": (lambda _: events(TEXT), "cut off", "the stream ended without [DONE]"),
    "empty": (lambda _: events("[DONE]"), "no text", "the answer is empty"),
    "no JSON": (lambda _: events("{"), "not understood", "{: "),
    "a list": (lambda _: events("[1]"), "not understood", "[1]: "),
    "deep": (lambda _: events("[" * 100_000), "not understood", "[[["),
    **{
        f"{count} tokens": (
            lambda _, usage=usage: events(f'{{"choices": [], "usage": {usage}}}'),
            "not understood",
            '{"choices": []',
        )
        for count, usage in (
            (count, f'{{"prompt_tokens": 3, "completion_tokens": {count}}}')
            for count in ("1e400", "-1", '"5"', "2.5")
        )
    },
    "slow": (lambda _: pieces([3.0, 3.0]), "timed out", "not whole after 5 s"),
    "whole": (lambda _: httpx2.Response(200, json=TEXT), "no event stream", "Expected response"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_told_apart(name):
    script, kind, message = FAILURES[name]
    measured = measured_level(script, Level(1, None), num_requests=2, timeout_s=5.0)
    row = summarize(measured, {"ttft": 1.0})
    assert (row["answered"], row["failed"], row["output_tokens"]) == (0, 2, 0)
    assert row["errors"][kind]["count"] == 2
    assert row["errors"][kind]["first"].startswith(message)
    assert row["time_to_first_token_s"] is row["end_to_end_s"] is None
    assert row["goodput"]["share"] == 0.0


def test_an_answer_that_says_why_it_ends_is_whole():
    """transformers' own server sends no [DONE] behind it."""
    last = {"choices": [{"text": "b", "finish_reason": "length"}]}
    measured = measured_level(lambda _: events(TEXT, last), Level(1, None), num_requests=2)
    assert (summarize(measured, {})["answered"], measured.answers[0].output_tokens) == (2, 2)


def test_a_lost_connection_is_a_failure_of_its_own():
    def lost(body: dict[str, Any]) -> Any:
        raise (httpx2.ConnectError if body["prompt"] == "0" else httpx2.ReadError)("gone")

    row = summarize(measured_level(lost, Level(1, None), num_requests=3), {})
    assert {kind: error["count"] for kind, error in row["errors"].items()} == {
        "no connection": 1,
        "connection lost": 2,
    }


def test_a_server_that_does_not_count_tokens_is_said_to_be_one():
    measured = measured_level(
        lambda _: events(TEXT, TEXT, TEXT, "[DONE]"), Level(1, None), num_requests=1
    )
    row = summarize(measured, {})
    assert (row["output_tokens"], row["are_tokens_counted"]) == (3, False)


def test_a_stop_leaves_what_was_measured():
    """The third answer comes at 3 s and is the last that counts; two are on their way."""
    measured = measured_level(
        lambda body: pieces([1.0]), Level(1, None), num_requests=10, stop_after=3
    )
    row = summarize(measured, {})
    assert (row["answered"], row["unfinished"]) == (3, 7)
    # It looks twenty times a second.
    assert 3.0 <= row["seconds"] <= 3.05 + NEAR


def settings(**changes: Any) -> LoadSettings:
    given: dict[str, Any] = {
        **{"url": "http://scripted", "key": None, "model": None, "chat": False},
        **{"ignore_eos": True, "timeout_s": 9.0, "levels": [Level(2, None), Level(None, 5.0)]},
        **{"num_requests": 6, "prompt": Lengths(40, 90), "output": Lengths(3, 7)},
        **{"texts": (), "seed": 1, **changes},
    }
    return LoadSettings(**given)


def asked_with(
    chosen: LoadSettings,
    script: Script,
    meters: Sequence[Any] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[str, list[MeasuredLevel], list[Any]]:
    """What was asked, the first small requests included."""
    asked: list[Any] = []

    def note(body: dict[str, Any]) -> Any:
        asked.append(body)
        return script(body)

    async def work() -> tuple[str, list[MeasuredLevel]]:
        async with scripted(note) as http:
            client = LoadClient(http, chat=chosen.chat, fields={"temperature": 0}, timeout_s=9.0)
            return await run_load(
                client, chosen, on_answer=lambda *_: None, is_stopping=is_stopping, meters=meters
            )

    return *run_virtually(work), asked


def test_joules_are_those_of_a_level():
    """Not of the small requests before it; there are none of a server elsewhere."""
    asked = list[Any]()

    def script(body: dict[str, Any]) -> Sequence[Part]:
        asked.append(body)
        return pieces([0.1] * body["max_tokens"], prompt_tokens=9)

    meter: Any = CountedEnergy(lambda: 0.5 * len(asked))
    _, found, _ = asked_with(settings(num_warm_up=3), script, [meter])
    assert [measured.counts for measured in found] == [{"cpu_joules": 3.0}, {"cpu_joules": 3.0}]
    assert summarize(found[0], {})["cpu_joules"] == 3.0
    _, found, _ = asked_with(settings(), script)
    assert [measured.counts for measured in found] == [{}, {}]
    assert "cpu_joules" not in summarize(found[0], {})


def test_a_server_is_warmed_up_and_its_models_asked_in_turn():
    """With requests that no level repeats; the model of each is the next."""

    def script(body: dict[str, Any]) -> Sequence[Part]:
        return pieces([0.1] * body["max_tokens"], prompt_tokens=9)

    name, found, asked = asked_with(settings(model="a,b", num_warm_up=5), script)
    assert name == "a,b"
    assert len(asked) == 2 + 5 + 2 * 6
    assert [body["model"] for body in asked] == [*"ab" * 9, "a"]
    assert len({body["prompt"] for body in asked}) == len(asked)
    assert [len(measured.answers) for measured in found] == [6, 6]


def test_prompts_have_the_tokens_asked_for_as_the_server_counts_them():
    """This server makes three tokens of a word, and puts eleven around them."""

    def script(body: dict[str, Any]) -> Sequence[Part]:
        words = len(body["messages"][0]["content"].split())
        return pieces([0.1] * body["max_tokens"], prompt_tokens=3 * words + 11)

    model, found, asked = asked_with(settings(chat=True), script)
    assert (model, len(found), len(asked)) == ("scripted", 2, 2 + 12)
    answers = [answer for measured in found for answer in measured.answers]
    # A prompt has whole words, so it may have one token more or less than was drawn.
    assert all(39 <= answer.prompt_tokens <= 91 for answer in answers)
    assert all(3 <= answer.output_tokens <= 7 for answer in answers)
    assert len({answer.prompt_tokens for answer in answers}) > 3
    texts = [body["messages"][0]["content"] for body in asked]
    assert len({" ".join(text.split()[:8]) for text in texts}) == len(texts)
    assert {body["model"] for body in asked} == {"scripted"}
    assert all(body["stream"] and body["stream_options"]["include_usage"] for body in asked)
    again = asked_with(settings(chat=True), script)[2]
    assert again == asked
    assert asked_with(settings(chat=True, seed=2), script)[2] != asked


def test_own_prompts_are_sent_in_turn():
    """The first request has the last prompt: a server that keeps prefixes has not theirs then."""
    chosen = settings(texts=["one", "two"], num_requests=3, levels=[Level(1, None)])
    asked = asked_with(chosen, lambda body: pieces([0.1]))[2]
    assert [body["prompt"] for body in asked] == ["two", "one", "two", "one"]


def test_a_server_that_refuses_the_first_request_is_not_measured():
    with pytest.raises(LoadError, match=r"a first request failed: HTTP 400: no such field"):
        asked_with(
            settings(), lambda _: httpx2.Response(400, json={"error": {"message": "no such field"}})
        )


@pytest.mark.parametrize("model", [None, "named"])
def test_a_stop_before_the_first_answer_waits_for_nobody(model):
    """The server would take an hour for each first request; it is stopped at the third look."""
    looks = itertools.count()
    name, found, asked = asked_with(
        settings(model=model), lambda body: pieces([3600.0]), is_stopping=lambda: next(looks) >= 2
    )
    assert (found, len(asked)) == ([], 1)
    assert name == (model or "")


@pytest.mark.parametrize("text", ["", "0", "5:4", "a", "1:2:3", "-1", "9999999", "1.5"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="--it must be a number of tokens or LOW:HIGH"):
        parse_lengths(text, "--it")


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=0ms", "tttf=5ms", "e2e=1s,e2e=2s"])
def test_bounds_that_are_none_are_refused(text):
    assert parse_goodput("ttft=200ms,e2e=1.5s") == {"ttft": 0.2, "e2e": 1.5}
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput(text)
