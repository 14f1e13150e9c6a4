"""``/v1/responses``: OpenAI's Responses API, as a translation into a chat and back."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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
from moe_runtime.serving.http.schema import (
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
    TopLogprobs,
    TranslatedBody,
    Unused,
    joined,
    named,
    part_of,
)
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.tool_formats import ParsedCall

_KEPT_BYTES = 64 << 20
_NAMES = {
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    ".function": "",
}
"""Fields of the chat, and what they are called here."""


class _Item(Body):
    """A part of a conversation; what a server says of its own items changes no answer."""

    droppable = None
    id: str | None = None
    status: Unused = None


class InputText(Body):
    droppable = None
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Unused = None
    logprobs: Unused = None


class InputImage(Body):
    droppable = None
    type: Literal["input_image"]
    image_url: str
    detail: Unused = None


_Texts = str | Annotated[list[InputText], Field(fail_fast=True)]
_Part = Annotated[InputText | InputImage, Field(discriminator="type")]


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]
    phase: Unused = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Texts


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[InputText], Field(fail_fast=True)] | None = None
    content: Annotated[list[InputText], Field(fail_fast=True)] | None = None
    encrypted_content: None = None


def _typed(item: Any) -> Any:
    is_plain = isinstance(item, dict) and "type" not in item
    return {"type": "message", **item} if is_plain else item


_AnyItem = Annotated[
    InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem,
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


class NamespaceTool(Body):
    """Functions under one name; what it says of them all is told with the first."""

    droppable = None
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, fail_fast=True)]


def _runnable(tools: Any) -> Any:
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "namespace"):
            problem = f"expected 'function' or 'namespace', got {clipped(kind)}"
            raise FieldError(
                f"tools.{at}.type",
                f"{problem}; this server runs no tools: turn it off in the client",
            )
    return tools


_AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]
_Tools = Annotated[list[_AnyTool], Field(fail_fast=True), BeforeValidator(_runnable)]


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


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
    """How much a model thinks, where its template knows of that; it thinks aloud in any case."""

    droppable = None
    effort: str | None = None
    summary: Unused = None
    generate_summary: Unused = None


class ResponsesBody(TranslatedBody):
    """Fields that name a request, or concern what OpenAI keeps and bills, change no answer."""

    input: str | _Items
    instructions: str | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Unused = None
    metadata: TextMap | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream_options: Unused = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    tools: _Tools | None = None
    top_logprobs: TopLogprobs | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    client_metadata: Unused = None
    user: str | None = None
    prompt_cache_key: Unused = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    safety_identifier: str | None = None
    service_tier: Unused = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        asked = self.text and self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return {"type": "json_object"}
        fields = asked.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": fields}


@dataclass(frozen=True, slots=True)
class _Kept:
    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class KeptResponses:
    """The latest responses and their conversations, in memory; each key finds its own."""

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    def put(self, owner: str, response: dict[str, Any], messages: Sequence[Message]) -> None:
        plain = [message.model_dump(exclude_none=True) for message in messages]
        kept = _Kept(json.dumps(response).encode(), json.dumps(plain).encode())
        self._kept[owner, response["id"]] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def response(self, owner: str, name: str) -> dict[str, Any]:
        return json.loads(self._find(owner, name, "response_id").response)

    def messages(self, owner: str, name: str) -> list[Message]:
        found = json.loads(self._find(owner, name, "previous_response_id").messages)
        return [Message(**message) for message in found]

    def delete(self, owner: str, name: str) -> None:
        self._num_bytes -= self._find(owner, name, "response_id").num_bytes
        del self._kept[owner, name]

    def _find(self, owner: str, name: str, param: str) -> _Kept:
        found = self._kept.get((owner, name))
        if found is None:
            remedy = "; send the whole conversation as input" * (param == "previous_response_id")
            raise ApiError(
                f"{param}: expected a response that this server keeps (the latest ones, until it "
                f"ends), got {clipped(name)}{remedy}",
                status=404,
                param=param,
                code="response_not_found",
            )
        return found


def prepare(
    body: ResponsesBody, model: ServedModel, most_choices: int, owner: str, kept: KeptResponses
) -> Prepared:
    """What the engine is asked. Takes a while: not in the loop."""
    messages: list[Message] = []
    if body.previous_response_id is not None:
        messages = kept.messages(owner, body.previous_response_id)
    messages += _conversation(body).messages
    with named(_NAMES):
        asked = _chat(body, model, messages)
        choices, sections = chat.prepare_parts(asked, model, most_choices, owner, fits=True)
    return choices, partial(
        ResponseAnswers,
        sections=sections[0],
        echoed=_echoed(body, asked, model),
        has_logprobs=bool(asked.logprobs),
        names={tool.name: named_as for tool, named_as in _functions(body)},
        keep=None if body.store is False else partial(_keep, kept, owner, messages),
    )


def _keep(
    kept: KeptResponses,
    owner: str,
    messages: Sequence[Message],
    response: dict[str, Any],
) -> None:
    answer = ChatMessages()
    for item in response["output"]:
        kind = {"message": InputMessage, "reasoning": ReasoningItem}.get(item["type"])
        _add_item(answer, (kind or FunctionCallItem).model_validate(item))
    kept.put(owner, response, [*messages, *answer.messages])


def _chat(body: ResponsesBody, model: ServedModel, messages: list[Message]) -> ChatBody:
    template = chat.template_of(model)
    if body.instructions:
        lead = Message(role="system", content=body.instructions)
        if messages and messages[0].role in ("system", "developer"):
            # Many templates take one such message.
            lead.content = f"{body.instructions}\n\n{messages[0].content}"
            messages = messages[1:]
        messages = [lead, *messages]
    if not messages:
        raise FieldError("input", "is empty, send a text or at least one item")
    tools: Any = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool, _ in _functions(body)
    ] or None
    include = {*(body.include or ())} - {"reasoning.encrypted_content"}
    if unknown := include - {"message.output_text.logprobs"}:
        raise unsupported("include", f"{clipped(sorted(unknown)[0])} is not known")
    effort = body.reasoning and body.reasoning.effort
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = NamedTool(type="function", function=FunctionName(name=choice.name))
    return ChatBody(
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
        reasoning_effort=effort if template.knows("reasoning_effort") else None,
        verbosity=body.text and body.text.verbosity,
    )


def _functions(body: ResponsesBody) -> Iterator[tuple[FunctionTool, dict[str, str]]]:
    """Functions by the names that they have in a chat, and by what a call names them here."""
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            yield tool, {"name": tool.name}
            continue
        about = tool.description
        for one in tool.tools:
            more = {"name": _flat(one.name, tool.name)}
            if about:
                more["description"], about = joined(about, one.description or "", "\n\n"), None
            yield one.model_copy(update=more), {"name": one.name, "namespace": tool.name}


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


def _conversation(body: ResponsesBody) -> ChatMessages:
    found = ChatMessages()
    if isinstance(body.input, str):
        found.say("user", body.input)
    else:
        for item in body.input:
            _add_item(found, item)
    return found


def _add_item(found: ChatMessages, item: Any) -> None:
    if isinstance(item, FunctionOutputItem):
        found.say("tool", _text(item.output), tool_call_id=item.call_id)
    elif isinstance(item, InputMessage) and item.role != "assistant":
        to_parts = _parts if item.role == "user" else _text
        found.say(item.role, to_parts(item.content))
    elif isinstance(item, InputMessage):
        message = found.answer()
        assert not isinstance(message.content, list)
        message.content = joined(message.content, _text(item.content), "\n")
    elif isinstance(item, FunctionCallItem):
        message = found.answer()
        name = _flat(item.name, item.namespace)
        call = FunctionCall(name=name, arguments=item.arguments)
        call_of = ToolCall(id=item.call_id, function=call)
        message.tool_calls = [*(message.tool_calls or ()), call_of]
    else:
        message = found.answer()
        if message.content is not None or message.tool_calls:
            found.end_turn()  # it thinks anew
            message = found.answer()
        thought = _text(item.content or item.summary or ())
        message.reasoning_content = joined(message.reasoning_content, thought, "\n")


def _echoed(body: ResponsesBody, asked: ChatBody, model: ServedModel) -> dict[str, Any]:
    """The request's settings, which a response repeats."""
    sampling = sampling_of(asked, model)
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    tools = [tool.model_dump() for tool in body.tools or ()]
    choice = body.tool_choice
    plain = choice.model_dump() if isinstance(choice, FunctionChoice) else choice
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
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class ResponseAnswers(PartAnswers):
    """A response whose items begin, grow and end as numbered events."""

    def __init__(
        self,
        _: ResponsesBody,
        generation: Generation,
        sections: Sections,
        echoed: dict[str, Any],
        has_logprobs: bool,
        names: Mapping[str, dict[str, str]],
        keep: Any,
    ) -> None:
        super().__init__(generation, sections)
        self._has_logprobs = has_logprobs
        self._names = names
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

    def begin(self) -> Iterator[dict[str, Any]]:
        for word in ("created", "in_progress"):
            yield self._event(f"response.{word}", response=self.result())

    def add(self, part: Part, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        if isinstance(part, ParsedCall):
            yield from self._close()
            named_as = self._names.get(part.name, {"name": part.name})
            call = {"call_id": f"call_{uuid.uuid4().hex[:24]}", **named_as}
            yield from self._open({"type": "function_call", "id": "fc", **call, "arguments": ""})
            self._items[-1]["arguments"] = part.arguments
            said = f"{_CALL_ARGUMENTS}.delta", f"{_CALL_ARGUMENTS}.done"
            yield self._of_item(said[0], delta=part.arguments)
            yield self._of_item(said[1], arguments=part.arguments, name=named_as["name"])
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
        yield from self._close("completed" if is_whole else "incomplete")
        status = "completed" if is_whole else "incomplete"
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
        if self._keep is not None:
            self._keep(self.result())
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


_CALL_ARGUMENTS = "response.function_call_arguments"
_PREFIXES = {"message": "msg", "reasoning": "rs"}
_TEXTS = {
    "content": ("message", "output_text", "response.output_text"),
    "reasoning": ("reasoning", "reasoning_text", "response.reasoning_text"),
}
"""Of each kind of text: its item, the part of it, and its events."""
