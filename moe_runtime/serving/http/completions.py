"""``/v1/completions``: continues texts or tokens."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.serving.http.answers.answer_text import AnswerToken
from moe_runtime.serving.http.answers.log_probabilities import completion_logprobs, prompt_tokens
from moe_runtime.serving.http.api_errors import FieldError
from moe_runtime.serving.http.asking import check_choices, check_tokens, choices_for, encode_prompt
from moe_runtime.serving.http.generating import AnswerChoice, Generation
from moe_runtime.serving.http.grammars import of_response_format
from moe_runtime.serving.http.models.served_model import ServedModel
from moe_runtime.serving.http.models.vocabulary import Vocabulary
from moe_runtime.serving.http.schema import CompletionBody

DEFAULT_MAX_TOKENS = 16
"""As OpenAI's."""
_EXPECTED = (
    "expected a string, a list of strings, token ids (integers from 0 on), or a list of lists of "
    "token ids"
)


def read_prompts(given: Any) -> list[str] | list[list[int]]:
    """The prompts of a request: texts, or tokens.

    Raises:
        FieldError: they are neither.
    """
    prompts = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise FieldError("prompt", _EXPECTED)
    if not (all(isinstance(one, str) for one in prompts) or all(map(_is_tokens, prompts))):
        raise FieldError("prompt", _EXPECTED)
    return prompts


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token >= 0 for token in value)
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated before its answers.

    Attributes:
        text: of it.
        offsets: where in the text each token begins; empty where no probabilities are asked for.
    """

    text: str
    offsets: Sequence[int]


def prepare(
    body: CompletionBody, model: ServedModel, most_choices: int, owner: str = ""
) -> tuple[list[Echo], list[AnswerChoice]]:
    """What the engine is asked, and the prompts to repeat. Takes a while: not in the loop.

    Args:
        body: of the request.
        model: that answers.
        most_choices: answers that a request may have.
        owner: of grammars that are kept.

    Raises:
        ApiError: the prompts or a grammar cannot be used, or there are too many.
    """
    given = read_prompts(body.prompt)
    check_choices(body, len(given), most_choices)
    adds = body.add_special_tokens is not False
    prompts = []
    for one in given:
        if isinstance(one, str):
            ids = encode_prompt(one, model, "prompt", add_special_tokens=adds)
        else:
            check_tokens(ids := one, model, "prompt")
        prompts.append(ids)
    asked = body.response_format
    grammar = None if asked is None else of_response_format(asked)
    choices = choices_for(
        body,
        model,
        prompts,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
        matcher=None
        if grammar is None
        else model.grammars.compile(grammar, "response_format", owner),
    )
    echoes = []
    for number, one in enumerate(given):
        answers = choices[number * (body.n or 1) :][: body.n or 1]
        held = [
            answer.text.follow(prompts[number], is_whole=isinstance(one, str)) for answer in answers
        ]
        if body.echo:
            echoes.append(_echo(one, prompts[number], held[0], body, model.vocabulary))
    return echoes, choices


def _echo(
    given: str | list[int],
    ids: Sequence[int],
    num_held: int,
    body: CompletionBody,
    vocabulary: Vocabulary,
) -> Echo:
    """A prompt without the tokens at its end whose character its answer completes."""
    has_offsets = body.logprobs is not None
    if isinstance(given, str):
        adds = body.add_special_tokens is not False
        offsets = (
            vocabulary.offsets_of_text(given, ids, add_special_tokens=adds) if has_offsets else ()
        )
        return Echo(given, offsets)
    text = vocabulary.decode(given[: len(given) - num_held])
    offsets = vocabulary.offsets_of_tokens(given) if has_offsets else ()
    return Echo(text, [min(offset, len(text)) for offset in offsets])


class CompletionAnswer:
    """Makes the JSON of one request's answers.

    Args:
        body: of the request.
        generation: its answers.
        echoed: the prompts, where they are to be repeated.
    """

    def __init__(
        self, body: CompletionBody, generation: Generation, echoed: Sequence[Echo]
    ) -> None:
        self.body = body
        self.generation = generation
        self.echoed = echoed
        self._frame: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
        }

    async def whole(self) -> dict[str, Any]:
        """The answers when they are done."""
        texts = [""] * len(self.generation.choices)
        tokens: list[list[AnswerToken]] = [[] for _ in texts]
        reasons: list[str | None] = [None] * len(texts)
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                texts[index] += piece.text
                tokens[index] += piece.tokens
                reasons[index] = piece.finish or reasons[index]
        choices = []
        for index, text in enumerate(texts):
            prompt, before = self._echo(index)
            logprobs = self._logprobs(before, tokens[index], len(prompt))
            choice = _choice(index, prompt + text, logprobs, reasons[index])
            choices.append({**choice, **self._ids(index, tokens[index], is_first=True)})
        return {**self._frame, "choices": choices, "usage": self.generation.usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answers as they grow."""
        options = self.body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        silent = set(range(len(self.generation.choices)))
        wants_tokens = self.body.logprobs is not None or self.body.return_token_ids
        async with contextlib.aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                is_first = index in silent
                prompt, before = self._echo(index) if is_first else ("", ())
                text = prompt + piece.text
                if not (text or piece.finish or (wants_tokens and piece.tokens)):
                    continue
                silent.discard(index)
                # Places in the text count from its beginning, which is the echoed prompt's.
                offset = len(self._prompt_text(index))
                logprobs = self._logprobs(before, piece.tokens, offset)
                choice = _choice(index, text, logprobs, piece.finish)
                choice |= self._ids(index, piece.tokens, is_first=is_first)
                chunk = {**self._frame, "choices": [choice]}
                if has_usage:
                    chunk["usage"] = self.generation.usage.body() if always else None
                yield chunk
        if has_usage:
            yield {**self._frame, "choices": [], "usage": self.generation.usage.body()}

    def _ids(self, index: int, tokens: Sequence[AnswerToken], *, is_first: bool) -> dict[str, Any]:
        """The tokens themselves, where they are asked for."""
        if not self.body.return_token_ids:
            return {}
        prompt = self.generation.choices[index].request.prompt_ids
        own = {"token_ids": [one.token_id for one in tokens]}
        return {**own, "prompt_token_ids": prompt} if is_first else own

    def _prompt_text(self, index: int) -> str:
        return self.echoed[index // (self.body.n or 1)].text if self.body.echo else ""

    def _echo(self, index: int) -> tuple[str, tuple[AnswerToken, ...]]:
        """The prompt's text and tokens, where they are repeated before the answer."""
        if not self.body.echo:
            return "", ()
        choice, echo = self.generation.choices[index], self.echoed[index // (self.body.n or 1)]
        if self.body.logprobs is None:
            return echo.text, ()
        logprobs = choice.prompt and choice.prompt.logprobs
        return echo.text, prompt_tokens(choice.request.prompt_ids, echo.offsets, logprobs)

    def _logprobs(
        self, before: Sequence[AnswerToken], tokens: Sequence[AnswerToken], offset: int
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        vocabulary = self.generation.model.vocabulary
        first = completion_logprobs(before, vocabulary)
        second = completion_logprobs(tokens, vocabulary, offset)
        return {name: first[name] + second[name] for name in first}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
