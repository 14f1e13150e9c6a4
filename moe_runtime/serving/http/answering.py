"""The JSON of a request's answers, whole or as they grow, and of their log-probabilities."""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from moe_runtime.serving.http.answer_text import AnswerToken, Piece
from moe_runtime.serving.http.generating import AnswerChoice, Generation
from moe_runtime.serving.http.schema import GenerationFields
from moe_runtime.serving.http.vocabulary import Vocabulary

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Answers(ABC):
    """Makes the JSON of one request's answers."""

    def __init__(
        self, body: GenerationFields, generation: Generation, kinds: tuple[str, str], prefix: str
    ) -> None:
        self.generation = generation
        self._vocabulary = generation.model.vocabulary
        self._has_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_all_usage = options is not None and bool(options.continuous_usage_stats)
        self._kinds = kinds
        self._id, self._created_s = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.tokens: list[list[AnswerToken]] = [[] for _ in generation.choices]
        self.reasons: list[str | None] = [None] * len(generation.choices)

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                self.reasons[index] = self.take(index, piece) or self.reasons[index]
                self.tokens[index] += piece.tokens
        usage = self.generation.usage.body()
        return {**self._frame(self._kinds[0]), **self.taken(), "usage": usage}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        frame, usage = self._frame(self._kinds[1]), self.generation.usage
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                for fields in self.grown(index, piece):
                    shown = {"usage": usage.body() if self._has_all_usage else None}
                    yield {**frame, **fields, **(shown if self._has_usage else {})}
        if self._has_usage:
            yield {**frame, "choices": [], "usage": usage.body()}

    @abstractmethod
    def take(self, index: int, piece: Piece) -> str | None:
        """Adds a piece to an answer; gives why the answer ends with it, if it does."""

    @abstractmethod
    def taken(self) -> dict[str, Any]:
        """The fields of all answers, once they are whole."""

    @abstractmethod
    def grown(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The fields of the chunks that a piece of an answer makes."""

    def _frame(self, kind: str) -> dict[str, Any]:
        name = self.generation.model.name
        return {"id": self._id, "object": kind, "created": self._created_s, "model": name}

    def _ids(self, tokens: Iterable[AnswerToken]) -> dict[str, Any]:
        return {"token_ids": [one.token_id for one in tokens]} if self._has_ids else {}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._has_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[index].request.prompt_ids}


class Plan(Protocol):
    """What is asked, ready for the engine."""

    @property
    def choices(self) -> Sequence[AnswerChoice]: ...

    def answer(self, body: Any, generation: Generation) -> Answers: ...


def completion_logprobs(
    tokens: Iterable[AnswerToken], vocabulary: Vocabulary, first_offset: int = 0
) -> dict[str, Any]:
    """The form of ``/v1/completions``: four lists of equal length."""
    found = list(tokens)
    return {
        "tokens": [vocabulary.token_text(one.token_id) for one in found],
        "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in found],
        "top_logprobs": [_top(one, vocabulary) for one in found],
        "text_offset": [first_offset + one.offset for one in found],
    }


def _top(token: AnswerToken, vocabulary: Vocabulary) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        # Of two tokens that are written alike, the more likely one comes first.
        top.setdefault(vocabulary.token_text(token_id), finite(logprob))
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
        "logprob": finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return max(logprob, _LEAST)
