"""Text out of tokens, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.requests import FinishReason, NewToken


class MarkSearch:
    """Lets text through up to the first of some marks, and holds back what may begin one."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._longest = max(map(len, marks), default=0)
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def add(self, piece: str) -> tuple[str, str | None, str]:
        """Takes text; gives text that is free, the mark that ends it if one was found, and the text
        behind it."""
        text = self._held + piece
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            self._held = ""
            # The one that was whole first, so that it does not matter how the text was cut.
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
    """As `MarkSearch` for marks behind JSON: within its strings a mark is text."""

    def __init__(self, marks: Sequence[str]) -> None:
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
    """A token of an answer.

    Attributes:
        logprob: natural logarithm of its probability; None where it was not asked for.
        top: the most likely tokens in its place.
        offset: characters of the answer before it.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer grew by.

    Attributes:
        text: final; empty while a character or a stop string may be incomplete.
        tokens: those that the text has come past.
        finish: why the answer ends here; None while it goes on.
        cut_by: where the model would have written more: the stop string that it wrote next, or
            nothing where ``max_tokens`` ends the answer.
    """

    text: str
    tokens: tuple[AnswerToken, ...] = ()
    finish: FinishReason | None = None
    cut_by: str | None = None


class AnswerText:
    """One answer: tokens in, pieces of text out.

    Args:
        stops: strings that end it; they are no part of it.
        stop_ids: tokens that end it; their text is no part of it.
        min_tokens: ``stops`` that are whole within so many tokens do not end it, as in vLLM.
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
        """Takes a token; the answer ends here where the piece has a ``finish``."""
        self.num_tokens += 1
        self._waiting.append(
            AnswerToken(new.token_id, new.logprob, new.top_logprobs, self._num_decoded)
        )
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
