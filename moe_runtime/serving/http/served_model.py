"""A served model: its engine, vocabulary, chat template and defaults; its place in the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from moe_runtime.errors import blamed_on
from moe_runtime.inference.generation import (
    end_token_ids,
    in_known_roles,
    stop_strings_of,
    takes_later_systems,
    template_names,
    template_source,
    warn_of_unused,
)
from moe_runtime.inference.pictures import PictureReader
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.answer_text import Vocabulary, is_harmony, reasoning_marks_of
from moe_runtime.serving.http.api_errors import ApiError, FieldError, unsupported
from moe_runtime.serving.http.grammars import Grammars
from moe_runtime.serving.http.limits import LimitedProcess, LimitError
from moe_runtime.serving.http.schema import ImagePart, Message, TextPart, Tool
from moe_runtime.serving.http.tool_formats import tool_format_of

_OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"),
        *("tokenize", "chat_template", "conversation", "continue_final_message", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "processor_kwargs", "load_audio_from_video"),
    }
)
"""Variables that ``chat_template_kwargs`` may not set."""
_RENDER_S, _RENDER_BYTES = 2.0, 128 << 20
"""Limits of rendering: CPU time, and memory beyond that of the conversation."""
_ASKED_OF_ALL = frozenset({"enable_thinking"})
"""Clients send these variables to every model; templates without them ignore them."""


class ChatTemplate:
    """Renders conversations. The template's source tells how the model writes its answers.

    ``process`` renders within limits; without it there are none. ``reasoning`` and ``tools`` are
    None if the template has no known form of them, and always with ``is_harmony``.
    """

    def __init__(self, tokenizer: Any, process: LimitedProcess | None = None) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers render without Jinja.
        own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        self._process = None if own else process
        self._source = template_source(tokenizer)
        self.is_harmony = is_harmony(self._source)
        self.reasoning = None if self.is_harmony else reasoning_marks_of(self._source)
        self.tools = None if self.is_harmony else tool_format_of(self._source)

    def knows(self, variable: str) -> bool:
        return template_names(self._source, variable)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, special tokens included."""
        given = {
            name: value
            for name, value in (variables or {}).items()
            if name not in _ASKED_OF_ALL or self.knows(name)
        }
        for name in given:
            if name in _OWN_VARIABLES or not self.knows(name):
                place = f"chat_template_kwargs.{name}"
                raise unsupported(place, "is not a variable of this model's chat template")
        if tools and not self.knows("tools"):
            raise unsupported("tools", "this model's chat template has none")
        conversation = [self._plain(message, at) for at, message in enumerate(messages)]
        conversation = in_known_roles(conversation, self._source, lambda: self._takes_later_systems)
        given |= {
            "tools": [tool.model_dump(exclude_none=True) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self.write(conversation, **given)

    def write(self, conversation: list[dict[str, Any]], **given: Any) -> str:
        """Renders a plain conversation within the limits of the process."""
        if self._process is None:
            with blamed_on("messages: this model's chat template refuses them", ApiError):
                return self._tokenizer.apply_chat_template(conversation, tokenize=False, **given)
        work = {
            "conversations": [conversation],
            "chat_template": self._tokenizer.get_chat_template(tools=given.get("tools")),
            **self._tokenizer.special_tokens_map,
            **given,
        }
        try:
            found = self._process.ask(work, cpu_s=_RENDER_S, memory_bytes=_RENDER_BYTES)
        except LimitError as error:
            message = f"messages: this model's chat template {error} for them"
            raise ApiError(message, param="messages", code="template_limit") from None
        if "problem" in found:
            raise ApiError(found["problem"])
        return found["text"]

    @cached_property
    def _takes_later_systems(self) -> bool:
        with contextlib.suppress(ApiError):
            return takes_later_systems(
                lambda tried: self.write(tried, tools=None, add_generation_prompt=True)
            )
        return False

    def opens_reasoning(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.opens)

    def closes_reasoning(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.closes)

    def _plain(self, message: Message, at: int) -> dict[str, Any]:
        plain = message.model_dump(exclude_none=True)
        content = message.content
        if self.is_harmony and message.reasoning_content and not (content and message.tool_calls):
            # gpt-oss's template has its own name, and accepts only one of the two with calls.
            plain["thinking"] = plain.pop("reasoning_content")
        is_text = isinstance(content, str)
        plain["content"] = content if is_text else _parts(content or ())
        if message.role != "assistant" and content is None:
            raise FieldError(f"messages.{at}.content", "is missing or null")
        for number, call in enumerate(plain.get("tool_calls", ())):
            where = f"messages.{at}.tool_calls.{number}.function.arguments"
            call["function"]["arguments"] = _arguments(call["function"]["arguments"], where)
        return plain


def _parts(content: Sequence[TextPart | ImagePart]) -> str | list[dict[str, str]]:
    """Content for templates: one text, or parts if there are pictures."""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in content
    ]


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FieldError(where, f"expected a JSON object as text, got {text[:200]!r}")
    return value


_OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model that requests can name, or its ``parent`` with an adapter.

    Attributes:
        defaults: sampling options of the checkpoint, else OpenAI's.
        adapter: its key in the engine.
        pictures: reads pictures; None if the model accepts none.
        fetches_pictures: from URLs too.
    """

    name: str
    engine: Engine
    vocabulary: Vocabulary
    template: ChatTemplate | None
    grammars: Grammars
    defaults: Mapping[str, float] = field(default_factory=_OPENAI.copy)
    parent: str | None = None
    adapter: str | None = None
    pictures: PictureReader | None = None
    fetches_pictures: bool = False


@dataclass(slots=True, eq=False)
class Place:
    """A model that requests may name, loaded or not.

    Attributes:
        adapters: their names.
        served: the model and its adapters by name; empty while it is not loaded.
        num_users: requests that hold it.
        failure: why loading failed the last time; empty if it succeeded.
        used_s: time of its last use, by the table's clock.
        waiting: requests that wait until it is loaded.
    """

    name: str
    adapters: list[str] = field(default_factory=list)
    takes_pictures: bool = False
    served: dict[str, ServedModel] = field(default_factory=dict)
    num_users: int = 0
    failure: str = ""
    created_s: int = field(default_factory=lambda: int(time.time()))
    used_s: float = 0.0
    is_loading: bool = False
    is_closing: bool = False
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``unloaded``, ``loading`` or ``loaded``."""
        is_there = self.served or self.is_closing
        return "loading" if self.is_loading else "loaded" if is_there else "unloaded"


def serve_model(
    name: str,
    engine: Engine,
    tokenizer: Any,
    model: Any,
    templates: LimitedProcess,
    grammars: LimitedProcess,
    pictures: PictureReader | None = None,
    *,
    fetches_pictures: bool = False,
) -> ServedModel:
    settings = model.generation_config
    warn_of_unused(settings, is_engine=True)
    size = model.config.get_text_config().vocab_size
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer, templates)
    ends = end_token_ids(model, tokenizer, template and template.write)
    vocabulary = Vocabulary(tokenizer, size, ends, stop_strings_of(settings))
    found = {option: getattr(settings, option, None) for option in _OPENAI}
    return ServedModel(
        name=name,
        engine=engine,
        vocabulary=vocabulary,
        template=template,
        grammars=Grammars(vocabulary, grammars),
        defaults=_OPENAI | {name: value for name, value in found.items() if value is not None},
        pictures=pictures,
        fetches_pictures=fetches_pictures,
    )
