"""``/v1/responses``: OpenAI's Responses API, as a translation into a chat and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.serving.http import chat
from moe_runtime.serving.http.answer_text import AnswerToken, Part, Piece
from moe_runtime.serving.http.api_errors import ApiError, FieldError, unsupported
from moe_runtime.serving.http.generating import (
    Generation,
    PartAnswers,
    Prepared,
    Sections,
    chat_logprobs,
    sampling_of,
)
from moe_runtime.serving.http.grammars import balanced, regex_of
from moe_runtime.serving.http.schema import (
    AllowedTools,
    Body,
    ChatBody,
    ChatMessages,
    Count,
    FunctionCall,
    FunctionName,
    Message,
    NamedTool,
    TextMap,
    ToolCall,
    ToolList,
    TopLogprobs,
    TranslatedBody,
    client_fields,
    joined,
    part_of,
)
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.server import KeptResponses
from moe_runtime.serving.http.tool_formats import ParsedCall, json_text

_NAMES = {
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    ".function": "",
}
"""Fields of the chat, and their names here."""


class _Item(Body):
    """A part of a conversation. Fields that servers add to their items change no answer."""

    droppable = None
    unused = frozenset({"status"})
    id: str | None = None


class InputText(Body):
    droppable = None
    unused = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class InputImage(Body):
    droppable = None
    unused = frozenset({"detail"})
    type: Literal["input_image"]
    image_url: str


_Part = Annotated[InputText | InputImage, Field(discriminator="type")]
_Parts = str | Annotated[list[_Part], Field(fail_fast=True)]


class InputMessage(_Item):
    unused = frozenset({"status", "phase"})
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        """The arguments of the function that the chat has for this tool."""
        return json_text({"input": self.input})


class FunctionOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Parts


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[InputText], Field(fail_fast=True)] | None = None
    content: Annotated[list[InputText], Field(fail_fast=True)] | None = None
    encrypted_content: None = None


def _typed(item: Any) -> Any:
    is_plain = isinstance(item, dict) and "type" not in item
    return {"type": "message", **item} if is_plain else item


_AnyItem = Annotated[
    InputMessage | FunctionCallItem | CustomCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
]
_Items = Annotated[list[Annotated[_AnyItem, BeforeValidator(_typed)]], Field(fail_fast=True)]


class FunctionTool(Body):
    droppable = None
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name, value in (("syntax", self.syntax), ("definition", self.definition)):
            if bool(value) != (self.type == "grammar"):
                problem = "is needed by" if self.type == "grammar" else "is not a field of"
                raise FieldError(f"tools.format.{name}", f"{problem} a format of {self.type}")
        return self

    def schema_of_call(self, place: str) -> dict[str, Any] | None:
        """The schema of calls, None for any text. Errors name the field ``place``."""
        if self.definition is None:
            return None
        try:
            if self.syntax == "lark":
                regex = regex_of(self.definition)
            else:
                regex = balanced(_ANCHORS.sub(r"\1", self.definition))
        except ValueError as error:
            raise FieldError(place, str(error)) from None
        schema = _schema_of_text({"type": "string", "pattern": f"^(?:{regex})$"})
        return {**schema, "additionalProperties": False}


_ANCHORS = re.compile(r"\A\^|(?<!\\)((?:\\\\)*)\$\Z")
"""Anchors at both ends are redundant: the expression must match the whole text."""


class CustomTool(Body):
    """A tool whose input is a text. The prompt shows its grammar, and calls must follow it."""

    droppable = None
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def function(self) -> FunctionTool:
        """A function whose one argument is the text."""
        about = self.description
        if self.format is not None and self.format.type == "grammar":
            grammar = f"The input keeps to this {self.format.syntax}:\n{self.format.definition}"
            about = joined(about, grammar, "\n\n")
        schema = _schema_of_text({"type": "string"})
        return FunctionTool(type="function", name=self.name, description=about, parameters=schema)


def _schema_of_text(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


_Callable = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Body):
    """Functions under one name. The description of its first function begins with its own."""

    droppable = None
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[_Callable], Field(min_length=1, fail_fast=True)]


def _runnable(tools: Any) -> Any:
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom", "namespace"):
            problem = f"expected 'function', 'custom' or 'namespace', got {clipped(kind)}"
            raise FieldError(
                f"tools.{at}.type",
                f"{problem}; this server runs no tools: turn it off in the client",
            )
    return tools


_AnyTool = Annotated[FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type")]
_Tools = Annotated[list[_AnyTool], Field(fail_fast=True), BeforeValidator(_runnable)]


class FunctionChoice(Body):
    type: Literal["function", "custom"]
    name: str


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, fail_fast=True)]


class TextFormat(Body):
    droppable = None
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    droppable = None
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """``effort`` has an effect if the chat template knows it. Answers always show reasoning."""

    droppable = None
    unused = frozenset({"summary", "generate_summary"})
    effort: str | None = None


class ResponsesBody(TranslatedBody):
    """Fields that name a request, or concern OpenAI's storage and billing, change no answer."""

    names = _NAMES
    unused = frozenset(
        {"max_tool_calls", "stream_options", "client_metadata", "service_tier"}
        | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    )

    input: str | _Items
    instructions: str | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    max_output_tokens: Count | None = None
    metadata: TextMap | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    tools: _Tools | None = None
    top_logprobs: TopLogprobs | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        asked = self.text and self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return {"type": "json_object"}
        fields = asked.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": fields}


_ITEM = TypeAdapter[_Item](_AnyItem)


def prepare(
    body: ResponsesBody, model: ServedModel, most_choices: int, owner: str, kept: KeptResponses
) -> Prepared:
    messages = _all_messages(body, owner, kept)
    with client_fields(body.names):
        asked = _chat(body, model, messages)
        choices, sections = chat.prepare_parts(asked, model, most_choices, owner, fits=True)
    return choices, partial(
        ResponseAnswers,
        sections=sections[0],
        echoed=_echoed(body, asked, model),
        has_logprobs=bool(asked.logprobs),
        items={one.function.name: one.item for one in _functions(body)},
        keep=None if body.store is False else partial(_keep, kept, owner, messages),
    )


def chat_of(
    body: ResponsesBody, model: ServedModel, owner: str, *, kept: KeptResponses
) -> ChatBody:
    return _chat(body, model, _all_messages(body, owner, kept))


def _all_messages(body: ResponsesBody, owner: str, kept: KeptResponses) -> list[Message]:
    before: list[Message] = []
    items: list[_Item] = []
    found = ChatMessages()
    if isinstance(body.input, str):
        found.say("user", body.input)
    else:
        items += body.input
    for item in items:
        _add_item(found, item)
    if body.previous_response_id is not None:
        response, before = kept.conversation(owner, body.previous_response_id)
        calls = [item for item in response["output"] if item["type"] in _CALLS]
        items = [*map(_ITEM.validate_python, calls), *items]
    _check_results(items, before)
    return [*before, *found.end()]


def _check_results(items: Sequence[Any], before: Sequence[Message]) -> None:
    """Refuses results without calls and calls without results, in the words of OpenAI."""
    found = {call.id: "" for message in before for call in message.tool_calls or ()}
    pending: dict[str, str] = {}
    for item in items:
        if isinstance(item, FunctionCallItem | CustomCallItem):
            found[item.call_id] = pending[item.call_id] = item.type
        elif isinstance(item, FunctionOutputItem):
            if found.get(item.call_id, "?") not in ("", item.type.removesuffix("_output")):
                raise _unmatched("call", item.type, " with call_id", item.call_id)
            pending.pop(item.call_id, None)
    for name, kind in pending.items():
        raise _unmatched("output", kind, "", name)


def _unmatched(what: str, kind: str, by: str, name: str) -> ApiError:
    which = f"{kind.replace('_', ' ')}{by} {clipped(name)[1:-1]}"
    return ApiError(f"No tool {what} found for {which}.", param="input")


def _keep(
    kept: KeptResponses, owner: str, messages: Sequence[Message], response: dict[str, Any]
) -> None:
    answer = ChatMessages()
    for item in response["output"]:
        _add_item(answer, _ITEM.validate_python(item))
    kept.put(owner, response, [*messages, *answer.messages])


def _chat(body: ResponsesBody, model: ServedModel, messages: list[Message]) -> ChatBody:
    template = chat.template_of(model)
    if body.instructions:
        lead = Message(role="system", content=body.instructions)
        if messages and messages[0].role in ("system", "developer"):
            # Many templates accept only one system message.
            lead.content = f"{body.instructions}\n\n{messages[0].content}"
            messages = messages[1:]
        messages = [lead, *messages]
    if not messages:
        raise FieldError("input", "is empty, send a text or at least one item")
    offered = [*_functions(body)]
    tools: Any = [
        {
            "type": "function",
            "function": one.function.model_dump(exclude={"type"}, exclude_none=True),
        }
        for one in offered
    ] or None
    include = {*(body.include or ())} - {"reasoning.encrypted_content"}
    if unknown := include - {"message.output_text.logprobs"}:
        raise unsupported("include", f"{clipped(min(unknown))} is not known")
    effort = body.reasoning and body.reasoning.effort
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = _named(choice, offered, "tool_choice.name")
    elif isinstance(choice, AllowedChoice):
        allowed = [_named(one, offered, "tool_choice.tools") for one in choice.tools]
        within = ToolList(mode=choice.mode, tools=allowed)
        choice = AllowedTools(type="allowed_tools", allowed_tools=within)
    asked = ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=True if include else None,
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=choice if body.tools else None,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.response_format,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort if template.knows("reasoning_effort") else None,
        verbosity=body.text and body.text.verbosity,
    )
    for own, one in zip(asked.tools or (), offered, strict=True):
        if choice != "none":
            own.function.enforce(one.form and one.form.schema_of_call(one.place), one.place)
    return asked


class _Offered(NamedTuple):
    """A tool of the request as a function of the chat.

    ``item`` has the fields of its calls here, ``place`` the field of its grammar or schema.
    """

    function: FunctionTool
    item: dict[str, str]
    form: CustomFormat | None
    place: str


def _named(choice: FunctionChoice, offered: Sequence[_Offered], field: str) -> NamedTool:
    kind = "custom_tool_call" if choice.type == "custom" else "function_call"
    if all(one.function.name != choice.name or one.item["type"] != kind for one in offered):
        problem = f"is none of the tools of type {choice.type}: {clipped(choice.name)}"
        raise FieldError(field, problem)
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def _functions(body: ResponsesBody) -> Iterator[_Offered]:
    for at, tool in enumerate(body.tools or ()):
        if not isinstance(tool, NamespaceTool):
            yield _function_of(tool, f"tools.{at}")
            continue
        about = tool.description
        for number, each in enumerate(tool.tools):
            found = _function_of(each, f"tools.{at}.tools.{number}")
            one, more = found.function, {"name": _flat(each.name, tool.name)}
            if about:
                more["description"], about = joined(about, one.description or "", "\n\n"), None
            yield found._replace(
                function=one.model_copy(update=more), item={**found.item, "namespace": tool.name}
            )


def _function_of(tool: FunctionTool | CustomTool, place: str) -> _Offered:
    if isinstance(tool, FunctionTool):
        item = {"type": "function_call", "name": tool.name}
        return _Offered(tool, item, None, f"{place}.parameters")
    item = {"type": "custom_tool_call", "name": tool.name}
    return _Offered(tool.function(), item, tool.format, f"{place}.format.definition")


def _flat(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _text(content: str | Sequence[InputText | InputImage]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise FieldError("input", "input_image may be in a message of the user")
    return "\n".join(part.text for part in content if isinstance(part, InputText))


def _parts(content: str | Sequence[InputText | InputImage]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [
        part_of(part.text) if isinstance(part, InputText) else part_of(url=part.image_url)
        for part in content
    ]


def _add_item(found: ChatMessages, item: Any) -> None:
    if isinstance(item, FunctionOutputItem):
        found.result(_parts(item.output), item.call_id)
    elif isinstance(item, InputMessage) and item.role != "assistant":
        to_parts = _parts if item.role == "user" else _text
        found.say(item.role, to_parts(item.content))
    elif isinstance(item, InputMessage):
        message = found.answer()
        assert not isinstance(message.content, list)
        message.content = joined(message.content, _text(item.content), "\n")
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        message = found.answer()
        name = _flat(item.name, item.namespace)
        call = FunctionCall(name=name, arguments=item.arguments)
        call_of = ToolCall(id=item.call_id, function=call)
        message.tool_calls = [*(message.tool_calls or ()), call_of]
    else:
        message = found.answer()
        if message.content is not None or message.tool_calls:
            message = found.answer(is_new=True)
        thought = _text(item.content or item.summary or ())
        message.reasoning_content = joined(message.reasoning_content, thought, "\n")


def _echoed(body: ResponsesBody, asked: ChatBody, model: ServedModel) -> dict[str, Any]:
    """The request's settings, which a response repeats."""
    sampling = sampling_of(asked, model)
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    choice = body.tool_choice
    plain = choice.model_dump() if isinstance(choice, Body) else choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": plain or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class ResponseAnswers(PartAnswers):
    """A response whose items begin, grow and end as numbered events."""

    def __init__(
        self,
        generation: Generation,
        sections: Sections,
        echoed: dict[str, Any],
        has_logprobs: bool,
        items: Mapping[str, dict[str, str]],
        keep: Any,
    ) -> None:
        super().__init__(generation, sections)
        self._has_logprobs = has_logprobs
        self._call_items = items
        self._keep = keep
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": self._created_s,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": generation.model.name,
            **echoed,
            "usage": None,
        }

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(super().chunks()) as events:
            async for event in events:
                if self._keep is not None and event["type"] in _LAST:
                    # A client may ask for it as soon as it gets the event.
                    await asyncio.to_thread(self._keep, self.result())
                yield event

    def begin(self) -> Iterator[dict[str, Any]]:
        for word in ("created", "in_progress"):
            yield self._event(f"response.{word}", response=self.result())

    def add(self, part: Part, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        if isinstance(part, ParsedCall):
            yield from self._close()
            plain = {"type": "function_call", "name": part.name}
            item = self._call_items.get(part.name, plain)
            prefix, field = _CALLS[item["type"]]
            given, about = part.arguments, {"name": item["name"]}
            if field == "input":
                given, about = _input_of(given), {}
            call = {"id": prefix, "call_id": f"call_{uuid.uuid4().hex[:24]}"}
            yield from self._open({**call, **item, field: ""})
            self._items[-1][field] = given
            stem = f"response.{item['type']}_{field}"
            yield self._of_item(f"{stem}.delta", delta=given)
            yield self._of_item(f"{stem}.done", **{field: given}, **about)
            yield from self._close()
            return
        kind, text = part
        name, part_name, stem = _TEXTS[kind]
        if not self._is_open or self._items[-1]["type"] != name:
            yield from self._close()
            first = {"role": "assistant"} if kind == "content" else {"summary": []}
            yield from self._open({"type": name, "id": _PREFIXES[name], **first, "content": []})
            about = {"annotations": [], "logprobs": []} if kind == "content" else {}
            self._items[-1]["content"] = [{"type": part_name, "text": "", **about}]
            shown = {"type": part_name, "text": "", **about}
            yield self._of_item("response.content_part.added", content_index=0, part=shown)
        content = self._items[-1]["content"][0]
        content["text"] += text
        more: dict[str, Any] = {}
        if kind == "content":
            found = chat_logprobs(tokens, self._vocabulary)["content"] if self._has_logprobs else []
            content["logprobs"] += found
            more = {"logprobs": found}
        yield self._of_item(f"{stem}.delta", content_index=0, delta=text, **more)

    def end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        is_whole = piece.finish != "length"
        status = "completed" if is_whole else "incomplete"
        yield from self._close(status)
        usage = self.generation.usage
        self._response |= {
            "status": status,
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_thought},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        yield self._event(f"response.{status}", response=self.result())

    def result(self) -> dict[str, Any]:
        return {**self._response, "output": self._items}

    def failed(self, error: ApiError) -> dict[str, Any]:
        code = error.code or error.kind
        return self._event("error", code=code, message=error.message, param=error.param)

    @property
    def _is_open(self) -> bool:
        return bool(self._items) and self._items[-1]["status"] == "in_progress"

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        item |= {"id": f"{item['id']}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._items.append(item)
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=dict(item))

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        item = self._items[-1]
        item["status"] = status
        for kind, (name, _, stem) in _TEXTS.items():
            if item["type"] == name:
                content = item["content"][0]
                more = {"logprobs": content["logprobs"]} if kind == "content" else {}
                text = content["text"]
                yield self._of_item(f"{stem}.done", content_index=0, text=text, **more)
                yield self._of_item("response.content_part.done", content_index=0, part=content)
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _input_of(arguments: str) -> str:
    """The input of a custom tool, from the arguments of its function."""
    found = json.loads(arguments)
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


_LAST = ("response.completed", "response.incomplete")
_CALLS = {"function_call": ("fc", "arguments"), "custom_tool_call": ("ctc", "input")}
"""The prefix of ids, and the field with the input, of each kind of call."""
_PREFIXES = {"message": "msg", "reasoning": "rs"}
_TEXTS = {
    "content": ("message", "output_text", "response.output_text"),
    "reasoning": ("reasoning", "reasoning_text", "response.reasoning_text"),
}
"""The item, its part and its events, of each kind of text."""
