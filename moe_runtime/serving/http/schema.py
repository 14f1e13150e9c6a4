"""The bodies of requests: fields, types and ranges. Any other field is refused by its name.

`TranslatedBody` and below serve the dialects whose requests become chats.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from moe_runtime.checkpoints.strict_json import clipped, nests_deeper, parse_value
from moe_runtime.serving.http.api_errors import ApiError, FieldError, unsupported

_MOST_LEVELS = 200
"""Nesting of a body; rendering, dumping and compiling its parts are recursive."""
_MOST_NAME_CHARACTERS = 64
"""Error messages cut longer names of fields; all known names are shorter."""
_MOST_STOPS = 16

_KNOWN_BUT_UNSUPPORTED = frozenset(
    {
        *("audio", "function_call", "functions", "modalities", "prediction", "suffix"),
        *("web_search_options", "prompt_logprobs", "guided_json", "guided_regex"),
        *("guided_choice", "guided_grammar", "length_penalty", "use_beam_search"),
        *("truncate_prompt_tokens", "include_stop_str_in_output"),
    }
)
"""Fields of other servers that would change the answer, and that this server does not have."""
_RENAMED = {key: ["max_tokens"] for key in ("max_completion_tokens", "max_new_tokens")}
"""Names that other servers use, and our names for them."""
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "cache_prompt": (True, False),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Values of unsupported fields that ask for the usual behaviour; they are ignored."""


class Body(BaseModel):
    """A JSON object. Every list in it stops at its first wrong element (``fail_fast``).

    Attributes:
        unused: fields that are accepted and dropped: they change no answer.
        droppable: unknown fields that may be null; None for any.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unused: ClassVar[frozenset[str]] = frozenset()
    droppable: ClassVar[frozenset[str] | None] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, given: Any) -> Any:
        """Drops fields that ask for nothing, and all unknown fields but the first: one error is
        enough."""
        if not isinstance(given, dict):
            return given
        kept, has_unknown = {}, False
        for name, value in given.items():
            if name in cls.unused:
                continue
            if name not in cls.model_fields:
                is_nothing = cls.droppable is None or name in cls.droppable
                if has_unknown or (value is None and is_nothing):
                    continue
                if cls.droppable and _has_no_effect(name, value):
                    continue
                has_unknown = True
            kept[name] = value
        return kept


def _has_no_effect(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in _NO_EFFECT.get(name, ()))


def _biases(given: dict[str, Any]) -> dict[str, float]:
    for token, bias in given.items():
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            problem = f"expected a number from -100 to 100, got {clipped(bias)}"
            raise FieldError(f"logit_bias.{_cut(token)}", problem)
    return given


def _few(given: list[str]) -> list[str]:
    if len(given) > _MOST_STOPS:
        raise FieldError("stop", f"expected at most {_MOST_STOPS} strings, got {len(given)}")
    return given


def _texts(given: dict[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if not isinstance(value, str):
            raise FieldError(f"metadata.{_cut(name)}", f"expected a text, got {clipped(value)}")
    return given


def _integer(least: int, most: int = 2**63 - 1) -> BeforeValidator:
    """Accepts integers of a range; the error message says the range."""

    def check(given: Any) -> int:
        if type(given) is not int or not least <= given <= most:
            ends = {"least": least, "most": most}
            numbers = "{least}" if least == most else "an integer from {least} to {most}"
            raise PydanticCustomError("integer", "expected " + numbers, ends)
        return given

    return BeforeValidator(check)


Count = Annotated[int, _integer(0)]
TopLogprobs = Annotated[int, _integer(0, 20)]
TextMap = Annotated[dict[str, Any], AfterValidator(_texts)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True), AfterValidator(_few)]


class AnswerBody(Body):
    """A request for an answer, in any dialect."""

    model: str | None = None
    stream: bool | None = None

    @property
    def client_user(self) -> str | None:
        """The user that the client names."""
        return getattr(self, "user", None) or getattr(self, "safety_identifier", None)

    @property
    def may_have_grammar(self) -> bool:
        """Whether a grammar may have to be compiled for the answer."""
        return any(getattr(self, name, None) for name in ("tools", "response_format"))

    @property
    def stays_large(self) -> bool:
        """Whether the engine may keep more of the request than the tokens of its prompts."""
        large = ("logit_bias", "stop_token_ids")
        return self.may_have_grammar or any(getattr(self, name, None) for name in large)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(AnswerBody):
    """Fields that completions and chats share.

    Fields that name a request, or concern OpenAI's storage and billing, change no answer.
    """

    droppable = _KNOWN_BUT_UNSUPPORTED

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: float | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, _integer(-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, _integer(-(2**63))] | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Annotated[int, _integer(1, 128)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, _integer(-(2**63))] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: TextMap | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class CompletionBody(GenerationFields):
    prompt: Any
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, _integer(1, 1)] | None = None


class TextPart(Body):
    unused = frozenset({"cache_control"})
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    unused = frozenset({"detail"})
    url: str


class ImagePart(Body):
    unused = frozenset({"cache_control"})
    type: Literal["image_url"]
    image_url: ImageUrl


_Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    unused = frozenset({"index"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message. OpenAI's client sends the messages of answers with null fields."""

    unused = frozenset({"annotations", "cache_control"})
    droppable = None

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(exclude=True)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _one_reasoning(self) -> Self:
        # Answers of some servers call the field `reasoning`, and some have both.
        if self.reasoning is not None:
            if self.reasoning_content not in (None, self.reasoning):
                raise FieldError("messages.reasoning", "differs from reasoning_content; give one")
            self.reasoning_content = self.reasoning
        return self


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    _enforced: dict[str, Any] | None = PrivateAttr(default=None)
    _place: str = PrivateAttr(default="")

    def enforce(self, schema: dict[str, Any] | None, place: str) -> None:
        """Constrains calls to ``schema``, which the prompt does not show.

        Errors name the field ``place`` of the request.
        """
        self._enforced, self._place = schema, place

    @property
    def place(self) -> str:
        return self._place

    @property
    def is_strict(self) -> bool:
        return bool(self.strict) or self._enforced is not None

    @property
    def enforced(self) -> dict[str, Any] | None:
        """The schema that constrains calls."""
        return self.parameters if self._enforced is None else self._enforced

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if (self.parameters or {}).get("type", "object") != "object":
            field = "tools.function.parameters"
            raise FieldError(field, 'expected the schema of an object, with "type": "object"')
        return self


class Tool(Body):
    unused = frozenset({"cache_control"})
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ToolList(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Body):
    """The model may call only these tools; the prompt shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolList


class ChatBody(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Body):
    """``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Count], Field(fail_fast=True)]


class ModelBody(Body):
    """Load or unload a model."""

    model: str


class AdapterBody(Body):
    """Load or unload an adapter, with vLLM's fields."""

    lora_name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
    lora_path: str | None = None
    load_inplace: bool = False
    base_model_name: str | None = None


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Reads a request. Long bodies are slow.

    Raises:
        ApiError: the first problem of the body.
    """
    try:
        given = parse_value(raw)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if nests_deeper((given,), _MOST_LEVELS):
        raise ApiError(f"the body nests deeper than {_MOST_LEVELS} levels")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise first_problem(error, kind) from None


def known_place(param: str) -> str:
    """The first parts of a field's path that are known names or numbers."""
    known = itertools.takewhile(lambda part: part.isdigit() or part in _NAMES, param.split("."))
    return ".".join(known)


def _names(kind: type[Body]) -> Iterator[str]:
    yield from kind.model_fields
    yield from kind.unused
    for narrower in kind.__subclasses__():
        yield from _names(narrower)


_NAMES = _KNOWN_BUT_UNSUPPORTED.union(_names(Body))


def first_problem(error: ValidationError, kind: type[Body]) -> ApiError:
    """The error that a client gets for a body that is not a valid ``kind``."""
    problems = error.errors(include_url=False, include_context=False)
    # A field with several types has one problem for each: the deepest one is the clearest. Among
    # equally deep ones, prefer the alternative whose `type` was given.
    others = {
        one["loc"][:-1]
        for one in problems
        if one["loc"][-1:] == ("type",) and _names_a_type(one["loc"][-2:][0])
    }
    problem = max(
        (one for one in problems if one["loc"][:1] == problems[0]["loc"][:1]),
        key=lambda one: (len(one["loc"]), one["loc"][:-1] not in others),
    )
    # The path also names the alternatives of a type: `stop.str`.
    inner = [part for part in problem["loc"][1:] if not _names_a_type(part)]
    place = [*problem["loc"][:1], *inner]
    if not place:
        return ApiError(f"the body must be a JSON object, got {_shown(problem['input'])}")
    name = ".".join(_cut(str(part)) for part in place)
    if problem["type"] == "missing":
        return FieldError(name, "is missing", code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        field = _cut(str(place[-1]))
        near = []
        if len(place) == 1:
            near = _RENAMED.get(field) or difflib.get_close_matches(field, kind.model_fields, n=1)
        if field in _KNOWN_BUT_UNSUPPORTED:
            return unsupported(name, "is not supported by this server")
        ending = f"; did you mean {near[0]}?" if near else ""
        return FieldError(name, f"is not a field of this request{ending}", code="unknown_parameter")
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"].endswith("too_short"):
        message = f"is empty, send {_LEAST.get(str(place[-1]), 'at least one character')}"
    is_of_type = problem["type"].endswith("_type")
    if problem["type"] == "integer":
        is_of_type = type(problem["input"]) is not int
    code = "invalid_type" if is_of_type else "invalid_value"
    return FieldError(name, f"{message}, got {_shown(problem['input'])}", code=code)


_LEAST = {
    "tools": "at least one tool",
    "messages": 'at least one message: {"role": "user", "content": "TEXT"}',
}


def _shown(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else clipped(value)


def _names_a_type(part: int | str) -> bool:
    names = ("list[", "constrained-str", "literal[", "function-", "NamedTool", "FunctionChoice")
    names = (*names, "AllowedTools", "AllowedChoice")
    return isinstance(part, str) and (part == "str" or part.startswith(names))


def _cut(name: str) -> str:
    most = _MOST_NAME_CHARACTERS
    return name if len(name) <= most else f"{name[:most]}..."


class TranslatedBody(AnswerBody):
    """A body that becomes a `ChatBody`.

    ``names`` maps fields of the chat to fields of this body, as `client_fields` needs them.
    """

    droppable = None
    names: ClassVar[Mapping[str, str]] = {}


class ChatMessages:
    """Builds the messages of a chat from smaller items.

    The items of one turn of the assistant become one message. Pictures from tools follow their
    results in a message of the user, because templates expect pictures there.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._is_open = False
        self._pictures: list[Any] = []

    def say(self, role: Any, content: str | list[Any], **fields: Any) -> None:
        if self._pictures and role != "tool":
            parts = content if isinstance(content, list) else [part_of(content)]
            shown, self._pictures = self._pictures, []
            if role == "user":
                content = [*shown, *parts]
            else:
                self.say("user", shown)
        self.messages.append(Message(role=role, content=content, **fields))
        self._is_open = False

    def result(self, parts: str | list[Any], call: str, lead: str = "") -> None:
        parts = [part_of(parts)] if isinstance(parts, str) else parts
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        self.say("tool", lead + "\n".join(texts), tool_call_id=call)
        self._pictures += [part for part in parts if isinstance(part, ImagePart)]

    def end(self) -> list[Message]:
        if self._pictures:
            self.say("user", [])
        return self.messages

    def answer(self, *, is_new: bool = False) -> Message:
        """The open message of the assistant; a new one if there is none or with ``is_new``."""
        if is_new or not self._is_open:
            self.end()
            self.messages.append(Message(role="assistant"))
            self._is_open = True
        return self.messages[-1]


def joined(first: str | None, second: str, gap: str = "") -> str:
    return second if first is None else first + gap + second


@contextlib.contextmanager
def client_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Translates the fields of a chat in error messages into the fields of the client's request.

    Args:
        names: beginnings of fields, or inner parts with a leading point, and their translations.
    """
    try:
        try:
            yield
        except ValidationError as error:
            raise first_problem(error, ChatBody) from None
    except ApiError as error:
        given = error.param or ""
        param = given
        for old, new in names.items():
            if param.startswith(old) or old[0] == ".":
                param = param.replace(old, new, 1)
        if param != given:
            error.param, error.message = param, error.message.replace(given, param, 1)
        raise


def part_of(text: str = "", *, url: str | None = None) -> TextPart | ImagePart:
    if url is None:
        return TextPart(type="text", text=text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=url))
