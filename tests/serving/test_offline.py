"""Requests that nobody waits for: their texts, the order of work, and how much room they take."""

import threading
from typing import Any

import pytest
from engine_events import PATIENCE_S, greedy, request_of

from moe_runtime.serving.batches.offline import Answer, answer_all, order_of_work
from moe_runtime.serving.prefixes import LEAST_SHARED
from moe_runtime.serving.requests import (
    EngineOptions,
    EngineStatistics,
    GenerationRequest,
    NewToken,
)
from moe_runtime.serving.sampling import Sampler
from moe_runtime.serving.scheduling import Sequence

NEW = 12


def answer(
    pocket: Any, requests: dict[int, GenerationRequest], **options: Any
) -> tuple[dict[int, Answer], EngineStatistics]:
    found: dict[int, Answer] = {}
    statistics = answer_all(
        pocket,
        requests,
        EngineOptions(**options),
        on_token=lambda number, token: False,
        on_answer=found.__setitem__,
    )
    return found, statistics


def test_texts_are_those_of_generate_and_steps_are_shared(pocket, prompts):
    requests = {n: request_of(prompt, NEW + n) for n, prompt in enumerate(prompts)}
    found, statistics = answer(pocket, requests)
    for number, prompt in enumerate(prompts):
        assert found[number].token_ids == greedy(pocket, prompt, NEW + number)
        assert found[number].reason == "length"
    # alone, each takes a step for each token
    assert statistics.steps <= NEW + len(prompts) + 3 < len(prompts) * NEW


def test_nobody_loses_room_to_another_where_memory_is_short(pocket):
    """Four requests of 130 tokens where 512 fit: the last one begins later, and none twice."""
    requests = {n: request_of(tuple(range(n + 2, n + 112)), 20) for n in range(4)}
    found, statistics = answer(pocket, requests, reuses_prefixes=False)
    assert len(found) == 4
    assert statistics.preemptions == 0


def test_most_work_goes_first_and_prompts_that_begin_alike_go_together():
    shared = tuple(range(LEAST_SHARED))
    requests = {
        0: request_of((1,), 5),
        1: request_of((*shared, 9), 5),
        2: request_of((1,), 200),
        3: request_of((*shared, 3), 5),
        4: request_of((1, 2), 4),
    }
    assert order_of_work(requests) == [2, 3, 1, 0, 4]


def test_an_answer_that_the_caller_finds_over_ends_there(pocket, prompts):
    requests = {n: request_of(prompt, NEW) for n, prompt in enumerate(prompts[:2])}
    found: dict[int, Answer] = {}
    fourth = greedy(pocket, prompts[1], 4)
    answer_all(
        pocket,
        requests,
        EngineOptions(),
        on_token=lambda number, token: number == 1 and fourth.pop(0) >= 0 and not fourth,
        on_answer=found.__setitem__,
    )
    assert (len(found[0].token_ids), found[0].reason) == (NEW, "length")
    assert (found[1].token_ids, found[1].reason) == (greedy(pocket, prompts[1], 4), "stop")


@pytest.fixture
def has_ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event = threading.Event()
    real = Sequence.finish

    def finish(self: Sequence, *words: Any, **options: Any) -> None:
        real(self, *words, **options)
        event.set()

    monkeypatch.setattr(Sequence, "finish", finish)
    return event


def test_answers_that_were_done_before_an_interrupt_are_reported(pocket, prompts, has_ended):
    found: dict[int, Answer] = {}

    def interrupt(number: int, token: NewToken) -> bool:
        if number:
            return False
        assert has_ended.wait(PATIENCE_S)
        raise KeyboardInterrupt

    requests = {0: request_of(prompts[0], 400), 1: request_of(prompts[1], 1)}
    with pytest.raises(KeyboardInterrupt):
        answer_all(
            pocket, requests, EngineOptions(), on_token=interrupt, on_answer=found.__setitem__
        )
    assert found.keys() == {1}


def test_an_answer_that_an_interrupt_left_by_half_is_not_reported(pocket, prompts, has_ended):
    found: dict[int, Answer] = {}
    seen: list[NewToken] = []

    def interrupt(number: int, token: NewToken) -> bool:
        seen.append(token)
        if len(seen) == 2:
            assert has_ended.wait(PATIENCE_S)
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        answer_all(
            pocket,
            {0: request_of(prompts[0], NEW)},
            EngineOptions(),
            on_token=interrupt,
            on_answer=found.__setitem__,
        )
    assert not found


def test_a_request_that_fails_fails_alone(pocket, prompts, monkeypatch):
    real = Sampler.choose

    def choose(self: Any, logits: Any, answer_ids: Any) -> Any:
        if len(answer_ids) == 2 and self._request.max_new_tokens == NEW + 1:
            raise RuntimeError("a read failed") from OSError(5, "Input/output error")
        return real(self, logits, answer_ids)

    monkeypatch.setattr(Sampler, "choose", choose)
    requests = {n: request_of(prompt, NEW + n) for n, prompt in enumerate(prompts[:3])}
    found, _ = answer(pocket, requests)
    assert [found[n].reason for n in range(3)] == ["length", "error", "length"]
    # Who runs a file of prompts may know what an error came from.
    assert found[1].message == "a read failed ([Errno 5] Input/output error)"
