"""What an answer's text consists of: reasoning, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_runtime.serving.http.answers.answer_text import JsonMarkSearch, MarkSearch
from moe_runtime.serving.http.answers.tool_formats import (
    ParsedCall,
    ToolFormat,
    bare_calls,
    may_be_bare_call,
)
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
        self._is_bare = False
        self._has_content = False
        # White space at an end is text where text follows, and nothing where a mark does.
        self._spaces = ""
        self._is_behind_mark = begins_with == "reasoning"
        self._search = self._new_search()

    def add(self, text: str) -> Iterator[Part]:
        """Takes text, and gives the parts that are final."""
        if self._reasoning is None and self._tools is None:
            if text:
                yield "content", text
            return
        while True:
            self._begin_bare(text)
            free, mark, text = self._search.add(text)
            yield from self._take(free)
            if mark is None:
                return
            text = (yield from self._pass(mark)) + text
            self._search = self._new_search()

    def end(self, *, cut_by: str | None = None) -> Iterator[Part]:
        """No more text comes.

        Args:
            cut_by: where the model would have written more: what it wrote next, as far as that is
                known. Of a call or a mark that has only begun, nothing is given then.
        """
        held = self._search.end()
        while self._section == "call":
            if cut_by is None:
                yield from self._take(held)
            text = yield from self._finish_call("" if cut_by is None else held, cut_by)
            self._search = self._new_search()
            yield from self.add(text)
            held = self._search.end()
        if cut_by is None or not self._begins_mark(held, cut_by):
            yield from self._take(held)
        if self._spaces and not self._is_behind_mark and self._section == "content":
            yield "content", self._spaces

    def _new_search(self) -> MarkSearch:
        """Looks for what may end the section that the text is in."""
        marks: list[str | None] = []
        if self._section == "call":
            closes = self._tools and self._tools.closes
            if self._tools and self._tools.arguments_key is not None and closes:
                return JsonMarkSearch(closes)
            marks = [closes]
        elif self._section == "reasoning":
            marks = [self._reasoning and self._reasoning.closes]
        else:
            marks = [self._tools and self._tools.opens, self._reasoning and self._reasoning.opens]
        return MarkSearch([mark for mark in marks if mark is not None])

    def _begins_mark(self, held: str, behind: str) -> bool:
        """Whether text at the end of the section begins what would end it: with a letter at least.

        Signs alone are as likely text: ``a <`` and ``[``.
        """
        marks = [self._tools and self._tools.opens]
        if self._section == "reasoning":
            marks = [self._reasoning and self._reasoning.closes]
        elif not self._has_content:
            marks.append(self._reasoning and self._reasoning.opens)
        text = held + behind
        return any(map(str.isalpha, held)) and any(
            mark and (mark.startswith(text) or text.startswith(mark)) for mark in marks
        )

    def _begin_bare(self, text: str) -> None:
        """Enters a call where the content begins as one without a mark does."""
        may_be = self._section == "content" and not self._has_content and not self._search.holds
        if self._tools and self._tools.bare and may_be and text.lstrip().startswith("{"):
            self._section, self._is_bare = "call", True
            self._search = self._new_search()

    def _take(self, text: str) -> Iterator[Part]:
        """Text of the section."""
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

    def _pass(self, mark: str) -> Generator[Part, None, str]:
        """A mark ends the section; gives text before it that is to be split again."""
        if self._section == "call":
            return (yield from self._finish_call(mark))
        if self._section == "reasoning":
            self._enter("content")
        elif self._tools is not None and mark == self._tools.opens:
            self._enter("call")
        elif self._has_content:
            # Reasoning stands at the beginning; further on the mark is talked about.
            yield from self._take(mark)
        else:
            self._enter("reasoning")
        return ""

    def _enter(self, section: _Section) -> None:
        # What stands before a call is wanted if it turns out to be none.
        self._spaces = self._spaces if section == "call" else ""
        self._section, self._is_behind_mark = section, True

    def _finish_call(self, mark: str, cut_by: str | None = None) -> Generator[Part, None, str]:
        """Gives the calls that were written, or the text where it is none.

        Args:
            mark: that ends it, or what of that was written where the text ends.
            cut_by: what the model wrote next, where it would have written more: text that is no
                call may be its beginning.

        Returns:
            Text behind a mark that seemed to lie in a string, where that was no call.
        """
        assert self._tools is not None
        text, spaces, self._call = self._call, self._spaces, ""
        is_bare, self._is_bare = self._is_bare, False
        self._enter("content")
        calls: list[ParsedCall] = []
        try:
            for call in (bare_calls if is_bare else self._tools.parse)(text, self._functions):
                calls.append(call)
        except (ValueError, RecursionError):
            opens, closes = "" if is_bare else self._tools.opens, self._tools.closes
            first, found, rest = (text + mark).partition(closes) if closes else (text, mark, "")
            begun = text + (cut_by or "")
            has_begun = (
                may_be_bare_call(begun, self._functions)
                if is_bare
                else self._tools.may_begin(begun)
            )
            if found or cut_by is None or not has_begun:
                self._has_content, self._is_behind_mark = True, False
                yield "content", spaces + opens + first + found
                return rest
        yield from calls
        return ""
