"""What dialects share whose requests are translated into chats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from moe_runtime.serving.http import chat
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.schema import (
    Body,
    ChatBody,
    ImagePart,
    ImageUrl,
    Message,
    TextPart,
    first_problem,
)
from moe_runtime.serving.http.served_model import ServedModel


class TranslatedBody(Body):
    """A body that becomes a `ChatBody`; unknown fields of it may be null."""

    droppable = None
    names: ClassVar[Mapping[str, str]] = {}
    """Of fields of the chat, as `named` takes them."""

    model: str | None = None
    stream: bool | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The chat's field."""
        return None

    @property
    def may_have_grammar(self) -> bool:
        return bool(getattr(self, "tools", None)) or self.response_format is not None

    @property
    def stays_large(self) -> bool:
        return self.may_have_grammar

    def without_texts(self) -> Self:
        return self.model_construct(stream=self.stream)


def count_tokens(
    to_chat: Callable[..., ChatBody], body: TranslatedBody, model: ServedModel, owner: str
) -> int:
    """Tokens of the prompt that a conversation makes."""
    with named(body.names):
        asked = to_chat(body, model, owner)
        variables = asked.chat_template_kwargs
        prompt, _ = chat.prompt_of(asked, asked.messages, asked.tools or (), model, variables)
        return model.vocabulary.count(prompt, model.engine.most_request_tokens)


class ChatMessages:
    """Messages of a chat out of smaller items: those of one assistant's turn become one message.

    Pictures that tools give follow their results in a message of the user, where templates and
    models know them.
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
        """What a tool gave."""
        parts = [part_of(parts)] if isinstance(parts, str) else parts
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        self.say("tool", lead + "\n".join(texts), tool_call_id=call)
        self._pictures += [part for part in parts if isinstance(part, ImagePart)]

    def end(self) -> list[Message]:
        """All messages."""
        if self._pictures:
            self.say("user", [])
        return self.messages

    def answer(self) -> Message:
        """The assistant's message that further items belong to."""
        if not self._is_open:
            self.end()
            self.messages.append(Message(role="assistant"))
            self._is_open = True
        return self.messages[-1]

    def end_turn(self) -> None:
        self._is_open = False


def joined(first: str | None, second: str, gap: str = "") -> str:
    return second if first is None else first + gap + second


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Gives a field of the chat that an error names the name that the client knows.

    Args:
        names: beginnings of fields, or parts of them with a point before.
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
        if param == given:
            raise
        message = error.message.replace(given, param, 1)
        raise ApiError(
            message, status=error.status, param=param, code=error.code, headers=error.headers
        ) from None


def part_of(text: str = "", *, url: str | None = None) -> TextPart | ImagePart:
    if url is None:
        return TextPart(type="text", text=text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=url))
