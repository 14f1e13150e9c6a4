"""The JSON of a chat's answers: messages, or deltas as they grow."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from moe_runtime.serving.http.answers.answer_sections import AnswerSections, Part
from moe_runtime.serving.http.answers.answer_text import AnswerToken, Piece
from moe_runtime.serving.http.answers.call_readers import ParsedCall
from moe_runtime.serving.http.answers.harmony import HarmonySections
from moe_runtime.serving.http.answers.log_probabilities import chat_logprobs
from moe_runtime.serving.http.chat import ChatPlan
from moe_runtime.serving.http.generating import Generation
from moe_runtime.serving.http.schema import ChatBody


class _Message:
    """One answer: its sections, and what of them was said."""

    def __init__(self, sections: AnswerSections | HarmonySections) -> None:
        self._sections = sections
        self.num_calls = 0

    def deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What the message grows by with a piece of text."""
        yield from map(self._delta, self._sections.add(piece.text))
        if piece.finish is not None:
            yield from map(self._delta, self._sections.end(cut_by=piece.cut_by))

    def reason(self, piece: Piece) -> str | None:
        """Why the message ends with a piece, if it does."""
        return "tool_calls" if piece.finish == "stop" and self.num_calls else piece.finish

    def _delta(self, part: Part) -> dict[str, Any]:
        if not isinstance(part, ParsedCall):
            kind, text = part
            return {"content" if kind == "content" else "reasoning_content": text}
        call = {
            "index": self.num_calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }
        self.num_calls += 1
        return {"tool_calls": [call]}


class ChatAnswer:
    """Makes the JSON of one request's answers.

    Args:
        body: of the request.
        generation: its answers.
        plan: what the answers may be made of.
    """

    def __init__(self, body: ChatBody, generation: Generation, plan: ChatPlan) -> None:
        self._body = body
        self._generation = generation
        self._messages = [_Message(plan.sections()) for _ in generation.choices]
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created_s = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The answers when they are done."""
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None} for _ in self._messages
        ]
        tokens: list[list[AnswerToken]] = [[] for _ in messages]
        reasons: list[str | None] = [None] * len(messages)
        async with contextlib.aclosing(self._generation.pieces()) as pieces:
            async for index, piece in pieces:
                for delta in self._messages[index].deltas(piece):
                    _extend(messages[index], delta)
                tokens[index] += piece.tokens
                reasons[index] = self._messages[index].reason(piece) or reasons[index]
        choices = []
        for index, message in enumerate(messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            for call in message.get("tool_calls", ()):
                del call["index"]
            choices.append(self._choice(index, "message", message, tokens[index], reasons[index]))
        frame = {**self._frame("chat.completion"), **self._prompt_ids()}
        return {**frame, "choices": choices, "usage": self._generation.usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answers as they grow."""
        options = self._body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        frame, usage = self._frame("chat.completion.chunk"), self._generation.usage
        wants_tokens = self._body.logprobs or self._body.return_token_ids

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            shown = {"usage": usage.body() if always else None} if has_usage else {}
            return {**frame, "choices": choices, **shown}

        silent = set(range(len(self._messages)))
        async with contextlib.aclosing(self._generation.pieces()) as pieces:
            async for index, piece in pieces:
                tokens = piece.tokens
                if index in silent:
                    # Not before the model has begun: clients take it for the first token.
                    begin = {"role": "assistant", "content": ""}
                    first = chunk([self._choice(index, "delta", begin, (), None)])
                    is_first = len(silent) == len(self._messages)
                    silent.discard(index)
                    yield {**first, **self._prompt_ids()} if is_first else first
                for delta in self._messages[index].deltas(piece):
                    yield chunk([self._choice(index, "delta", delta, tokens, None)])
                    tokens = ()
                if piece.finish is not None or (wants_tokens and tokens):
                    reason = self._messages[index].reason(piece)
                    yield chunk([self._choice(index, "delta", {}, tokens, reason)])
        if has_usage:
            yield {**frame, "choices": [], "usage": usage.body()}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self._generation.model.name,
        }

    def _choice(
        self,
        index: int,
        field: str,
        message: dict[str, Any],
        tokens: list[AnswerToken] | tuple[AnswerToken, ...],
        reason: str | None,
    ) -> dict[str, Any]:
        has_logprobs = bool(self._body.logprobs) and bool(tokens or field == "message")
        vocabulary = self._generation.model.vocabulary
        logprobs = chat_logprobs(tokens, vocabulary) if has_logprobs else None
        choice = {"index": index, field: message, "logprobs": logprobs, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = [one.token_id for one in tokens]
        return choice

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._generation.choices[0].request.prompt_ids}


def _extend(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to what a message has."""
    for field, value in delta.items():
        message[field] = value if message.get(field) is None else message[field] + value
