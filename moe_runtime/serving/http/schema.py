"""The bodies of requests: fields, types and ranges; what is not here is refused by name."""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_runtime.checkpoints.strict_json import unique_keys
from moe_runtime.serving.http.api_errors import ApiError, FieldError

_MOST_SHOWN = 200
MOST_LOGPROBS = 20
_MOST_STOPS = 16

_KNOWN_BUT_UNSUPPORTED = frozenset(
    {
        *(
            "audio",
            "cache_prompt",
            "function_call",
            "functions",
            "modalities",
            "prediction",
        ),
        *("service_tier", "suffix", "verbosity", "web_search_options", "prompt_logprobs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *(
            "length_penalty",
            "use_beam_search",
            "truncate_prompt_tokens",
            "include_stop_str_in_output",
        ),
    }
)
"""Fields that other servers have; a client that sends them would not get what it asks for."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(_Body):
    """What completions and chats have in common.

    ``user``, ``metadata``, ``safety_identifier`` and ``prompt_cache_key`` name a request; they
    ask for nothing and stand in the log. ``store`` may only be false: nothing is kept.
    """

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leaves out fields that are not supported where they are null, which asks for nothing."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None or name not in _KNOWN_BUT_UNSUPPORTED
        }

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationFields):
    """``/v1/completions``."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    best_of: Literal[1] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationFields):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(_Body):
    """``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """``/detokenize``."""

    model: str | None = None
    tokens: list[Count]


BodyT = TypeVar("BodyT", bound=_Body)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Reads a request.

    Raises:
        ApiError: it is no JSON, lacks a field, has one too many, twice, or out of range.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _first_problem(error, kind) from None
    try:
        json.loads(raw, object_pairs_hook=unique_keys)  # of two values pydantic takes the last
    except ValueError as error:
        raise ApiError(f"the body has {error}") from None
    return body


def _first_problem(error: ValidationError, kind: type[_Body]) -> ApiError:
    problems = error.errors(include_url=False, include_context=False)
    # Of a field with several types, the alternative that went farthest says most.
    problem = max(
        (one for one in problems if one["loc"][:1] == problems[0]["loc"][:1]),
        key=lambda one: len(one["loc"]),
    )
    # Alternatives of a type are named in the place too: `stop.str`.
    inner = [part for part in problem["loc"][1:] if not _names_a_type(part)]
    place = [*problem["loc"][:1], *inner]
    if problem["type"] == "json_invalid":
        return ApiError(f"the body is no JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    if not place:
        return ApiError(f"the body must be a JSON object, got {_shown(problem['input'])}")
    name = ".".join(map(str, place))
    if problem["type"] == "missing":
        return FieldError(name, "is missing")
    if problem["type"] == "extra_forbidden":
        field = str(place[-1])
        near = difflib.get_close_matches(field, kind.model_fields, n=1) if len(place) == 1 else []
        if field in _KNOWN_BUT_UNSUPPORTED:
            return FieldError(name, "is not supported by this server", code="unsupported_parameter")
        ending = f"; did you mean {near[0]}?" if near else ""
        return FieldError(name, f"is no field of this request{ending}", code="unknown_parameter")
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    return FieldError(name, f"{message}, got {_shown(problem['input'])}")


def _names_a_type(part: int | str) -> bool:
    names = ("list[", "constrained-str", "literal[", "NamedTool", "function-")
    return isinstance(part, str) and (part == "str" or part.startswith(names))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
