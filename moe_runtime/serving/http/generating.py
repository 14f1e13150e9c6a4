"""One request to the server in the engine: its sequences, their pieces of text, and their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from moe_runtime.errors import MoERuntimeError
from moe_runtime.serving.engine import EngineHandle
from moe_runtime.serving.http.answer_text import AnswerText, Piece
from moe_runtime.serving.http.api_errors import ApiError, of_engine
from moe_runtime.serving.http.metrics import RequestTimes
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.requests import (
    Event,
    Finished,
    GenerationRequest,
    NewToken,
    PromptRead,
    Started,
)


def too_slow(limit_s: float) -> ApiError:
    """What is said of a request whose time is over."""
    return ApiError(
        f"the answer took longer than the {limit_s:g} seconds that a request may",
        status=408,
        code="timeout",
    )


@dataclass(slots=True)
class Usage:
    """Tokens of a request; each prompt counts once, however many answers it gets."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class AnswerChoice:
    """One answer of a request.

    Attributes:
        is_first: the first of the answers to its prompt.
        prompt: what became of the prompt; None until it was read.
    """

    request: GenerationRequest
    text: AnswerText
    is_first: bool
    prompt: PromptRead | None = None
    finished: bool = False


@dataclass(slots=True, weakref_slot=True, eq=False)
class Generation:
    """The answers to one request, while they are made.

    Attributes:
        deadline_s: when its time is over, by the loop's clock.
        failure: what cut short a stream whose status was sent already.
    """

    model: ServedModel
    choices: Sequence[AnswerChoice]
    times: RequestTimes
    limit_s: float
    deadline_s: float
    usage: Usage = field(default_factory=Usage)
    finish_reasons: list[str] = field(default_factory=list)
    failure: ApiError | None = None
    _events: asyncio.Queue[tuple[int, Event, float]] = field(default_factory=asyncio.Queue)
    _handles: list[EngineHandle] = field(default_factory=list)

    def submit(self) -> None:
        """Hands all sequences to the engine, or none."""
        loop = asyncio.get_running_loop()

        def listener(index: int):
            def hear(event: Event) -> None:
                # From the engine's thread, whose times count. A server that was stopped at once
                # hears nothing more.
                now_s = self.times.clock()
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, event, now_s))

            return hear

        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel)
            for index, choice in enumerate(self.choices):
                try:
                    handle = self.model.engine.submit(choice.request, listener(index))
                except (ValueError, MoERuntimeError) as error:
                    raise of_engine(error) from None
                self._handles.append(handle)
                if choice.is_first:
                    self.usage.prompt_tokens += len(choice.request.prompt_ids)
            undo.pop_all()

    def cancel(self) -> None:
        for handle, choice in zip(self._handles, self.choices, strict=False):
            if not choice.finished:
                handle.cancel()

    def shut_down(self) -> None:
        self.cancel()
        for index in range(len(self.choices)):
            self._events.put_nowait((index, Finished("cancelled"), self.times.clock()))

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all answers with their indices, as they come.

        Raises:
            ApiError: a step failed, or the time is over.
        """
        num_open = len(self.choices)
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.cancel)
            while num_open:
                index, event, now_s = await self._next()
                choice = self.choices[index]
                if choice.finished:
                    continue
                piece = self._take(index, choice, event, now_s)
                if piece is None:
                    continue
                if piece.finish is not None:
                    choice.finished = True
                    num_open -= 1
                    self._end(index, choice, piece.finish, now_s)
                yield index, piece

    async def _next(self) -> tuple[int, Event, float]:
        try:
            # Not `wait_for`, which forgets a cancellation that comes together with an event.
            async with asyncio.timeout_at(self.deadline_s):
                return await self._events.get()
        except TimeoutError:
            raise too_slow(self.limit_s) from None

    def _take(self, index: int, choice: AnswerChoice, event: Event, now_s: float) -> Piece | None:
        if isinstance(event, Started):
            self.times.started(index, now_s)
            return None
        if isinstance(event, PromptRead):
            choice.prompt = event
            if choice.is_first:
                self.usage.cached_tokens += event.cached_tokens
            return None
        if isinstance(event, NewToken):
            self.usage.completion_tokens += 1
            self.times.token(index, now_s)
            return choice.text.add(event)
        assert isinstance(event, Finished)
        if event.is_constrained:
            raise ApiError(
                f"the answer cannot be ended as it was asked for: {event.message}",
                param="response_format",
                code="invalid_grammar",
            )
        if event.reason == "error":
            problem = event.message or "the model failed"
            code = "generation_failed"
            raise ApiError(problem, status=500, code=code, logged=event.problem)
        if event.reason == "cancelled":
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        return choice.text.end(event.reason)

    def _end(self, index: int, choice: AnswerChoice, reason: str, now_s: float) -> None:
        self.finish_reasons.append(reason)
        num_prompt = len(choice.request.prompt_ids)
        self.times.ended(index, now_s, num_prompt, choice.text.num_tokens, reason)
        # Where a stop string ended it, the engine does not know yet.
        self._handles[index].cancel()
