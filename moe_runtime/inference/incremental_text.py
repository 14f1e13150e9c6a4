"""Text out of tokens, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

_UNKNOWN = "\ufffd"
_MOST_HELD = 16
"""Tokens without a whole character that are waited for."""
_CHARACTER_BYTES = 4
"""Most bytes, so most tokens, of a character."""


class IncrementalText:
    """Decodes tokens one by one; the pieces together are the text of all of them.

    A character whose bytes lie in several tokens comes when it is whole.

    Args:
        decode: the text of tokens, special ones included, without tidying spaces.
        skipped: tokens that have no text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        # Tokens since the last place but one where a character ended: those before `_num_final` are
        # what a tokenizer must see to know whether a space belongs between.
        self._window: list[int] = []
        self._num_final = 0
        self._num_sent = 0

    @classmethod
    def of(cls, tokenizer: Any, shown: Collection[int] = ()) -> IncrementalText:
        """Decodes as a tokenizer of transformers does; ``shown`` special tokens have their text."""

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        return cls(decode, frozenset(tokenizer.all_special_ids).difference(shown))

    def follow(self, ids: Sequence[int], *, is_whole: bool) -> int:
        """Continues the text of other tokens; called before the first `add`.

        Without it, a tokenizer that writes spaces before words drops the first one. ``is_whole``
        says that the tokens end with a whole character; otherwise one that they begin is part of
        what follows. Returns tokens at their end whose text is part of what follows.
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
        return self.follow(ids, is_whole=True)  # bytes that are no text

    def add(self, token_id: int) -> str:
        """The text that the token completes; empty where none."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_UNKNOWN):
            if len(self._window) - self._num_final <= _MOST_HELD:
                return ""
            # No character begins that long ago: these bytes are none. The last may begin one.
            piece = text[self._num_sent : -1]
            self._num_sent += len(piece)
            return piece
        piece = text[self._num_sent :]
        if piece or len(self._window) > _MOST_HELD:
            # A token without text says nothing of a space after it: those before it stay.
            del self._window[: self._num_final]
            self._num_sent = len(self._decode(self._window))
        self._num_final = len(self._window)
        return piece

    def end(self) -> str:
        """What is left: bytes that never became a character."""
        if self._num_final == len(self._window):
            return ""
        piece = self._decode(self._window)[self._num_sent :]
        self._window, self._num_final, self._num_sent = [], 0, 0
        return piece

    def _most_open(self, ids: Sequence[int]) -> int:
        """Tokens at the end that may be those of a character that is not whole."""
        last = ids[:-_CHARACTER_BYTES:-1]
        special = (at for at, token_id in enumerate(last) if token_id in self._skipped)
        return next(special, len(last))

    def _recent(self, ids: Sequence[int]) -> list[int]:
        """The last tokens, from one on that has whole characters, if such a one is near."""
        found: list[int] = []
        for token_id in reversed(ids):
            if token_id in self._skipped:
                continue
            found.append(token_id)
            text = self._decode([token_id])
            if (text and _UNKNOWN not in text) or len(found) == _MOST_HELD:
                break
        return found[::-1]
