"""What an answer's text consists of: reasoning, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_runtime.serving.http.answers.answer_text import MarkSearch
from moe_runtime.serving.http.answers.tool_formats import ParsedCall, ToolFormat
from moe_runtime.serving.http.schema import Function


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Between which strings a family writes its reasoning."""

    opens: str
    closes: str


REASONING_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


def reasoning_marks_of(template: str) -> ReasoningMarks | None:
    """The marks that a chat template has; None where it has none that are known."""
    return next((marks for marks in REASONING_MARKS if marks.closes in template), None)


Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str] | ParsedCall
_Section = Literal["reasoning", "content", "call"]


class AnswerSections:
    """Splits the text of an answer as it comes.

    Args:
        reasoning: marks of reasoning; None where the text has none.
        tools: how calls are written; None where no tools were given.
        functions: the tools that were given.
        begins_with: ``"reasoning"`` where the prompt ends with the mark that opens it.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        tools: ToolFormat | None,
        functions: Sequence[Function] = (),
        begins_with: Kind = "content",
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._functions = functions
        self._section: _Section = begins_with
        self._call = ""
        self._has_content = False
        # White space at an end is text where text follows, and nothing where a mark does.
        self._spaces = ""
        self._is_behind_mark = begins_with == "reasoning"
        self._search = MarkSearch(self._marks())

    def add(self, text: str) -> Iterator[Part]:
        """Takes text, and gives the parts that are final."""
        if self._reasoning is None and self._tools is None:
            if text:
                yield "content", text
            return
        while True:
            free, mark, text = self._search.add(text)
            yield from self._take(free)
            if mark is None:
                return
            yield from self._pass(mark)
            self._search = MarkSearch(self._marks())

    def end(self) -> Iterator[Part]:
        """No more text comes."""
        yield from self._take(self._search.end())
        if self._section == "call":
            yield from self._finish_call("")
        if self._spaces and not self._is_behind_mark and self._section == "content":
            yield "content", self._spaces

    def _marks(self) -> list[str]:
        """What may end the section that the text is in."""
        marks: list[str | None] = []
        if self._section == "call":
            marks = [self._tools and self._tools.closes]
        elif self._section == "reasoning":
            marks = [self._reasoning and self._reasoning.closes]
        else:
            marks = [self._tools and self._tools.opens, self._reasoning and self._reasoning.opens]
        return [mark for mark in marks if mark is not None]

    def _take(self, text: str) -> Iterator[Part]:
        """Text of the section."""
        is_bare = self._tools is not None and self._tools.bare and not self._has_content
        if is_bare and self._section == "content" and text.lstrip().startswith("{"):
            self._section = "call"
        if self._section == "call":
            self._call += text
            return
        text = self._spaces + text
        if self._is_behind_mark:
            text = text.lstrip()
        body = text.rstrip()
        self._spaces = text[len(body) :]
        if body:
            self._is_behind_mark = False
            self._has_content = self._has_content or self._section == "content"
            yield self._section, body

    def _pass(self, mark: str) -> Iterator[Part]:
        """A mark ends the section."""
        if self._section == "call":
            yield from self._finish_call(mark)
        elif self._section == "reasoning":
            self._enter("content")
        elif self._tools is not None and mark == self._tools.opens:
            self._enter("call")
        elif self._has_content:
            # Reasoning stands at the beginning; further on the mark is talked about.
            yield from self._take(mark)
        else:
            self._enter("reasoning")

    def _enter(self, section: _Section) -> None:
        # What stands before a call is wanted if it turns out to be none.
        self._spaces = self._spaces if section == "call" else ""
        self._section, self._is_behind_mark = section, True

    def _finish_call(self, mark: str) -> Iterator[Part]:
        """Gives the calls that were written, or the text where it is none."""
        assert self._tools is not None
        text, spaces, self._call = self._call, self._spaces, ""
        self._enter("content")
        try:
            calls = self._tools.parse(text, self._functions)
        except (ValueError, RecursionError):
            opens = "" if self._tools.bare and text.lstrip().startswith("{") else self._tools.opens
            self._has_content, self._is_behind_mark = True, False
            yield "content", spaces + opens + text + mark
            return
        yield from calls
