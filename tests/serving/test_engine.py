"""Texts of the engine are the model's own, alone and beside others, however prompts are cut."""

import math
from typing import Any

import pytest
import torch
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of

import moe_runtime
from moe_runtime.inference.steps import Listener, Step
from moe_runtime.lab.traces.format import read_trace
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import EngineOptions

NEW = 8


@pytest.fixture(scope="module")
def texts(pocket: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [greedy(pocket, prompt, NEW) for prompt in prompts]


def requests_of(prompts: list[tuple[int, ...]], **options: Any) -> list[Any]:
    return [request_of(prompt, NEW, **options) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(exact=True),
        EngineOptions(prompt_tokens=7, idle_prompt_tokens=9, reuses_prefixes=False),
        EngineOptions(prompt_tokens=7, exact=True),
        EngineOptions(most_running=2),
    ],
    ids=["default", "exact", "short-steps", "exact-short-steps", "two-at-a-time"],
)
def test_greedy_texts_of_mixed_lengths_are_those_of_generate(pocket, prompts, texts, options):
    with Engine(pocket, options) as engine:
        together = ask_all(engine, requests_of(prompts))
        alone = [ask(engine, request)[0].wait() for request in requests_of(prompts[:2])]
        drained(engine)
        found = engine.statistics()
    assert [answer.ids for answer in (*together, *alone)] == [*texts, *texts[:2]]
    assert found.finished == {"length": 7}
    assert found.generated_tokens == 7 * NEW
    assert found.prompt_tokens == sum(map(len, (*prompts, *prompts[:2])))
    assert found.kv_tokens == found.prefix_tokens


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_is_read_in_the_passes_of_an_answer(pocket, prompts, exact):
    options = EngineOptions(
        prompt_tokens=16, max_slowdown=math.inf, reuses_prefixes=False, exact=exact
    )
    with Engine(pocket, options) as engine:
        held, _ = hold(engine, request_of(prompts[0], NEW))
        before = engine.statistics().steps
        arrived, _ = ask(engine, request_of(prompts[4], 1))
        held.release()
        assert held.wait().ids == greedy(pocket, prompts[0], NEW)
        assert arrived.wait().ids == greedy(pocket, prompts[4], 1)
        assert engine.statistics().steps - before == NEW - 1 + 3 * exact


def test_exact_text_has_the_same_bits_alone_and_beside_others(pocket, prompts):
    asked = requests_of(prompts, num_logprobs=3)
    found: list[list[Answer]] = []
    for most in (32, 1):
        options = EngineOptions(exact=True, most_running=most, prompt_tokens=16)
        with Engine(pocket, options) as engine:
            found.append(ask_all(engine, asked))
    beside, alone = found
    assert [a.tokens for a in beside] == [a.tokens for a in alone]


def test_log_probabilities_are_the_models(pocket, prompts):
    prompt = prompts[1]
    asked = request_of(prompt, 4, num_logprobs=2, num_prompt_logprobs=1)
    with Engine(pocket, EngineOptions(idle_prompt_tokens=10)) as engine:
        # the second time nothing is taken from the prefixes: all of the prompt must be computed
        answers = [ask(engine, asked)[0].wait() for _ in range(2)]
    text = torch.tensor([[*prompt, *answers[0].ids]])
    with torch.no_grad():
        expected = torch.log_softmax(pocket(text).logits[0].double(), dim=-1)
    for answer in answers:
        logprobs = answer.read.logprobs
        assert logprobs is not None
        assert logprobs[0] is None
        assert len(logprobs) == len(prompt)
        assert answer.read.cached_tokens == 0
        told = [*logprobs[1:], *answer.tokens]
        for row, told_of in enumerate(told):
            token = int(text[0, row + 1])
            top = told_of.top_logprobs if row >= len(prompt) - 1 else told_of.top
            # fp32 logits below 100, of sums in another order: 1e-4 is 8 bits above their rounding
            assert told_of.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
            best = expected[row].topk(len(top))
            assert [pair[0] for pair in top] == best.indices.tolist()
            assert [pair[1] for pair in top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [len(token.top_logprobs) for token in answer.tokens] == [2] * 4


def test_logits_of_a_prompt_fit_into_what_is_set_aside_for_activations(pocket, monkeypatch):
    kept: list[int] = []
    call = ModelPasses._call

    def spied(self: ModelPasses, ids: Any, cache: Any, *, keep: Any, **options: Any) -> Any:
        kept.append(keep)
        return call(self, ids, cache, keep=keep, **options)

    prompt = tuple(range(2, 402))
    with Engine(pocket) as engine:
        monkeypatch.setattr(ModelPasses, "_call", spied)
        answer = ask(engine, request_of(prompt, 1, num_prompt_logprobs=0))[0].wait()
    assert answer.read.logprobs is not None
    assert len(answer.read.logprobs) == len(prompt)
    config = pocket.config
    activations = config.hidden_size * (12 * 4 + config.num_experts_per_tok * 4)
    assert sum(kept) == len(prompt)
    assert max(kept) * (activations + 4 * config.vocab_size) <= 512 * activations


def test_answer_stops_at_a_stop_token_behind_the_least_length(pocket, prompts, texts):
    text = texts[1]
    stop = frozenset([text[3]])
    first = text.index(text[3])
    with Engine(pocket) as engine:
        plain, longer = ask_all(
            engine,
            [
                request_of(prompts[1], NEW, stop_ids=stop),
                request_of(prompts[1], NEW, stop_ids=stop, min_new_tokens=first + 1),
            ],
        )
    assert plain.ids == text[: first + 1]
    assert plain.finished.reason == "stop"
    assert longer.ids[:first] == text[:first]
    assert longer.ids[first] != text[first]


def test_requests_go_by_priority_then_by_arrival(pocket, prompts):
    order: list[int] = []
    with Engine(pocket, EngineOptions(most_running=1)) as engine:
        busy, _ = hold(engine, request_of(prompts[0], 1))
        for index, priority in enumerate((0, 1, 0, 1)):
            answer = Answer()

            def on_event(event: Any, answer: Answer = answer, index: int = index) -> None:
                answer(event)
                if event == answer.events[0]:
                    order.append(index)

            engine.submit(request_of(prompts[2], 1, priority=priority), on_event)
        busy.release()
        assert engine.drain(60.0)
    assert order == [1, 3, 0, 2]


class Ends(Listener):
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []

    def begin(self, step: Step) -> None:
        self.begun.extend(step.begun)
        self.ended.extend(step.ended)


def test_trace_of_an_engine_has_the_tokens_of_each_request_together(tmp_path):
    path, heard = tmp_path / "served.npz", Ends()
    model: Any = moe_runtime.load(pocket_path(), device="cpu", max_tokens=256, trace=path)
    prompts = [(5, 70, 11, 13), (9,), tuple(range(20, 31))]
    with model.moe:
        options = EngineOptions(reuses_prefixes=False, idle_prompt_tokens=8, prompt_tokens=3)
        with Engine(model, options) as engine, model._steps.listeners.also(heard):
            answers = ask_all(engine, [request_of(prompt, 5) for prompt in prompts])
            last, _ = ask(engine, request_of((3, 4), 2))
            answers.append(last.wait())
    trace = read_trace(path)
    found: dict[int, list[int]] = {}
    for token, request in zip(trace.token_id.tolist(), trace.token_request.tolist(), strict=True):
        found.setdefault(request, []).append(token)
    for prompt, answer in zip([*prompts, (3, 4)], answers, strict=True):
        # the last token of an answer is never computed
        assert [*prompt, *answer.ids[:-1]] in list(found.values())
    # what tells the engine whether sequences can go together is no request, and is not recorded
    assert len(found) == 4
    assert heard.begun == [0, 1, 2, 3]
    assert sorted(heard.ended) == [0, 1, 2], "the last one ended with no pass behind it"
