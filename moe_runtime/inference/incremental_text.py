"""Incremental decoding of tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

_UNKNOWN = "\ufffd"
_MOST_HELD = 16
"""Most tokens to hold back while a character is incomplete."""
_CHARACTER_BYTES = 4
"""Most bytes of a character, and so most tokens."""


class IncrementalText:
    """Decodes tokens one by one; the joined pieces are the text of all tokens.

    A character of several tokens comes with its last one.

    Args:
        decode: decodes tokens, special ones included, without cleaning up spaces.
        skipped: tokens without text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        # The tokens before `_num_final` are already decoded; they stay because a tokenizer needs
        # them to decide about a space before the next token.
        self._window: list[int] = []
        self._num_final = 0
        self._num_sent = 0

    @classmethod
    def of(cls, tokenizer: Any, shown: Collection[int] = ()) -> IncrementalText:
        """Decodes with a tokenizer of transformers; special tokens in ``shown`` have text."""

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        return cls(decode, frozenset(tokenizer.all_special_ids).difference(shown))

    def follow(self, ids: Sequence[int], *, is_whole: bool) -> int:
        """Continues the text of tokens ``ids``; call it before the first `add`.

        Without it, a tokenizer that writes spaces before words drops the first space. ``is_whole``
        means that the tokens end with a whole character. Otherwise an incomplete one at their end
        belongs to the new text. Returns the number of tokens of such a character.
        """
        recent = self._recent(ids)
        starts = range(_CHARACTER_BYTES if len(recent) == _MOST_HELD else 1)
        for held in range(1 if is_whole else self._most_open(ids) + 1):
            end = len(recent) - held
            start = min(starts, key=lambda at: self._decode(recent[at:end]).count(_UNKNOWN))
            text = self._decode(recent[start:end])
            if is_whole or not text.endswith(_UNKNOWN):
                self._window, self._num_final = recent[start:], len(recent[start:end])
                self._num_sent = len(text)
                return held
        return self.follow(ids, is_whole=True)  # bytes that are not text

    def add(self, token_id: int) -> str:
        """The text that the token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_UNKNOWN):
            if len(self._window) - self._num_final <= _MOST_HELD:
                return ""
            # no character is that long, so these bytes are not text; the last may begin one
            piece = text[self._num_sent : -1]
            self._num_sent += len(piece)
            return piece
        piece = text[self._num_sent :]
        if piece or len(self._window) > _MOST_HELD:
            # a token without text does not decide about a space, so earlier ones stay
            del self._window[: self._num_final]
            self._num_sent = len(self._decode(self._window))
        self._num_final = len(self._window)
        return piece

    def end(self) -> str:
        """The rest: bytes of an incomplete character."""
        if self._num_final == len(self._window):
            return ""
        piece = self._decode(self._window)[self._num_sent :]
        self._window, self._num_final, self._num_sent = [], 0, 0
        return piece

    def _most_open(self, ids: Sequence[int]) -> int:
        """Most tokens at the end that may belong to an incomplete character."""
        last = ids[:-_CHARACTER_BYTES:-1]
        special = (at for at, token_id in enumerate(last) if token_id in self._skipped)
        return next(special, len(last))

    def _recent(self, ids: Sequence[int]) -> list[int]:
        """The last tokens, beginning with one that has whole characters if one is near."""
        found: list[int] = []
        for token_id in reversed(ids):
            if token_id in self._skipped:
                continue
            found.append(token_id)
            text = self._decode([token_id])
            if (text and _UNKNOWN not in text) or len(found) == _MOST_HELD:
                break
        return found[::-1]
