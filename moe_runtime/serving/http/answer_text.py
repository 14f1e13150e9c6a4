"""A model's vocabulary; answers as pieces of text, split into reasoning, content and calls."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moe_runtime.errors import blamed_on
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.tool_formats import (
    Marks,
    ParsedCall,
    ToolFormat,
    json_text,
    may_be_object,
    read_json,
)
from moe_runtime.serving.requests import FinishReason, NewToken

if TYPE_CHECKING:
    from moe_runtime.serving.http.schema import Function


_UNKNOWN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = re.compile(r"<\S.*>", re.DOTALL)
"""Some tokenizers do not flag ``<tool_call>`` and ``<think>`` as special tokens."""
_SLICE = 2048
"""Characters that are encoded at a time if a text may be too long."""
_MOST_CHARACTER_BYTES = 4
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Vocabulary:
    """Text and tokens of one model.

    Args:
        size: the model's number of tokens, which may exceed the tokenizer's.

    Attributes:
        mark_tokens: ids of added tokens that are marks, by their text.
        plain_tokens: texts of added tokens that are not special, by their ids.
        longest_token: an upper bound of the UTF-8 bytes of a token.
    """

    def __init__(
        self, tokenizer: Any, size: int, end_ids: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.end_ids = frozenset(end_ids)
        self.stop_strings = tuple(stop_strings)
        added = tokenizer.added_tokens_decoder.items()
        special = self.end_ids.union(at for at, token in added if token.special)
        self.plain_tokens = {at: token.content for at, token in added if at not in special}
        self.mark_tokens = {
            token.content: at
            for at, token in added
            if at in special or _MARK.fullmatch(token.content)
        }
        self._ids_by_token: dict[str, int] = tokenizer.get_vocab()
        self._bytes: dict[int, bytes] = {}
        self._bytes_by_char = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
        is_of_bytes = self._bytes_by_char.keys() <= self._ids_by_token.keys()
        self.longest_token = max(
            # In byte-level vocabularies a character is a byte.
            (len(token if is_of_bytes else token.encode()) for token in self._ids_by_token),
            default=1,
        )
        # Encoding may change the tokenizer's settings of truncation and padding.
        self._encoding = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with blamed_on("the text cannot be encoded", ApiError), self._encoding:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more than so many tokens.

        Counts long texts in slices, up to twice the limit: cuts add fewer tokens than that.
        """
        if len(text) * _MOST_CHARACTER_BYTES <= 2 * num_tokens:
            return False
        found = 0
        for more in self._slice_tokens(text):
            found += more
            if found > 2 * num_tokens:
                return True
        return False

    def count(self, text: str, num_tokens: int) -> int:
        """The number of tokens; approximate if it is certainly more than ``num_tokens``."""
        if self.is_longer(text, num_tokens):
            return sum(self._slice_tokens(text))
        return len(self.encode(text, add_special_tokens=False))

    def _slice_tokens(self, text: str) -> Iterator[int]:
        start = 0
        while start < len(text):
            end = start + _SLICE
            if end < len(text):  # before a space, if possible: words stay whole
                space = text.rfind(" ", start + 1, end)
                end = end if space < 0 else space
            yield len(self.encode(text[start:end], add_special_tokens=False))
            start = end

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def offsets_of_text(
        self, text: str, ids: Sequence[int], *, add_special_tokens: bool
    ) -> list[int]:
        """The offset of each token in a text, spaces before words included."""
        if not self.tokenizer.is_fast:
            return [min(at, len(text)) for at in self._offsets(ids, self.incremental())]
        with self._encoding:
            spans = self.tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )["offset_mapping"]
        offsets, end = [], 0
        for begins, ends in spans:
            # Some tokenizers skip the space. Tokens that are parts of a character share an offset.
            offsets.append(min(begins, end) if ends > begins else end)
            end = max(end, ends)
        return offsets

    def offsets_of_tokens(self, ids: Sequence[int]) -> list[int]:
        """The offset of each token in the text of all, special tokens included."""
        return self._offsets(ids, IncrementalText(self.decode))

    def _offsets(self, ids: Sequence[int], text: IncrementalText) -> list[int]:
        offsets, end = [], 0
        for token_id in ids:
            offsets.append(end)
            end += len(text.add(token_id))
        return offsets

    def incremental(self, shown: Sequence[str] = ()) -> IncrementalText:
        kept = {self._ids_by_token[token] for token in shown if token in self._ids_by_token}
        return IncrementalText.of(self.tokenizer, kept)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token; for some tokens, part of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._read_token(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of a token; ``bytes:\\xe2`` for part of a character."""
        raw = self.token_bytes(token_id)
        text = raw.decode(errors="replace")
        is_text = _UNKNOWN not in text
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _read_token(self, token_id: int) -> bytes:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id >= len(self.tokenizer):
            return b""  # models round their vocabulary up
        text = self.decode([token_id])
        if token.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text
        if _UNKNOWN not in text:
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if all(char in self._bytes_by_char for char in token):
            return bytes(self._bytes_by_char[char] for char in token)
        return text.encode()


def _byte_level_alphabet() -> list[str]:
    """The character of each byte in byte-level vocabularies."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]


class MarkSearch:
    """Finds the first of some marks; holds back text that may begin one. Ignores empty marks."""

    def __init__(self, marks: Sequence[str | None]) -> None:
        self._marks = tuple(filter(None, marks))
        self._longest = max(map(len, self._marks), default=0)
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def add(self, piece: str) -> tuple[str, str | None, str]:
        """Takes text. Returns text before a mark, the mark if there is one, and text after it."""
        text = self._held + piece
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            self._held = ""
            # The first complete one, so that the result does not depend on the pieces.
            at, mark = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            return text[:at], mark, text[at + len(mark) :]
        num_held = next(
            (
                length
                for length in range(min(self._longest - 1, len(text)), 0, -1)
                if any(mark.startswith(text[-length:]) for mark in self._marks)
            ),
            0,
        )
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None, ""

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


class JsonMarkSearch(MarkSearch):
    """A `MarkSearch` in JSON: marks within strings are text."""

    def __init__(self, marks: Sequence[str | None]) -> None:
        super().__init__(marks)
        self._is_within_string = self._is_escaped = False

    def add(self, piece: str) -> tuple[str, str | None, str]:
        text, self._held = self._held + piece, ""
        for at, char in enumerate(text):
            if self._is_within_string:
                self._is_within_string = self._is_escaped or char != '"'
                self._is_escaped = not self._is_escaped and char == "\\"
                continue
            self._is_within_string = char == '"'
            for mark in self._marks:
                if text.startswith(mark, at):
                    return text[:at], mark, text[at + len(mark) :]
                if mark.startswith(text[at:]):
                    self._held = text[at:]
                    return text[:at], None, ""
        return text, None, ""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer; ``offset`` is its place in the text."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer.

    Attributes:
        tokens: whose text is complete.
        finish: why the answer ends; None before its end.
        cut_by: the stop string that cut the answer, or "" for ``max_tokens``; None otherwise.
    """

    text: str
    tokens: tuple[AnswerToken, ...] = ()
    finish: FinishReason | None = None
    cut_by: str | None = None


class AnswerText:
    """Turns the tokens of one answer into pieces of text.

    ``stops`` and ``stop_ids`` end the answer and are not part of it. As in vLLM, ``stops`` within
    the first ``min_tokens`` have no effect.
    """

    def __init__(
        self,
        text: IncrementalText,
        stops: Sequence[str],
        stop_ids: frozenset[int],
        min_tokens: int = 0,
    ) -> None:
        self._text = text
        self._stops = MarkSearch(stops)
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._num_decoded = 0
        self._num_sent = 0
        self._waiting: deque[AnswerToken] = deque()
        self.num_tokens = 0

    def follow(self, prompt_ids: Sequence[int], *, is_whole: bool) -> int:
        return self._text.follow(prompt_ids, is_whole=is_whole)

    def add(self, new: NewToken) -> Piece:
        """Takes a token. The answer ends if the piece has a ``finish``."""
        self.num_tokens += 1
        token = AnswerToken(new.token_id, new.logprob, new.top_logprobs, self._num_decoded)
        self._waiting.append(token)
        return self._grow("" if new.token_id in self._stop_ids else self._text.add(new.token_id))

    def end(self, reason: FinishReason) -> Piece:
        piece = self._grow(self._text.end())
        if piece.finish is not None:
            return piece
        tokens = (*piece.tokens, *self._waiting)
        self._waiting.clear()
        cut_by = "" if reason == "length" else None
        return Piece(piece.text + self._stops.end(), tokens, reason, cut_by)

    def _grow(self, text: str) -> Piece:
        self._num_decoded += len(text)
        free, stop, rest = self._stops.add(text)
        while stop is not None and self.num_tokens <= self._min_tokens:
            more, later, rest = self._stops.add(rest)
            free, stop = free + stop + more, later
        self._num_sent += len(free)
        tokens = []
        while self._waiting and (
            self._waiting[0].offset < self._num_sent or not (self._stops.holds or stop)
        ):
            tokens.append(self._waiting.popleft())
        return Piece(free, tuple(tokens), "stop" if stop else None, stop)


class ReasoningMarks(NamedTuple):
    opens: str
    closes: str


REASONING_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel>thought", "<channel|>"),
)


def reasoning_marks_of(template: str) -> ReasoningMarks | None:
    return next((marks for marks in REASONING_MARKS if marks.closes in template), None)


Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str] | ParsedCall
_Section = Literal["reasoning", "content", "call"]
_MOST_HEAD = 256
"""Characters within reasoning that tell a call from text that mentions its mark."""


class AnswerSections:
    """Splits the text of an answer into reasoning, content, and calls of ``functions``.

    ``begins_with`` is ``"reasoning"`` if the prompt ends with the mark that opens it.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        tools: ToolFormat | None,
        functions: Sequence[Function] = (),
        begins_with: Kind = "content",
    ) -> None:
        self._think, self._end_think = reasoning or (None, None)
        self._tools = tools
        self._opens = tools.opens if tools else ()
        self._functions = functions
        self._section: _Section = begins_with
        self._call = ""
        self._marks: Marks | None = None  # of the call; None if it has none
        self._is_thought = False  # the call began within reasoning
        self._left_over: set[str] = set()  # marks that may follow a call, and mean nothing
        self._has_content = False
        # White space is text only if text follows, not a mark.
        self._spaces = ""
        self._is_behind_mark = begins_with == "reasoning"
        self._search = self._new_search()

    def add(self, text: str) -> Iterator[Part]:
        if self._think is None and self._tools is None:
            if text:
                yield "content", text
            return
        while True:
            self._begin_bare(text)
            free, mark, text = self._search.add(text)
            yield from self._take(free)
            if self._is_mention():
                text = (yield from self._refuse_call()) + self._search.end() + (mark or "") + text
            elif mark is None:
                return
            else:
                text = (yield from self._pass(mark)) + text
            self._search = self._new_search()

    def end(self, *, cut_by: str | None = None) -> Iterator[Part]:
        """Ends the text.

        ``cut_by`` is text that the model wrote next, but that is not part of the answer. Then an
        incomplete call or mark at the end is dropped.
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
        if self._section == "call":
            ends = [self._marks and self._marks.closes, self._end_think if self._is_thought else ""]
            is_json = self._tools is not None and self._tools.is_json
            return (JsonMarkSearch if is_json else MarkSearch)(ends)
        if self._section == "reasoning":
            return MarkSearch([self._end_think, *self._opens])
        return MarkSearch([*self._opens, self._think, *self._left_over])

    def _begins_mark(self, held: str, behind: str) -> bool:
        """Whether the last text begins a mark. Signs without a letter are as likely text."""
        marks = [*self._opens]
        if self._section == "reasoning":
            marks += [self._end_think] if self._end_think else []
        elif self._think and not self._has_content:
            marks.append(self._think)
        text = held + behind
        return any(map(str.isalpha, held)) and any(
            mark.startswith(text) or text.startswith(mark) for mark in marks
        )

    def _begin_bare(self, text: str) -> None:
        """Enters a call without a mark, if the content begins like one."""
        may_be = self._section == "content" and not self._has_content and not self._search.holds
        bare = self._tools and self._tools.bare
        if bare and may_be and text.lstrip().startswith(bare.begins):
            self._section, self._marks = "call", None
            self._search = self._new_search()

    def _take(self, text: str) -> Iterator[Part]:
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
        """A mark ends the section. Returns text before it that must be split again."""
        if self._section == "call":
            if self._is_thought and mark == self._end_think:
                return (yield from self._refuse_call()) + mark
            return (yield from self._finish_call(mark))
        groups = self._tools.marks if self._tools else ()
        marks = next((one for one in groups if one.opens == mark), None)
        if marks is not None:
            self._marks, self._is_thought = marks, self._section == "reasoning"
            self._enter("call")
        elif self._section == "reasoning":
            self._enter("content")
        elif mark in self._left_over:
            self._left_over.discard(mark)
        elif self._has_content:
            # Reasoning comes first in an answer; later its mark is text.
            yield from self._take(mark)
        else:
            self._enter("reasoning")
        return ""

    def _is_mention(self) -> bool:
        if self._tools is None or self._section != "call" or not self._is_thought:
            return False
        begun = self._read_call(self._call[:_MOST_HEAD])
        return not self._tools.reader.may_begin(begun, self._functions)

    def _refuse_call(self) -> Generator[Part, None, str]:
        """The mark within reasoning opened no call. Returns the text that must be split again."""
        assert self._marks is not None
        text, self._call, self._section = self._call, "", "reasoning"
        self._is_thought = self._is_behind_mark = False
        yield from self._take(self._marks.opens)
        return text

    def _read_call(self, text: str, closes: str = "") -> str:
        marks = self._marks
        return f"{marks.opens}{text}{closes}" if marks is not None and marks.are_read else text

    def _enter(self, section: _Section) -> None:
        # If a call turns out to be text, the spaces before it are text, too.
        self._spaces = self._spaces if section == "call" else ""
        self._section, self._is_behind_mark = section, True

    def _finish_call(self, mark: str, cut_by: str | None = None) -> Generator[Part, None, str]:
        """Yields the calls, or the text if it is not a call.

        ``mark`` ends the call, or begins its closing mark where the text ends. Returns text after a
        mark that seemed to lie in a string, if the text was no call.
        """
        assert self._tools is not None
        closes = None if self._marks is None else self._marks.closes
        bare = self._tools.bare if self._marks is None else None
        reader = bare or self._tools.reader
        calls: list[ParsedCall] = []
        try:
            text = self._read_call(self._call, mark if mark == closes else "")
            for call in reader.parse(text, self._functions):
                calls.append(call)
        except (ValueError, RecursionError):
            is_whole = closes in self._call + mark if closes else bool(mark)
            begun = self._read_call(self._call + (cut_by or ""))
            if is_whole or cut_by is None or not reader.may_begin(begun, self._functions):
                if self._is_thought:
                    return (yield from self._refuse_call()) + mark
                return (yield from self._give_text(mark))
        group = self._tools.marks[0]
        if self._is_thought and self._end_think:
            self._left_over.add(self._end_think)
        if self._marks not in (None, group) and group.closes is not None:
            self._left_over.add(group.closes)
        self._call, self._is_thought = "", False
        self._enter("content")
        yield from calls
        return ""

    def _give_text(self, mark: str) -> Generator[Part, None, str]:
        """Yields text that looked like a call, up to the first closing mark; returns the rest."""
        marks, text, spaces, self._call = self._marks, self._call, self._spaces, ""
        opens, closes = ("", None) if marks is None else (marks.opens, marks.closes)
        first, found, rest = (text + mark).partition(closes) if closes else (text, mark, "")
        self._enter("content")
        self._has_content, self._is_behind_mark = True, False
        yield "content", spaces + opens + first + found
        return rest


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
"""The special tokens of gpt-oss's messages."""
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def is_harmony(template: str) -> bool:
    return all(mark in template for mark in (_START, _CHANNEL, _MESSAGE))


class HarmonySections:
    """Splits the text of gpt-oss, marks included, as `AnswerSections` does for others.

    A line break separates messages of one kind. Calls that are not JSON objects, and text outside
    of messages, are content. The prompt may end within a message.
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
        # The prompt may have the header of the first message, or its beginning.
        self._given, self._header = self._header + self._search.end(), ""
        self._said.clear()

    @property
    def is_within_message(self) -> bool:
        return self._is_message

    def add(self, text: str) -> Iterator[Part]:
        while True:
            free, mark, text = self._search.add(text)
            yield from self._take(free)
            if mark is None:
                return
            if self._is_message:
                yield from self._finish()
                # A message without an end: the next one has begun.
                self._header = "" if mark in _ENDS else mark
                self._search = MarkSearch((_MESSAGE,))
            else:
                self._begin()
                self._search = MarkSearch((*_ENDS, _START, _CHANNEL))

    def end(self, *, cut_by: str | None = None) -> Iterator[Part]:
        """Ends the text; ``cut_by`` as in `AnswerSections.end`."""
        held = self._search.end()
        if not (self._is_message and self._kind is None and self._may_be_cut(cut_by)):
            yield from self._take(held)
        if self._is_message:
            yield from self._finish(cut_by)
        elif self._header and not any(mark in self._header for mark in HARMONY_MARKS):
            self._is_first = True
            yield from self._say("content", self._header)

    def _begin(self) -> None:
        header, self._header, self._given = self._given + self._header, "", ""
        channel, recipient = _CHANNEL_NAME.findall(header), _RECIPIENT.findall(header)
        to = recipient[-1] if recipient else ""
        self._is_message = self._is_first = True
        self._call = ""
        if to.startswith(_FUNCTIONS):
            self._kind = None if self._has_tools else "content"
            self._called = to.removeprefix(_FUNCTIONS)
        else:
            # Calls of built-in tools, which the request does not offer, are reasoning.
            is_thought = bool(to) or channel[-1:] == ["analysis"]
            self._kind = "reasoning" if is_thought else "content"

    def _take(self, text: str) -> Iterator[Part]:
        if not self._is_message:
            self._header += text
        elif self._kind is None:
            self._call += text
        elif text:
            yield from self._say(self._kind, text)

    def _may_be_cut(self, cut_by: str | None) -> bool:
        return cut_by is not None and may_be_object(self._call + cut_by)

    def _finish(self, cut_by: str | None = None) -> Iterator[Part]:
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
