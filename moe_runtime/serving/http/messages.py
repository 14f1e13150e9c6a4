"""``/v1/messages``: Anthropic's Messages API, as a translation into a chat and back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_runtime.serving.http import chat
from moe_runtime.serving.http.answer_text import AnswerToken, Part, Piece
from moe_runtime.serving.http.api_errors import ApiError, FieldError, TooLongError
from moe_runtime.serving.http.generating import Generation, PartAnswers, Prepared, Sections
from moe_runtime.serving.http.schema import (
    Body,
    ChatBody,
    ChatMessages,
    Count,
    FunctionCall,
    FunctionName,
    NamedTool,
    StopStrings,
    ToolCall,
    TranslatedBody,
    client_fields,
    joined,
    part_of,
)
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.tool_formats import ParsedCall, json_text

_NAMES = {
    "response_format": "output_config.format.schema",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    ".function.parameters": ".input_schema",
    ".function": "",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
"""Fields of the chat, and their names here."""


class _Block(Body):
    """A part of a message. Fields for Anthropic's cache and tools change no answer."""

    droppable = None
    unused = frozenset({"cache_control"})


class TextBlock(_Block):
    unused = _Block.unused | {"citations"}
    type: Literal["text"]
    text: str


class Base64Source(Body):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Body):
    type: Literal["url"]
    url: str


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        source = self.source
        if isinstance(source, UrlSource):
            return source.url
        return f"data:{source.media_type};base64,{source.data}"


_Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ThinkingBlock(_Block):
    unused = _Block.unused | {"signature"}
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Block):
    unused = _Block.unused | {"caller"}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Shown], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


_AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_AnyBlock], Field(fail_fast=True)]


class AnthropicTool(_Block):
    unused = _Block.unused | {
        *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")
    }
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """``budget_tokens`` is ignored: the model decides how long it thinks."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    droppable = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class MessagesBody(TranslatedBody):
    """``max_tokens`` is required for an answer, but not to count tokens."""

    names = _NAMES
    unused = frozenset(
        {"cache_control", "context_management", "diagnostics", "inference_geo", "service_tier"}
        | {"speed"}
    )

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    stop_sequences: StopStrings | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        asked = self.output_config and self.output_config.format
        if asked is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema_}}

    @property
    def user(self) -> str | None:
        return self.metadata and self.metadata.user_id


def prepare(body: MessagesBody, model: ServedModel, most_choices: int, owner: str = "") -> Prepared:
    if body.max_tokens is None:
        raise FieldError("max_tokens", "is missing", code="missing_required_parameter")
    with client_fields(body.names):
        asked = chat_of(body, model)
        choices, sections = chat.prepare_parts(asked, model, most_choices, owner, fits=True)
    return choices, partial(
        MessageAnswers,
        sections=sections[0],
        stops=body.stop_sequences or (),
        most_new=body.max_tokens,
        shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
    )


def chat_of(body: MessagesBody, model: ServedModel, owner: str = "") -> ChatBody:
    template = chat.template_of(model)
    messages = _conversation(body).end()
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config and body.output_config.effort
    if effort is not None and template.knows("reasoning_effort"):
        variables["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    tools: Any = [
        {
            "type": "function",
            "function": {
                **tool.model_dump(include={"name", "description", "strict"}, exclude_none=True),
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools or ()
    ] or None
    choice = body.tool_choice
    continues = messages[-1].role == "assistant"
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        tools=tools,
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=body.response_format,
        chat_template_kwargs=variables,
        continue_final_message=continues,
        add_generation_prompt=not continues,
    )


def _choice(asked: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    if asked is None or asked.type == "auto":
        return None
    if asked.type != "tool":
        return "required" if asked.type == "any" else "none"
    if asked.name is None:
        raise FieldError("tool_choice.name", "is missing", code="missing_required_parameter")
    return NamedTool(type="function", function=FunctionName(name=asked.name))


def _parts(blocks: Sequence[TextBlock | ImageBlock]) -> list[Any]:
    return [
        part_of(block.text) if isinstance(block, TextBlock) else part_of(url=block.url)
        for block in blocks
    ]


def _conversation(body: MessagesBody) -> ChatMessages:
    found = ChatMessages()
    system = body.system or ""
    if not isinstance(system, str):
        # The billing line differs between tasks, and would hide the common prefix behind it.
        lines = (one.text for one in system)
        system = "\n".join(
            line for line in lines if not line.startswith("x-anthropic-billing-header:")
        )
    if system:
        found.say("system", system)
    for at, message in enumerate(body.messages):
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        if not blocks:
            raise FieldError(f"messages.{at}.content", "is empty, send at least one block")
        texts: list[TextBlock | ImageBlock] = []
        for number, block in enumerate(blocks):
            where = f"messages.{at}.content.{number}"
            if message.role == "assistant":
                _add_to_answer(found, block, where)
            elif isinstance(block, TextBlock) or (
                isinstance(block, ImageBlock) and message.role == "user"
            ):
                texts.append(block)
            elif isinstance(block, ToolResultBlock) and message.role == "user":
                if texts:
                    found.say("user", _parts(texts))
                    texts = []
                lead = "Error: " if block.is_error else ""
                shown = block.content or ""
                parts = shown if isinstance(shown, str) else _parts(shown)
                found.result(parts, block.tool_use_id, lead)
            else:
                raise FieldError(where, f"{block.type} is not a block of the role {message.role}")
        if texts:
            found.say(message.role, _parts(texts))
    return found


def _add_to_answer(found: ChatMessages, block: Any, where: str) -> None:
    message = found.answer()
    if isinstance(block, TextBlock):
        assert not isinstance(message.content, list)
        message.content = joined(message.content, block.text)
    elif isinstance(block, ThinkingBlock):
        message.reasoning_content = joined(message.reasoning_content, block.thinking)
    elif isinstance(block, ToolUseBlock):
        call = FunctionCall(name=block.name, arguments=json_text(block.input))
        message.tool_calls = [*(message.tool_calls or ()), ToolCall(id=block.id, function=call)]
    else:
        raise FieldError(where, f"{block.type} is not a block of the role assistant")


_KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {401: "authentication_error", 403: "permission_error", 408: "timeout_error"}
_KINDS |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    message = error.of_anthropic if isinstance(error, TooLongError) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageAnswers(PartAnswers):
    """A message whose blocks begin, grow and end as events."""

    def __init__(
        self,
        generation: Generation,
        sections: Sections,
        stops: Sequence[str],
        most_new: int,
        shows_thoughts: bool,
    ) -> None:
        super().__init__(generation, sections)
        self._stops = stops
        self._is_cut = generation.choices[0].request.max_new_tokens < most_new
        self._shows_thoughts = shows_thoughts
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._message = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": generation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": {**self._message, "usage": self._usage()}}

    def add(self, part: Part, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        if isinstance(part, ParsedCall):
            name, about = part.name, {"id": f"toolu_{uuid.uuid4().hex[:24]}", "input": {}}
            yield from self._open({"type": "tool_use", **about, "name": name})
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            yield from self._close()
            self._blocks[-1]["input"] = json.loads(part.arguments)
            return
        kind, text = part
        name = "text" if kind == "content" else "thinking"
        if not self._is_open or self._blocks[-1]["type"] != name:
            yield from self._close()
            more = {} if name == "text" else {"signature": ""}
            yield from self._open({"type": name, name: "", **more})
        if name == "text" or self._shows_thoughts:
            self._blocks[-1][name] += text
            yield self._delta({"type": f"{name}_delta", name: text})

    def end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        yield from self._close()
        if not self._blocks and piece.finish != "length":  # clients expect one
            yield from self._open({"type": "text", "text": ""})
            yield from self._close()
        reason = "end_turn"
        if piece.finish == "length":
            reason = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        elif any(one["type"] == "tool_use" for one in self._blocks):
            reason = "tool_use"
        elif piece.cut_by and piece.cut_by in self._stops:
            reason = "stop_sequence"
        stop = piece.cut_by if reason == "stop_sequence" else None
        delta = {"stop_reason": reason, "stop_sequence": stop}
        self._message |= delta
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    def result(self) -> dict[str, Any]:
        return {**self._message, "content": self._blocks, "usage": self._usage()}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._blocks.append(dict(block))
        self._is_open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "thinking":  # clients expect one; it may be empty
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thought},
        }
