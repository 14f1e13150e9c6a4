"""Log-probabilities of tokens, as completions and chats report them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moe_runtime.serving.http.answers.answer_text import AnswerToken
from moe_runtime.serving.http.models.vocabulary import Vocabulary
from moe_runtime.serving.requests import TokenLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    tokens: Iterable[AnswerToken], vocabulary: Vocabulary, first_offset: int = 0
) -> dict[str, Any]:
    """The form of ``/v1/completions``: four lists of equal length.

    Args:
        tokens: of an answer.
        vocabulary: of the model.
        first_offset: characters of an echoed prompt before it.
    """
    found = list(tokens)
    return {
        "tokens": [vocabulary.token_text(one.token_id) for one in found],
        "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in found],
        "top_logprobs": [_top(one, vocabulary) for one in found],
        "text_offset": [first_offset + one.offset for one in found],
    }


def _top(token: AnswerToken, vocabulary: Vocabulary) -> dict[str, float] | None:
    """The most likely tokens and the token itself, which need not be one of them."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        # Of two tokens that are written alike, the more likely one comes first.
        top.setdefault(vocabulary.token_text(token_id), finite(logprob))
    return top


def prompt_tokens(
    ids: Sequence[int], offsets: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None
) -> tuple[AnswerToken, ...]:
    """The tokens of an echoed prompt with their places in its text."""
    return tuple(
        AnswerToken(token_id, one and one.logprob, one.top if one else (), offset)
        for token_id, offset, one in zip(ids, offsets, logprobs or [None] * len(ids), strict=True)
    )


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
