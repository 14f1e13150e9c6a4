"""What an engine tells of a request, kept for a test to look at."""

import threading
from typing import Any

import torch

from moe_runtime.serving.engine import Engine, EngineHandle
from moe_runtime.serving.requests import Event, Finished, GenerationRequest, NewToken, PromptRead

PATIENCE_S = 600.0
"""Longer than anything here takes; a test that waits so long has failed."""


class Answer:
    """The events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._begun = threading.Event()
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, NewToken):
            self._begun.set()
        if isinstance(event, Finished):
            self._ended.set()

    def wait(self) -> "Answer":
        assert self._ended.wait(PATIENCE_S), self.events
        return self

    def wait_for_a_token(self) -> "Answer":
        assert self._begun.wait(PATIENCE_S), self.events
        return self

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, NewToken)]

    @property
    def tokens(self) -> list[NewToken]:
        return [event for event in self.events if isinstance(event, NewToken)]

    @property
    def read(self) -> PromptRead:
        (event,) = (event for event in self.events if isinstance(event, PromptRead))
        return event

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]


class Held(Answer):
    """Holds the engine up at the first token until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._released = threading.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, NewToken):
            assert self._released.wait(PATIENCE_S)

    def release(self) -> None:
        self._released.set()


def hold(engine: Engine, request: GenerationRequest) -> tuple[Held, EngineHandle]:
    """The engine has begun with a request, and goes on when it is released."""
    held = Held()
    handle = engine.submit(request, held)
    held.wait_for_a_token()
    return held, handle


def request_of(prompt: tuple[int, ...], new_tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, max_new_tokens=new_tokens, **options)


def ask(engine: Engine, request: GenerationRequest) -> tuple[Answer, EngineHandle]:
    answer = Answer()
    return answer, engine.submit(request, answer)


def ask_all(engine: Engine, requests: list[GenerationRequest]) -> list[Answer]:
    """All at a time; their answers when they have ended."""
    answers = [ask(engine, request)[0] for request in requests]
    return [answer.wait() for answer in answers]


def drained(engine: Engine) -> None:
    """All requests have ended, and lists and room agree."""
    assert engine.drain(60.0)
    engine.check()


def greedy(model: Any, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """What the model itself generates, end-of-text tokens like others."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()
