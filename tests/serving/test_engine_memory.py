"""What a request held goes with its end, and does not wait for Python to look for cycles."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from engine_events import Answer, ask_all, request_of

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.memory.source import ExpertSource
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine, EngineHandle
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.types import ExpertKey


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


def test_an_answered_request_is_let_go_of(
    pocket: Any, prompts: list[tuple[int, ...]], caches: list[weakref.ref[Any]]
) -> None:
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


def test_a_failed_pass_keeps_no_cache(
    monkeypatch: pytest.MonkeyPatch, caches: list[weakref.ref[Any]]
) -> None:
    real = ExpertSource.fetch

    def fetch(self: ExpertSource, key: ExpertKey, *others: Any) -> None:
        if key == ExpertKey(2, 5):
            raise CheckpointError("expert 5 of layer 2 cannot be read")
        real(self, key, *others)

    monkeypatch.setattr(ExpertSource, "fetch", fetch)
    model: Any = moe_runtime.load(
        pocket_path(), device="cpu", dtype="float32", host_memory="256MiB", max_tokens=256
    )
    with model.moe, Engine(model) as engine:
        answers = ask_all(engine, [request_of((3 + 5 * i, 4 + i), 3) for i in range(8)])
        assert engine.drain(10.0)
        assert {answer.finished.reason for answer in answers} == {"error", "length"}
        assert not any(cache() for cache in caches)
