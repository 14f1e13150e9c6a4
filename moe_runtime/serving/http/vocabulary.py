"""A model's tokenizer as the server needs it: text, tokens, and the bytes of a single token."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from moe_runtime.errors import blamed_on
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.http.api_errors import ApiError

_UNKNOWN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = re.compile(r"<\S.*>", re.DOTALL)
"""Some families flag ``<tool_call>`` and ``<think>`` as special tokens, and some do not."""
_SLICE = 2048
"""Characters that are encoded at a time where a text may be too long."""
_MOST_CHARACTER_BYTES = 4
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Vocabulary:
    """Text and tokens of one model.

    Args:
        size: tokens that the model knows; it may know more than the tokenizer.

    Attributes:
        mark_tokens: ids of the added tokens that are marks, special ones or not, by their names.
        plain_tokens: names of the added tokens that texts may have, by their ids.
        longest_token: bytes of the longest token's text in UTF-8, or more.
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
            # Where each byte has a token, a character of a token stands for a byte.
            (len(token if is_of_bytes else token.encode()) for token in self._ids_by_token),
            default=1,
        )
        # Encoding may set how a tokenizer cuts and pads, which must not happen twice at a time.
        self._encoding = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with blamed_on("the text cannot be encoded", ApiError), self._encoding:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether a text surely has more than so many tokens.

        A long text is counted in slices up to the limit. A cut makes a few tokens more; twice as
        many would take a cut in every token.
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
        """Tokens of a text. One that surely has more than ``num_tokens`` is not encoded as a whole:
        each cut may add a few."""
        if self.is_longer(text, num_tokens):
            return sum(self._slice_tokens(text))
        return len(self.encode(text, add_special_tokens=False))

    def _slice_tokens(self, text: str) -> Iterator[int]:
        start = 0
        while start < len(text):
            end = start + _SLICE
            if end < len(text):  # before a space, where there is one: words stay whole
                space = text.rfind(" ", start + 1, end)
                end = end if space < 0 else space
            yield len(self._encode(text[start:end], add_special_tokens=False))
            start = end

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def offsets_of_text(
        self, text: str, ids: Sequence[int], *, add_special_tokens: bool
    ) -> list[int]:
        """Where in a text each of its tokens begins, spaces before a word included."""
        if not self.tokenizer.is_fast:
            # Nothing but the tokens says where they come from.
            return [min(at, len(text)) for at in self._offsets(ids, self.incremental())]
        with self._encoding:
            spans = self.tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )["offset_mapping"]
        offsets, end = [], 0
        for begins, ends in spans:
            # Some tokenizers leave the space out; tokens that are parts of a character share it.
            offsets.append(min(begins, end) if ends > begins else end)
            end = max(end, ends)
        return offsets

    def offsets_of_tokens(self, ids: Sequence[int]) -> list[int]:
        """Where in the text of tokens, special ones included, each of them begins."""
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
        """What a token adds to a text, in UTF-8; part of a character for some."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read_token(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """A token as reports show it; ``bytes:\\xe2`` where it is no whole character."""
        raw = self.token_bytes(token_id)
        text = raw.decode(errors="replace")
        if _UNKNOWN not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _read_token(self, token_id: int) -> bytes:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id >= len(self.tokenizer):
            return b""  # the model's vocabulary is rounded up
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
    """The character by which byte-level vocabularies write each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]
