"""``/v1/completions``: continues texts or tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_runtime.serving.http.answer_text import AnswerToken, Piece, Vocabulary
from moe_runtime.serving.http.api_errors import FieldError
from moe_runtime.serving.http.generating import (
    ChoiceAnswers,
    Generation,
    Prepared,
    check_choices,
    check_tokens,
    choices_for,
    completion_logprobs,
    encode_text,
)
from moe_runtime.serving.http.grammars import of_response_format
from moe_runtime.serving.http.schema import CompletionBody
from moe_runtime.serving.http.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16
_EXPECTED = (
    "expected a string, a list of strings, token ids (integers from 0 on), or a list of lists of "
    "token ids"
)


def read_prompts(given: Any) -> list[str] | list[list[int]]:
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
    """A prompt as it is repeated before its answers, and where in it each token begins."""

    text: str
    offsets: Sequence[int]


def prepare(
    body: CompletionBody, model: ServedModel, most_choices: int, owner: str = ""
) -> Prepared:
    """What the engine is asked. Takes a while: not in the loop."""
    given = read_prompts(body.prompt)
    check_choices(body, len(given), most_choices)
    adds = body.add_special_tokens is not False
    prompts = []
    for one in given:
        is_text = isinstance(one, str)
        ids = encode_text(one, model, "prompt", add_special_tokens=adds) if is_text else one
        check_tokens(ids, model, "prompt")
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
    return choices, partial(CompletionAnswers, echoed=echoes)


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


class CompletionAnswers(ChoiceAnswers):
    """Texts, with prompts before them where these are to be repeated."""

    def __init__(
        self, body: CompletionBody, generation: Generation, echoed: Sequence[Echo]
    ) -> None:
        super().__init__(body, generation, ("text_completion", "text_completion"), "cmpl")
        self._body, self._echoed = body, echoed
        self._texts = [""] * len(generation.choices)
        self._silent = set(range(len(generation.choices)))

    def take(self, index: int, piece: Piece) -> str | None:
        self._texts[index] += piece.text
        return piece.finish

    def taken(self) -> dict[str, Any]:
        every = zip(self._texts, self.tokens, self.reasons, strict=True)
        return {
            "choices": [
                self._choice(index, text, tokens, reason, is_first=True)
                for index, (text, tokens, reason) in enumerate(every)
            ]
        }

    def grown(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunk of a piece, unless there is nothing to say."""
        is_first = index in self._silent
        has_tokens = piece.tokens and (self._body.logprobs is not None or self._has_ids)
        if piece.text or piece.finish or has_tokens or (is_first and self._prompt_text(index)):
            self._silent.discard(index)
            choice = self._choice(index, piece.text, piece.tokens, piece.finish, is_first=is_first)
            yield {"choices": [choice]}

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[AnswerToken],
        reason: str | None,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        prompt = self._prompt_text(index)
        logprobs = None
        if self._body.logprobs is not None:
            # Places in the text count from its beginning, which is the echoed prompt's.
            before = self._prompt_tokens(index) if is_first and self._body.echo else ()
            logprobs = completion_logprobs(before, self._vocabulary)
            later = completion_logprobs(tokens, self._vocabulary, len(prompt))
            logprobs = {name: logprobs[name] + later[name] for name in logprobs}
        return {
            "index": index,
            "text": prompt + text if is_first else text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self._ids(index, tokens, reason),
            **(self._prompt_ids(index) if is_first else {}),
        }

    def _prompt_text(self, index: int) -> str:
        return self._echoed[index // (self._body.n or 1)].text if self._body.echo else ""

    def _prompt_tokens(self, index: int) -> tuple[AnswerToken, ...]:
        """The tokens of an echoed prompt with their places in its text."""
        choice, echo = self.generation.choices[index], self._echoed[index // (self._body.n or 1)]
        ids = choice.request.prompt_ids
        logprobs = (choice.prompt and choice.prompt.logprobs) or [None] * len(ids)
        return tuple(
            AnswerToken(token_id, one and one.logprob, one.top if one else (), offset)
            for token_id, offset, one in zip(ids, echo.offsets, logprobs, strict=True)
        )
