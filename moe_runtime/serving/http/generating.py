"""A request in the engine: its sequences, their pieces of text, their end, and their JSON."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import moe_runtime
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.pictures import PlacedPicture
from moe_runtime.inference.routing_replay import encode_routing
from moe_runtime.serving.engine import EngineHandle
from moe_runtime.serving.http.answer_text import (
    AnswerSections,
    AnswerText,
    AnswerToken,
    HarmonySections,
    Part,
    Piece,
    Vocabulary,
)
from moe_runtime.serving.http.api_errors import (
    ApiError,
    FieldError,
    of_engine,
    shutting_down,
    too_long,
)
from moe_runtime.serving.http.metrics import RequestTimes
from moe_runtime.serving.http.schema import GenerationFields
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.tool_formats import ParsedCall
from moe_runtime.serving.requests import (
    Event,
    Finished,
    GenerationRequest,
    NewToken,
    PromptRead,
    SamplingOptions,
    Started,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher


Sections = AnswerSections | HarmonySections


def too_slow(limit_s: float) -> ApiError:
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
    """One answer of a request; ``prompt`` is None until the engine has read it."""

    request: GenerationRequest
    text: AnswerText
    is_first: bool
    prompt: PromptRead | None = None
    finished: bool = False
    routing: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Generation:
    """The answers to one request; ``failure`` ended a stream whose status was already sent."""

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

        def put(index: int, event: Event) -> None:
            # Runs in the engine's thread, for exact times. The loop may have stopped.
            now_s = self.times.clock()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event, now_s))

        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel)
            for index, choice in enumerate(self.choices):
                try:
                    handle = self.model.engine.submit(choice.request, partial(put, index))
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
        """Yields pieces of all answers with the index of their answer, in order of arrival."""
        num_open = len(self.choices)
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.cancel)
            while num_open:
                try:
                    # `wait_for` would lose a cancellation that comes together with an event.
                    async with asyncio.timeout_at(self.deadline_s):
                        index, event, now_s = await self._events.get()
                except TimeoutError:
                    raise too_slow(self.limit_s) from None
                choice = self.choices[index]
                piece = None if choice.finished else self._take(index, choice, event, now_s)
                if piece is None:
                    continue
                if piece.finish is not None:
                    choice.finished = True
                    num_open -= 1
                    self.finish_reasons.append(piece.finish)
                    num_prompt = len(choice.request.prompt_ids)
                    num_new = choice.text.num_tokens
                    self.times.ended(index, now_s, num_prompt, num_new, piece.finish)
                    self._handles[index].cancel()  # the engine does not know stop strings
                yield index, piece

    def _take(self, index: int, choice: AnswerChoice, event: Event, now_s: float) -> Piece | None:
        if isinstance(event, Started):
            self.times.started(index, now_s)
            return None
        if isinstance(event, PromptRead | NewToken) and event.routing is not None:
            choice.routing.append(event.routing)
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
            raise shutting_down()
        return choice.text.end(event.reason)


def sampling_of(body: GenerationFields, model: ServedModel, number: int = 0) -> SamplingOptions:
    """Options of the body; defaults are those of the checkpoint, then OpenAI's."""
    size = model.vocabulary.size

    def value(name: str) -> float:
        given = getattr(body, name)
        return model.defaults[name] if given is None else given

    return SamplingOptions(
        temperature=value("temperature"),
        top_p=value("top_p"),
        top_k=max(int(value("top_k")), 0),
        min_p=value("min_p"),
        repetition_penalty=value("repetition_penalty"),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        # Signed 64 bits.
        seed=None if body.seed is None else (body.seed + number + 2**63) % 2**64 - 2**63,
        logit_bias={_token(key, size): bias for key, bias in (body.logit_bias or {}).items()},
    )


def _token(text: str, size: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < size):
        problem = f"expected token ids from 0 to {size - 1}, got {text[:50]!r}"
        raise FieldError("logit_bias", problem)
    return int(text)


def encode_text(
    text: str, model: ServedModel, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Tokens of a text, which may be empty.

    Encoding takes hundreds of bytes a token, so a text that is far too long is refused before.
    """
    most = model.engine.most_request_tokens
    vocabulary = model.vocabulary
    most_bytes = most * vocabulary.longest_token
    # The number of characters is a lower bound of the bytes, and needs no copy.
    is_too_long = len(text) > most_bytes or len(text.encode(errors="replace")) > most_bytes
    if is_too_long or vocabulary.is_longer(text, most):
        raise too_long(f"{len(text)} characters", most, param)
    return vocabulary.encode(text, add_special_tokens=add_special_tokens)


def check_choices(body: GenerationFields, num_prompts: int, most: int) -> None:
    """Limits the answers of one request."""
    wanted = num_prompts * (body.n or 1)
    if wanted > most:
        param = "n" if num_prompts == 1 else "prompt"
        raise FieldError(param, f"{wanted} answers are asked for, at most {most} may be")


def check_tokens(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Refuses prompts that are empty or too long, or have unknown tokens."""
    if not ids:
        raise FieldError(param, "is empty, expected at least one token")
    size, most = model.vocabulary.size, model.engine.most_request_tokens
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        raise FieldError(param, f"has token {wrong}, expected ids from 0 to {size - 1}")
    if len(ids) > most:
        raise too_long(f"{len(ids)} tokens", most, param)


def choices_for(
    body: GenerationFields,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    matcher: LLMatcher | None = None,
    pictures: tuple[PlacedPicture, ...] = (),
    shown_tokens: Sequence[str] = (),
) -> list[AnswerChoice]:
    """The sequences of a request: ``n`` for each prompt.

    Args:
        max_tokens: of each answer; None for all that fit into the context.
        matcher: grammar of the answers.
        pictures: of the only prompt.
        shown_tokens: special tokens that stay in the text of answers.
    """
    vocabulary = model.vocabulary
    end_ids = frozenset() if body.ignore_eos else vocabulary.end_ids
    stop_ids = end_ids | frozenset(body.stop_token_ids or ())
    stops = [body.stop] if isinstance(body.stop, str) else [*(body.stop or ())]
    stops += [] if body.ignore_eos else vocabulary.stop_strings
    given = body.stop_token_ids or ()
    if wrong := [token for token in given if not 0 <= token < vocabulary.size]:
        raise FieldError(
            "stop_token_ids",
            f"has token {clipped(wrong[0])}, expected ids from 0 to {vocabulary.size - 1}",
        )
    choices = []
    for prompt in prompts:
        room = model.engine.most_request_tokens - len(prompt)
        most_new = max(room, 1) if max_tokens is None else max_tokens
        if (body.min_tokens or 0) > most_new:
            problem = f"expected at most the {most_new} of the answer, got {body.min_tokens}"
            raise FieldError("min_tokens", problem)
        for number in range(body.n or 1):
            try:
                request = GenerationRequest(
                    prompt_ids=tuple(prompt),
                    max_new_tokens=most_new,
                    min_new_tokens=body.min_tokens or 0,
                    stop_ids=stop_ids,
                    sampling=sampling_of(body, model, number),
                    num_logprobs=num_logprobs,
                    num_prompt_logprobs=num_prompt_logprobs,
                    constraint=matcher and model.grammars.constraint(matcher),
                    priority=body.priority or 0,
                    adapter=model.adapter,
                    pictures=pictures,
                    returns_routing=bool(body.return_routed_experts),
                )
            except ValueError as error:
                raise of_engine(error) from None
            text = AnswerText(
                vocabulary.incremental(shown_tokens), stops, stop_ids, request.min_new_tokens
            )
            choices.append(AnswerChoice(request, text, is_first=number == 0))
    return choices


class Answers(ABC):
    """JSON of answers: one object, or the events of a stream and ``closing`` bytes."""

    closing = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._vocabulary = generation.model.vocabulary
        self._created_s = int(time.time())

    @abstractmethod
    async def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def chunks(self) -> AsyncGenerator[dict[str, Any], None]: ...

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error after the stream has begun."""
        return error.body()


class ChoiceAnswers(Answers):
    """Several choices, in the forms of OpenAI's completions and chats.

    ``kinds`` are the types of a whole answer and of a chunk.
    """

    def __init__(
        self, generation: Generation, body: GenerationFields, kinds: tuple[str, str], prefix: str
    ) -> None:
        super().__init__(generation)
        self._has_ids = bool(body.return_token_ids)
        self._has_routing = bool(body.return_routed_experts)
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_all_usage = options is not None and bool(options.continuous_usage_stats)
        self._chunk_kind = kinds[1]
        self._frame = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kinds[0],
            "created": self._created_s,
            "model": generation.model.name,
            "system_fingerprint": f"moe-runtime-{moe_runtime.__version__}",
        }
        self.tokens: list[list[AnswerToken]] = [[] for _ in generation.choices]
        self.reasons: list[str | None] = [None] * len(generation.choices)
        self._silent = set(range(len(generation.choices)))  # answers without a chunk so far

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                self.reasons[index] = self.collect(index, piece) or self.reasons[index]
                self.tokens[index] += piece.tokens
        usage = self.generation.usage.body()
        found = {**self._frame, **self.collected(), "usage": usage}
        if len(self.tokens) == 1 and self._has_routing:  # SGLang's form, for a single answer
            ids = self._routed(0).astype("<i4").tobytes()
            found["sglext"] = {"routed_experts": base64.b64encode(ids).decode()}
        return found

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        frame, usage = self._frame | {"object": self._chunk_kind}, self.generation.usage
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                for fields in self.chunk_fields(index, piece):
                    shown = {"usage": usage.body() if self._has_all_usage else None}
                    yield {**frame, **fields, **(shown if self._has_usage else {})}
        if self._has_usage:
            yield {**frame, "choices": [], "usage": usage.body()}

    @abstractmethod
    def collect(self, index: int, piece: Piece) -> str | None:
        """Adds a piece to an answer; returns the finish reason if it is the last piece."""

    @abstractmethod
    def collected(self) -> dict[str, Any]:
        """The choices, once all pieces are taken."""

    @abstractmethod
    def chunk_fields(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The fields of the chunks for a piece of an answer."""

    def _ids(self, index: int, tokens: Iterable[AnswerToken], reason: str | None) -> dict[str, Any]:
        """Token ids and, at the end of an answer, ids of experts, in vLLM's form."""
        ids: dict[str, Any] = {}
        if self._has_ids:
            ids["token_ids"] = [one.token_id for one in tokens]
        if self._has_routing and reason is not None:
            ids["routed_experts"] = encode_routing(self._routed(index))
        return ids

    def _routed(self, index: int) -> np.ndarray:
        """Experts of all tokens of prompt and answer except the last: `[T - 1, L, K]`."""
        choice = self.generation.choices[index]
        num_tokens = len(choice.request.prompt_ids) + choice.text.num_tokens
        return np.concatenate(choice.routing)[: max(num_tokens - 1, 0)]

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._has_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[index].request.prompt_ids}


class PartAnswers(Answers):
    """One answer as a sequence of parts: reasoning, text and calls."""

    closing = b""

    def __init__(self, generation: Generation, sections: Sections) -> None:
        super().__init__(generation)
        self._sections = sections
        self._has_begun = False
        self._num_thought = 0  # tokens of pieces with reasoning alone
        self._tokens: list[AnswerToken] = []

    async def whole(self) -> dict[str, Any]:
        async for _ in self.chunks():
            pass
        return self.result()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for _, piece in pieces:
                for event in self._events(piece):
                    yield event

    def _events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()
        parts = [*parts_of(piece, self._sections)]
        kinds = {None if isinstance(part, ParsedCall) else part[0] for part in parts}
        if kinds == {"reasoning"}:
            self._num_thought += len(piece.tokens)
        self._tokens += piece.tokens
        for part in parts:
            yield from self.add(part, tuple(self._tokens))
            self._tokens.clear()
        if piece.finish is not None:
            yield from self.end(piece)

    @abstractmethod
    def begin(self) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def add(self, part: Part, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Takes a part, and the tokens since the previous part."""

    @abstractmethod
    def end(self, piece: Piece) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def result(self) -> dict[str, Any]: ...


Prepared = tuple[list[AnswerChoice], Callable[[Generation], Answers]]
"""Sequences for the engine, and the JSON of their answers. Preparing is slow: not in the loop."""


def parts_of(piece: Piece, sections: Sections) -> Iterator[Part]:
    """The parts of the next piece of an answer."""
    yield from sections.add(piece.text)
    if piece.finish is not None:
        yield from sections.end(cut_by=piece.cut_by)


def completion_logprobs(
    tokens: Sequence[AnswerToken], vocabulary: Vocabulary, first_offset: int = 0
) -> dict[str, Any]:
    return {
        "tokens": [vocabulary.token_text(one.token_id) for one in tokens],
        "token_logprobs": [None if one.logprob is None else _finite(one.logprob) for one in tokens],
        "top_logprobs": [_top(one, vocabulary) for one in tokens],
        "text_offset": [first_offset + one.offset for one in tokens],
    }


def _top(token: AnswerToken, vocabulary: Vocabulary) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        # Two tokens may have the same text: the first one is the more likely.
        top.setdefault(vocabulary.token_text(token_id), _finite(logprob))
    return top


def chat_logprobs(tokens: Iterable[AnswerToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """The form of ``/v1/chat/completions``."""
    return {
        "content": [
            {
                **_entry(one.token_id, one.logprob or 0.0, vocabulary),
                "top_logprobs": [_entry(*other, vocabulary) for other in one.top],
            }
            for one in tokens
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity
