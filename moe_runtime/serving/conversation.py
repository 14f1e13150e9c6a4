"""A conversation with a model: its messages, and the cost of each answer."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.errors import MoERuntimeError
from moe_runtime.files import at_home
from moe_runtime.inference.generation import encode_messages
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.inference.pictures import Picture, PictureReader, Pictures, place
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.answer_text import (
    HARMONY_MARKS,
    AnswerSections,
    AnswerText,
    HarmonySections,
    Piece,
    is_harmony,
)
from moe_runtime.serving.requests import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    PromptRead,
    SamplingOptions,
)
from moe_runtime.types import RuntimeStats

_LOOKING_S = 0.05
"""Seconds between two checks for a request to stop, while no token comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The cost of one answer; ``ttft_s`` is to its first token, ``decode_s`` from there on."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float | None
    decode_s: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Said:
    """A conversation without its model, with the files of pictures: ``shown`` in messages, and
    ``waiting`` for the next one."""

    messages: list[dict[str, Any]]
    turns: list[Turn]
    shown: list[str]
    waiting: list[str]


class Conversation:
    """Messages and answers. Later turns use the prefix cache of earlier ones.

    ``stops`` end an answer and are not part of it. ``known_tokens`` are the positions that the
    model knows, None for no limit.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        end_ids: frozenset[int],
        sampling: SamplingOptions,
        max_new_tokens: int,
        known_tokens: int | None = None,
        system: str | None = None,
        stops: Sequence[str] = (),
        reader: PictureReader | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._stops = stops
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._known_tokens = known_tokens
        self._system = system
        self._is_harmony = is_harmony(str(tokenizer.chat_template))
        marks = HARMONY_MARKS if self._is_harmony else ()
        self._shown = tokenizer.convert_tokens_to_ids(list(marks))
        self._reader = reader
        self.num_generated = 0  # tokens of all answers, also of the current one
        self.reset()

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.messages: list[dict[str, Any]] = [*system]
        self.turns: list[Turn] = []
        self._pictures: list[Picture] = []  # of all messages, in their order
        self._waiting: list[tuple[str, Picture]] = []

    def show(self, file: str) -> None:
        """Puts a picture before the text of the next message.

        Raises:
            ValueError: the model takes no pictures, or the file is not a picture.
            OSError: the file cannot be read.
        """
        if self._reader is None:
            raise ValueError("this model takes no pictures")
        (picture,) = self._reader.open_all([file])
        self._waiting.append((os.path.abspath(at_home(file)), picture))

    @property
    def has_ended(self) -> bool:
        """Whether the engine takes no more requests."""
        return not self._engine.is_open

    def expert_stats(self) -> RuntimeStats:
        """Statistics of experts, in all processes of a divided model."""
        return self._engine.statistics().experts

    @property
    def said(self) -> Said:
        contents = [message["content"] for message in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        shown = [part["image"] for part in parts if "image" in part]
        return Said([*self.messages], [*self.turns], shown, [file for file, _ in self._waiting])

    def go_on_from(self, said: Said, pictures: Sequence[Picture]) -> None:
        """Continues a conversation with another model; ``pictures`` are this model's of its files,
        shown ones first."""
        self.messages, self.turns = [*said.messages], [*said.turns]
        self._pictures = [*pictures[: len(said.shown)]]
        self._waiting = [*zip(said.waiting, pictures[len(said.shown) :], strict=True)]

    def undo(self) -> bool:
        """Removes the last message and its answer; returns whether there was one."""
        if not self.turns:
            return False
        content = self.messages[-2]["content"]
        if isinstance(content, list):
            del self._pictures[1 - len(content) :]  # all parts but the text
        del self.messages[-2:]
        self.turns.pop()
        return True

    def ask(
        self, text: str, on_text: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> Turn:
        """Answers a message and keeps both, also if the answer was stopped.

        ``on_text`` gets each piece of the answer, and the analysis of gpt-oss, which is not kept.

        Raises:
            ValueError: the conversation is too long, or the message is not text.
            MoERuntimeError: the chat template refuses it, or the model failed; nothing is kept.
        """
        text.encode()  # half a surrogate pair is not text
        content: Any = text
        if self._waiting:
            marks = [{"type": "image", "image": file} for file, _ in self._waiting]
            content = [*marks, {"type": "text", "text": text}]
        messages = [*self.messages, {"role": "user", "content": content}]
        shown = [*self._pictures, *(picture for _, picture in self._waiting)]
        pictures = Pictures(self._reader, shown) if self._reader and shown else None
        prompt = encode_messages(self._tokenizer, messages, pictures)["input_ids"][0].tolist()
        most = self._engine.most_request_tokens
        if len(prompt) >= most:
            is_whole = self._known_tokens is not None and most >= self._known_tokens
            raise ValueError(
                f"the conversation has {len(prompt)} tokens and may have {most} with its answer"
                + (", as many as the model knows; " if is_whole else "; ")
                + ("/reset begins a new one, or send" if self.turns else "send")
                + " a shorter message"
                + ("" if is_whole else ", or start again with a larger --max-tokens")
            )
        request = GenerationRequest(
            prompt_ids=tuple(prompt),
            max_new_tokens=min(self._max_new_tokens, most - len(prompt)),
            stop_ids=self._end_ids,
            sampling=self._sampling,
            pictures=place(prompt, shown),
        )
        answer, turn = self._answer(request, on_text, is_stopped)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.turns.append(turn)
        self._pictures = shown
        self._waiting.clear()
        return turn

    def _answer(
        self,
        request: GenerationRequest,
        on_text: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> tuple[str, Turn]:
        decoded = IncrementalText.of(self._tokenizer, self._shown)
        text, reason = AnswerText(decoded, self._stops, self._end_ids), None
        sections = HarmonySections() if self._is_harmony else AnswerSections(None, None)
        content, was_thought = "", False

        def show(piece: Piece) -> FinishReason | None:
            nonlocal content, was_thought
            for part in (*sections.add(piece.text), *(sections.end() if piece.finish else ())):
                if not isinstance(part, tuple):
                    continue  # without tools no part is a call
                kind, said = part
                is_content = kind == "content"
                on_text(("\n\n" if is_content and was_thought else "") + said)
                content, was_thought = content + said * is_content, not is_content
            return piece.finish

        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        started_s = time.perf_counter()
        times_s: list[float] = []
        cached_tokens, event = 0, None
        handle = self._engine.submit(request, events.put)
        try:
            while reason is None and not isinstance(event, Finished):
                event = None
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=_LOOKING_S)
                if is_stopped():
                    handle.cancel()
                if isinstance(event, PromptRead):
                    cached_tokens = event.cached_tokens
                elif isinstance(event, NewToken):
                    times_s.append(time.perf_counter())
                    self.num_generated += 1
                    reason = show(text.add(event))
        finally:
            handle.cancel()
        if isinstance(event, Finished):
            if event.reason == "error":
                raise self._engine.failure or MoERuntimeError(event.problem)
            reason = show(text.end(event.reason))
        assert reason is not None
        return content, Turn(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=cached_tokens,
            new_tokens=len(times_s),
            ttft_s=times_s[0] - started_s if times_s else None,
            decode_s=times_s[-1] - times_s[0] if times_s else 0.0,
            reason=reason,
        )
