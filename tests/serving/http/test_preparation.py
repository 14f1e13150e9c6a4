"""Requests that are made ready for the engine: their time counts, and the end ends them."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_server import ScriptedEngine, model_of, served

from moe_runtime.serving.http import completions
from moe_runtime.serving.http.server import Limits
from moe_runtime.serving.requests import Finished, PromptRead

BODY = {"prompt": [5, 6], "max_tokens": 3}


class SlowPreparation:
    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._real = completions.prepare

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return self._real(*args)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPreparation]:
    found = SlowPreparation()
    monkeypatch.setattr(completions, "prepare", found)
    yield found
    found.may_end.set()


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])


def test_the_time_of_a_request_begins_with_its_arrival(
    tokenizer: Any, slow: SlowPreparation
) -> None:
    with served([model_of("pocket", engine(), tokenizer, 4096)], Limits(seconds=0.05)) as site:
        status, found = site.ask("/v1/completions", BODY)
        assert not slow.may_end.is_set()
        slow.may_end.set()
    assert (status, found["error"]["code"]) == (408, "timeout")


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_prepared_when_the_server_ends_is_told_so(
    tokenizer: Any, slow: SlowPreparation, stream: bool
) -> None:
    scripted = engine()
    with contextlib.ExitStack() as serving, ThreadPoolExecutor(2) as threads:
        models = [model_of("pocket", scripted, tokenizer, 4096)]
        site = serving.enter_context(served(models, drain_s=0))
        asked = threads.submit(site.ask, "/v1/completions", {**BODY, "stream": stream})
        assert slow.begun.wait(60)
        ending = threads.submit(serving.close)
        status, found = asked.result(60)
        slow.may_end.set()
        ending.result(60)
    assert (status, found["error"]["code"]) == (503, "shutting_down")
    assert not scripted.asked.is_set()
