"""Answers of gpt-oss: messages in channels, as OpenAI's harmony format writes them.

A message is ``<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>``; the prompt ends behind
``assistant``. The channel ``analysis`` is reasoning, ``final`` and ``commentary`` are content, and
``commentary to=functions.NAME`` is a call whose text is the arguments in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moe_runtime.serving.http.answers.answer_sections import Kind, Part
from moe_runtime.serving.http.answers.answer_text import MarkSearch
from moe_runtime.serving.http.answers.call_readers import (
    ParsedCall,
    json_text,
    may_be_object,
    read_json,
)
from moe_runtime.serving.http.schema import Function

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
"""The special tokens that messages consist of."""
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def is_harmony(template: str) -> bool:
    """Whether a chat template writes messages in channels."""
    return all(mark in template for mark in (_START, _CHANNEL, _MESSAGE))


class HarmonySections:
    """Splits the text of an answer as it comes, its marks included; as `AnswerSections` does.

    Several messages of one kind are parted by a line break. A call that is no JSON object, and
    text without marks around it, are content.

    Args:
        functions: the tools that were given; without any, calls are content.
        prompt: what the answer follows; it may end within a message.
    """

    def __init__(self, functions: Sequence[Function] = (), prompt: str = "") -> None:
        self._has_tools = bool(functions)
        self._is_message = False
        self._given = self._header = self._call = ""
        self._kind: Kind | None = None  # None is a call
        self._called = ""
        self._said: set[Kind] = set()
        self._is_first = False
        self._search = MarkSearch((_MESSAGE,))
        begun = prompt.rfind(_START)
        for _ in self.add(prompt[begun:] if begun >= 0 else ""):
            pass
        # What the prompt says of the first message; the rest of it is no part of the answer.
        self._given, self._header = self._header + self._search.end(), ""
        self._said.clear()

    @property
    def is_within_message(self) -> bool:
        """Whether the text so far ends in the middle of a message."""
        return self._is_message

    def add(self, text: str) -> Iterator[Part]:
        """Takes text, and gives the parts that are final."""
        while True:
            free, mark, text = self._search.add(text)
            yield from self._take(free)
            if mark is None:
                return
            if self._is_message:
                yield from self._finish()
                # A message without an end: the next has begun.
                self._header = "" if mark in _ENDS else mark
                self._search = MarkSearch((_MESSAGE,))
            else:
                self._begin()
                self._search = MarkSearch((*_ENDS, _START, _CHANNEL))

    def end(self, *, cut_by: str | None = None) -> Iterator[Part]:
        """No more text comes.

        Args:
            cut_by: where the model would have written more: what it wrote next, as far as that is
                known. A call that has only begun is nothing then.
        """
        held = self._search.end()
        if not (self._is_message and self._kind is None and self._may_be_cut(cut_by)):
            yield from self._take(held)
        if self._is_message:
            yield from self._finish(cut_by)
        elif self._header and not any(mark in self._header for mark in HARMONY_MARKS):
            self._is_first = True
            yield from self._say("content", self._header)

    def _begin(self) -> None:
        """A message begins behind its header."""
        header, self._header, self._given = self._given + self._header, "", ""
        channel, recipient = _CHANNEL_NAME.findall(header), _RECIPIENT.findall(header)
        to = recipient[-1] if recipient else ""
        self._is_message = self._is_first = True
        self._call = ""
        if to.startswith(_FUNCTIONS):
            self._kind = None if self._has_tools else "content"
            self._called = to.removeprefix(_FUNCTIONS)
        else:
            # Tools of the model's own, which nobody gave it here, are part of its reasoning.
            is_thought = bool(to) or channel[-1:] == ["analysis"]
            self._kind = "reasoning" if is_thought else "content"

    def _take(self, text: str) -> Iterator[Part]:
        """Text of a header or of a message."""
        if not self._is_message:
            self._header += text
        elif self._kind is None:
            self._call += text
        elif text:
            yield from self._say(self._kind, text)

    def _may_be_cut(self, cut_by: str | None) -> bool:
        return cut_by is not None and may_be_object(self._call + cut_by)

    def _finish(self, cut_by: str | None = None) -> Iterator[Part]:
        """A message ends."""
        self._is_message = False
        if self._kind is not None:
            return
        try:
            arguments = read_json(self._call or ("{}" if cut_by is None else ""))
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            yield ParsedCall(self._called, json_text(arguments))
        elif not self._may_be_cut(cut_by):
            yield from self._say("content", self._call)

    def _say(self, kind: Kind, text: str) -> Iterator[Part]:
        gap = "\n" if self._is_first and kind in self._said else ""
        self._is_first = False
        self._said.add(kind)
        yield kind, gap + text
