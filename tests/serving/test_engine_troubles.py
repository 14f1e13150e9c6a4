"""What goes wrong for one request changes nothing for the others, and nobody waits for ever."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of

import moe_runtime
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.inference.cache_copies import BlockCopies
from moe_runtime.memory.source import ExpertSource
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine, EngineHandle
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import (
    EngineClosedError,
    EngineOptions,
    Finished,
    NewToken,
    QueueFullError,
    RequestTooLongError,
    SamplingOptions,
)
from moe_runtime.types import ExpertKey

NEW = 24


@pytest.fixture(scope="module")
def texts(pocket: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [greedy(pocket, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("exact", [False, True])
def test_sequences_that_do_not_fit_together_are_computed_again_later(pocket, prompts, texts, exact):
    options = EngineOptions(exact=exact, prompt_tokens=16, idle_prompt_tokens=16)
    asked = [request_of(prompt, NEW, num_logprobs=0) for prompt in prompts]
    with Engine(pocket, options, max_tokens=128) as engine:
        answers = ask_all(engine, asked)
        drained(engine)
        found = engine.statistics()
    assert [answer.ids for answer in answers] == texts
    assert found.preemptions > 0
    assert found.kv_capacity == 128
    assert all(len(answer.events) == NEW + 3 for answer in answers), "nothing is told twice"
    with Engine(pocket, options) as engine:
        roomy = ask_all(engine, asked)
        assert engine.statistics().preemptions == 0
    if exact:
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in roomy]


def test_a_prefix_that_cannot_be_kept_fails_nobody(pocket, prompts, texts, monkeypatch):
    def copy(self: BlockCopies, cache: Any, index: int) -> Any:
        raise MemoryError("no memory for a block")

    with Engine(pocket) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(BlockCopies, "copy", copy)
            for _ in range(2):
                assert ask(engine, request_of(prompts[4], NEW))[0].wait().ids == texts[4]
        assert engine.statistics().prefix_tokens == 0
        found = [ask(engine, request_of(prompts[4], NEW))[0].wait() for _ in range(2)]
        assert [answer.ids for answer in found] == [texts[4]] * 2
        assert found[1].read.cached_tokens > 0
        drained(engine)


def test_cancelled_request_makes_place_for_others(pocket, prompts, texts):
    with Engine(pocket, EngineOptions(most_running=1)) as engine:
        running, handle = hold(engine, request_of(prompts[0], NEW))
        waiting, waiting_handle = ask(engine, request_of(prompts[1], NEW))
        third, _ = ask(engine, request_of(prompts[2], NEW))
        waiting_handle.cancel()
        handle.cancel()
        running.release()
        assert running.wait().finished == Finished("cancelled")
        assert len(running.ids) == 1
        assert waiting.wait().events == [Finished("cancelled")]
        assert third.wait().ids == texts[2]
        handle.cancel()
        drained(engine)
        assert engine.statistics().finished == {"cancelled": 2, "length": 1}


def test_whoever_cannot_hear_holds_nobody_up(pocket, prompts, texts):
    def deaf(event: Any) -> None:
        if isinstance(event, NewToken):
            raise ConnectionError("the client is gone")

    with Engine(pocket) as engine:
        engine.submit(request_of(prompts[0], NEW), deaf)
        answer = ask(engine, request_of(prompts[1], NEW))[0].wait()
        assert engine.drain(10.0)
        assert engine.statistics().finished == {"cancelled": 1, "length": 1}
    assert answer.ids == texts[1]


def test_queue_has_an_end(pocket, prompts):
    with Engine(pocket, EngineOptions(most_running=1, most_waiting=2)) as engine:
        held, _ = hold(engine, request_of(prompts[0], NEW))
        answers = [held, *(ask(engine, request_of(prompts[0], NEW))[0] for _ in range(2))]
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            ask(engine, request_of(prompts[0], NEW))
        assert not engine.drain(0.0)
        with pytest.raises(EngineClosedError, match="shutting down"):
            ask(engine, request_of(prompts[0], 1))
        held.release()
        assert engine.drain(60.0)
    assert [len(answer.ids) for answer in answers] == [NEW] * 3


def test_closing_engine_cancels_what_has_not_ended(pocket, prompts):
    engine = Engine(pocket, EngineOptions(most_running=1))
    held, _ = hold(engine, request_of(prompts[0], NEW))
    waiting, _ = ask(engine, request_of(prompts[1], NEW))
    closer = threading.Thread(target=engine.close)
    closer.start()
    while engine.is_open:
        closer.join(0.01)
    held.release()
    closer.join()
    assert held.finished == waiting.finished == Finished("cancelled", "the engine was closed")


def test_a_prompt_without_an_answer_may_have_all_positions(pocket, monkeypatch):
    positions = 100
    monkeypatch.setattr(pocket.config, "max_position_embeddings", positions)
    with Engine(pocket) as engine:
        answer, _ = ask(engine, request_of((3,) * positions, 0))
        assert answer.ids == []
        with pytest.raises(RequestTooLongError, match="needs room for 1 more"):
            ask(engine, request_of((3,) * positions, 1))
    with (
        Engine(pocket, max_tokens=64) as engine,
        pytest.raises(RequestTooLongError, match="needs room for 1 more"),
    ):
        ask(engine, request_of((3,) * 64, 0))


def test_what_cannot_be_answered_is_refused_at_once(pocket):
    with Engine(pocket, max_tokens=64) as engine:
        with pytest.raises(RequestTooLongError, match=r"60 tokens and .* 5 more, .* length is 64"):
            ask(engine, request_of((3,) * 60, 5))
        with pytest.raises(ValueError, match="token 4096 is none of the model's vocabulary"):
            ask(engine, request_of((4096,), 5))
        biased = SamplingOptions(logit_bias={5000: 1.0})
        with pytest.raises(ValueError, match="token 5000"):
            ask(engine, request_of((3,), 5, sampling=biased))
    with pytest.raises(ValueError, match="memory set aside for 512"):
        Engine(pocket, max_tokens=513)
    with pytest.raises(ValueError, match="prompt_tokens must be at least 1"):
        EngineOptions(prompt_tokens=0)


def test_constraint_that_fails_fails_its_own_request(pocket, prompts, texts):
    class Nothing:
        is_exhausted = False

        def allowed(self, generated_ids: Any) -> torch.Tensor | None:
            return torch.zeros(4096, dtype=torch.bool) if len(generated_ids) == 2 else None

    with Engine(pocket) as engine:
        failed, other = ask_all(
            engine, [request_of(prompts[0], NEW, constraint=Nothing()), request_of(prompts[1], NEW)]
        )
        engine.check()
    assert failed.ids == texts[0][:2]
    assert failed.finished == Finished(
        "error", "the constraint allows no token here", is_constrained=True
    )
    assert other.ids == texts[1]


def test_model_that_reads_a_text_to_write_another_is_refused():
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, num_experts=2
    )
    model = SwitchTransformersForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        Engine(model, max_tokens=64)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """Every cache that an engine makes, while nothing looks for cycles."""
    made: list[weakref.ref[Any]] = []
    real = ModelPasses.new_cache

    def new_cache(self: ModelPasses) -> Any:
        cache = real(self)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(ModelPasses, "new_cache", new_cache)
    gc.collect()
    gc.disable()
    try:
        yield made
    finally:
        gc.enable()


class AnswerWithHandle(Answer):
    handle: EngineHandle


def test_an_answered_request_is_let_go_of(pocket, prompts, caches):
    with Engine(pocket) as engine:
        for prompt in prompts:
            answer = AnswerWithHandle()
            answer.handle = engine.submit(request_of(prompt, 4), answer)
            answer.wait()
        asked = weakref.ref(answer)
        assert engine.drain(10.0)
        del answer
        assert asked() is None
        assert len(caches) >= len(prompts)
        assert not any(cache() for cache in caches)


def test_failed_read_fails_the_requests_that_need_it_and_no_other(monkeypatch, caches):
    real, asked = ExpertSource.fetch, [request_of((3 + 5 * i, 4 + i), 3) for i in range(8)]

    def fetch(self: ExpertSource, key: ExpertKey, *others: Any) -> None:
        if key == ExpertKey(2, 5):
            raise CheckpointError("expert 5 of layer 2 cannot be read")
        real(self, key, *others)

    model: Any = moe_runtime.load(
        pocket_path(), device="cpu", dtype="float32", host_memory="256MiB", max_tokens=256
    )
    with model.moe:
        with monkeypatch.context() as patch:
            patch.setattr(ExpertSource, "fetch", fetch)
            with Engine(model, EngineOptions(most_running=1)) as engine:
                alone = ask_all(engine, asked)
            with Engine(model) as engine:
                together = ask_all(engine, asked)
                drained(engine)
                assert not any(cache() for cache in caches), "a failed pass keeps no cache"
            model.moe.check()
        with Engine(model) as engine:
            sound = ask_all(engine, asked)
        model.moe.check()
    assert {answer.finished.reason for answer in alone} == {"error", "length"}
    assert [answer.finished for answer in together] == [answer.finished for answer in alone]
    assert {a.finished.message for a in together} == {None, "expert 5 of layer 2 cannot be read"}
    for one, other, whole in zip(alone, together, sound, strict=True):
        assert one.ids == other.ids == whole.ids[: len(one.ids)]
        assert whole.finished.reason == "length"
