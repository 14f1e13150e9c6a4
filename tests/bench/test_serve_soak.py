"""How the soak judges: memory that grows, answers that are none, promises that are not kept."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx2
import pytest
from virtual_time import Part, events, pieces, run_virtually, scripted

from moe_runtime.benchmarks.harness import soak_server
from moe_runtime.benchmarks.serve_soak import Client, Tally, draw_request, growth, is_error
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.memory.source import ExpertSource
from moe_runtime.types import ExpertKey

ERROR = {"message": "it failed", "type": "server_error", "param": None, "code": None}
INJECTED = {**ERROR, "message": "expert 1 of layer 2: injected read error"}
SECONDS, REQUESTS = 600, 3000


def samples(kept_bytes: float, *, warm_bytes: int = 0) -> list[tuple[float, int]]:
    """Ten minutes of five requests a second that keep so much each, in a megabyte of noise."""
    random = Random(1)
    return [
        (
            float(at_s),
            int(
                5e8
                + min(at_s / (SECONDS / 3), 1.0) * warm_bytes
                + at_s * REQUESTS / SECONDS * kept_bytes
                + random.gauss(0, 1e6)
            ),
        )
        for at_s in range(SECONDS)
    ]


@pytest.mark.parametrize(
    ("kept_bytes", "warm_bytes", "is_leak"),
    [(0, 0, False), (0, 50 << 20, False), (4096, 0, True), (4096, 50 << 20, True)],
)
def test_what_requests_keep_is_told_from_noise_and_from_warming_up(kept_bytes, warm_bytes, is_leak):
    """The noise moves the slope's bounds by far less than the kilobyte a request that is allowed:
    by some 1e6 / sqrt(400) bytes over 400 s, and 2000 requests are 2e6 bytes."""
    found = growth(samples(kept_bytes, warm_bytes=warm_bytes), REQUESTS)
    assert found["is_leak"] is is_leak
    rate = kept_bytes * REQUESTS / SECONDS
    assert found["bytes_per_s_low"] <= rate <= found["bytes_per_s_high"]


STREAM = {"stream": True, "prompt": "a"}
JUDGED: dict[str, tuple[Sequence[Part] | httpx2.Response, dict[str, int], str | None]] = {
    "whole": (pieces([0.1, 0.1]), {"answered": 1}, None),
    "cut off": (pieces([0.1, 0.1])[:-1], {}, "cut off after 3 events"),
    "read error": (events({"error": INJECTED}, "[DONE]"), {"failed": 1}, None),
    "other error": (events({"error": ERROR}, "[DONE]"), {}, "a sound request got status 200"),
    "early read error": (httpx2.Response(500, json={"error": INJECTED}), {"failed": 1}, None),
    "other form": (httpx2.Response(500, json={"detail": "no"}), {}, "status 500, not in OpenAI's"),
    "stuck": (pieces([0.1, 1000.0]), {}, "stuck: no end"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_answers_are_judged(name):
    script, counts, wrong = JUDGED[name]
    tally = Tally()

    async def work() -> None:
        async with scripted(lambda _: script) as http:
            client = Client(http, tally, Random(0))
            await client.guarded(client.ask("completions", STREAM))

    run_virtually(work)
    assert tally.counts == counts
    assert [line[: len(wrong or "")] for line in tally.wrong] == ([wrong] if wrong else [])


def test_clients_go_away_and_ask_for_what_cannot_be():
    """Of a server that answers everything, bad requests are what is wrong."""
    tally, asked = Tally(), []

    def script(body: dict[str, Any]) -> Any:
        asked.append(body)
        if not body.get("stream"):
            return httpx2.Response(200, json={"usage": {"completion_tokens": 1}})
        return pieces([0.01] * 20)

    async def work() -> None:
        async with scripted(script) as http:
            client = Client(http, tally, Random(0))
            await client.run(lambda: len(asked) >= 60)

    run_virtually(work)
    assert tally.counts["cancelled"] > 0
    assert tally.counts["answered"] > 20
    assert tally.wrong
    assert all(line.startswith("a bad request to ") for line in tally.wrong)


def test_sound_requests_are_of_all_kinds():
    random = Random(0)
    drawn = [draw_request(random) for _ in range(200)]
    assert {path for path, _ in drawn} == {"completions", "chat/completions"}
    fields = {name for _, body in drawn for name in body}
    assert {"n", "stop", "temperature", "logprobs", "prompt", "messages"} <= fields
    assert len({json.dumps(body) for _, body in drawn}) > 190
    assert is_error({"error": ERROR})
    assert not is_error({"error": "no"})


def test_an_expert_cannot_be_read_for_a_while(monkeypatch, capsys):
    """Its reads have the error when they end, however often they are tried again."""
    now_s = 0.0

    def fetch(source: Any, key: Any, slot: Any, read: Transfer) -> None:
        assert read.error is None
        read.end()

    monkeypatch.setattr(ExpertSource, "fetch", fetch)
    soak_server.fail_some_reads(3, lambda: now_s)
    keys = [ExpertKey(0, number) for number in range(5)]
    told: list[tuple[int, bool]] = []

    def read(key: ExpertKey) -> None:
        one = Transfer(Priority.DEMAND, lambda ended: told.append((key.expert, bool(ended.error))))
        ExpertSource.fetch(None, key, None, one)  # pyright: ignore[reportArgumentType]

    for number in (0, 1, 2, 2, 3):
        read(keys[number])
    now_s = soak_server.BROKEN_S
    read(keys[2])  # the sixth breaks it anew
    read(keys[4])
    now_s *= 2
    read(keys[2])
    assert told == [
        (0, False), (1, False), (2, True), (2, True), (3, False), (2, True), (4, False), (2, False)
    ]  # fmt: skip
    assert capsys.readouterr().err == '{"injected": [0, 2]}\n' * 3
