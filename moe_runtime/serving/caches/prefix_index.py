"""Which beginnings of texts are known, in blocks of tokens, and which was used longest ago.

Nothing here holds a tensor or knows one: what is kept of a block is the caller's.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

_DIGEST_BYTES = 16
_NONE = -1

T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """Blocks of tokens, each known by a digest of all tokens up to its end.

    Two texts of one root share the blocks that are equal from the beginning. A root names what
    computed them and their owner.
    A block takes a row of a few arrays, so that an index of many blocks stays small beside their
    keys and values. Digests have 128 bits under a key of this index's own, so nobody can make two
    texts that are taken for one.
    """

    def __init__(self, most_blocks: int, block_tokens: int) -> None:
        """An index that knows nothing.

        Args:
            most_blocks: blocks that there is ever room for.
            block_tokens: tokens of a block, at least 1.
        """
        self._block_tokens = block_tokens
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._rows: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None] * most_blocks
        self._kept: list[T | None] = [None] * most_blocks
        self._parents = array("i", [_NONE]) * most_blocks
        # A ring from the row used longest ago to the one used last; its end is one row more.
        self._end = most_blocks
        self._older = array("i", [most_blocks]) * (most_blocks + 1)
        self._newer = array("i", [most_blocks]) * (most_blocks + 1)
        self._unused = array("i", range(most_blocks - 1, -1, -1))

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._rows)

    def find(self, tokens: Sequence[int], root: str) -> list[T]:
        """What is kept of the longest known beginning, block by block; it is used now."""
        path = self._walk(tokens, root)
        self._use(path)
        return [self._kept_of(row) for row in path]

    def keep(
        self,
        tokens: Sequence[int],
        root: str,
        make: Callable[[int], T],
        may_add: Callable[[int], bool],
    ) -> int:
        """Keeps the whole blocks of some tokens as far as it may.

        Args:
            tokens: from the beginning of a text.
            root: names what computed them and their owner.
            make: gives what is kept of the block with a number, 0 the first.
            may_add: whether one block more may be kept, beside so many that must stay; it may
                forget others.

        Returns:
            Blocks of these tokens that are known now.
        """
        path = self._walk(tokens, root)
        self._use(path)
        known = len(path)
        for index, digest in enumerate(self._digests_of(tokens, root)):
            if index < known:
                continue
            if not may_add(len(path)):
                break
            kept = make(index)
            row = self._unused.pop()
            self._rows[digest] = row
            self._digests[row], self._kept[row] = digest, kept
            self._parents[row] = path[-1] if path else _NONE
            # behind all others, but before the block that it continues, which outlives it
            self._put(row, path[-1] if path else self._end)
            path.append(row)
        return len(path)

    def forget_oldest(self) -> None:
        """Gives up the block used longest ago; whatever continues it was used no later."""
        row = self._newer[self._end]
        digest = self._digests[row]
        assert digest is not None
        del self._rows[digest]
        self._take_out(row)
        self._digests[row] = self._kept[row] = None
        self._unused.append(row)

    def check(self) -> None:
        """Proves that rows and ring agree, and that no block outlives those it continues.

        Raises:
            AssertionError: they do not.
        """
        assert len(self._rows) + len(self._unused) == self._end
        seen: set[int] = set()
        row = self._older[self._end]
        while row != self._end:
            digest = self._digests[row]
            assert digest is not None
            assert self._rows[digest] == row
            assert row not in seen
            assert self._newer[self._older[row]] == self._older[self._newer[row]] == row
            parent = self._parents[row]
            assert parent == _NONE or parent in seen, "a block was used later than its beginning"
            seen.add(row)
            row = self._older[row]
        assert seen == set(self._rows.values())
        assert not seen & set(self._unused)

    def _digests_of(self, tokens: Sequence[int], root: str) -> Iterator[bytes]:
        """Of the whole blocks, each with all before it."""
        size = self._block_tokens
        digest = hashlib.blake2b(
            root.encode(), digest_size=_DIGEST_BYTES, key=self._secret
        ).digest()
        for first in range(0, len(tokens) - size + 1, size):
            block = array("q", tokens[first : first + size]).tobytes()
            found = hashlib.blake2b(digest + block, digest_size=_DIGEST_BYTES, key=self._secret)
            digest = found.digest()
            yield digest

    def _walk(self, tokens: Sequence[int], root: str) -> list[int]:
        """The rows of the longest known beginning."""
        path: list[int] = []
        for digest in self._digests_of(tokens, root):
            row = self._rows.get(digest)
            if row is None:
                break
            path.append(row)
        return path

    def _kept_of(self, row: int) -> T:
        kept = self._kept[row]
        assert kept is not None
        return kept

    def _use(self, path: Sequence[int]) -> None:
        """The last block first, so that beginnings stay longest."""
        for row in reversed(path):
            self._take_out(row)
            self._put(row, self._end)

    def _take_out(self, row: int) -> None:
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older

    def _put(self, row: int, newer: int) -> None:
        """Puts a row into the ring before another one, or before its end."""
        older = self._older[newer]
        self._older[row], self._newer[row] = older, newer
        self._newer[older] = self._older[newer] = row
