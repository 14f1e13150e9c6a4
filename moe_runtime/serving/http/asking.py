"""What a request's body asks of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.serving.http.answer_text import AnswerText
from moe_runtime.serving.http.api_errors import ApiError, FieldError, of_engine
from moe_runtime.serving.http.generating import AnswerChoice
from moe_runtime.serving.http.schema import GenerationFields, Message
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.requests import GenerationRequest, SamplingOptions

if TYPE_CHECKING:
    from llguidance import LLMatcher


def sampling_of(body: GenerationFields, model: ServedModel, number: int = 0) -> SamplingOptions:
    """How tokens are chosen: as the body says, else the checkpoint, else OpenAI."""

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
        seed=None if body.seed is None else _wrapped(body.seed + number),
        logit_bias={
            _token(key, model.vocabulary.size): bias
            for key, bias in (body.logit_bias or {}).items()
        },
    )


def _wrapped(seed: int) -> int:
    """A seed in the range of 64 bits with a sign."""
    return (seed + 2**63) % 2**64 - 2**63


def _token(text: str, size: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < size):
        problem = f"expected token ids from 0 to {size - 1}, got {text[:50]!r}"
        raise FieldError("logit_bias", problem)
    return int(text)


def encode_prompt(
    text: str, model: ServedModel, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Tokens of a prompt, or an `ApiError` where there are none or too many."""
    ids = encode_text(text, model, param, add_special_tokens=add_special_tokens)
    check_tokens(ids, model, param)
    return ids


def encode_text(
    text: str, model: ServedModel, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Tokens of a text that may be empty.

    A text that is far too long is refused before all of it is encoded, which takes hundreds of
    bytes a token that no budget has.
    """
    most = model.engine.most_request_tokens
    vocabulary = model.vocabulary
    # A character has a byte at least: most texts that are too long are seen without a copy.
    is_too_long = len(text) > most * vocabulary.longest_token or (
        len(text.encode(errors="replace")) > most * vocabulary.longest_token
    )
    if is_too_long or vocabulary.is_longer(text, most):
        raise _too_long(f"{param}: has {len(text)} characters", most, param)
    return vocabulary.encode(text, add_special_tokens=add_special_tokens)


def check_messages(messages: Sequence[Message], model: ServedModel) -> None:
    """Refuses a conversation that is surely too long, before its template is rendered."""
    most = model.engine.most_request_tokens
    if len(messages) > most:
        raise _too_long(f"messages: has {len(messages)} messages", most, "messages")


def check_choices(body: GenerationFields, num_prompts: int, most: int) -> None:
    """Refuses more answers than one request may have."""
    wanted = num_prompts * (body.n or 1)
    if wanted > most:
        param = "n" if num_prompts == 1 else "prompt"
        raise FieldError(param, f"{wanted} answers are asked for, at most {most} may be")


def check_tokens(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Refuses a prompt that is empty, longer than any may be, or has unknown tokens."""
    if not ids:
        raise FieldError(param, "is empty, expected at least one token")
    size, most = model.vocabulary.size, model.engine.most_request_tokens
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        raise FieldError(param, f"has token {wrong}, expected ids from 0 to {size - 1}")
    if len(ids) > most:
        raise _too_long(f"{param}: has {len(ids)} tokens", most, param)


def _too_long(what: str, most: int, param: str) -> ApiError:
    message = f"{what}; prompt and answer may have {most} tokens together"
    return ApiError(message, param=param, code="context_length_exceeded")


def choices_for(
    body: GenerationFields,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    matcher: LLMatcher | None = None,
    shown_tokens: Sequence[str] = (),
) -> list[AnswerChoice]:
    """The sequences of a request: ``n`` for each prompt.

    Args:
        max_tokens: most tokens of an answer; as many as there is room for where None.
        num_logprobs: how many of the most likely tokens to report.
        matcher: a grammar that answers keep to.
        shown_tokens: special tokens that are part of the answers' text.
    """
    vocabulary = model.vocabulary
    end_ids = frozenset() if body.ignore_eos else vocabulary.end_ids
    stop_ids = end_ids | frozenset(body.stop_token_ids or ())
    stops = (*body.stop_strings, *(() if body.ignore_eos else vocabulary.stop_strings))
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
                    adapter=model.name if model.parent is not None else None,
                )
            except ValueError as error:
                raise of_engine(error) from None
            text = AnswerText(
                vocabulary.incremental(shown_tokens), stops, stop_ids, request.min_new_tokens
            )
            choices.append(AnswerChoice(request, text, is_first=number == 0))
    return choices
