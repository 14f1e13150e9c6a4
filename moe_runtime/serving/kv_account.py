"""Room for keys and values of running sequences, and of known prefixes; no tensors."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

PIECE = 16
"""Sequences get room for a multiple of so many tokens."""
SLACK_SHARE = 16
"""A sequence that grows gets room for a sixteenth of its tokens beyond, while memory is free."""
_DIGEST_BYTES = 16

T = TypeVar("T")


def rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // PIECE) * PIECE


def digests_of(
    tokens: Sequence[int], block_tokens: int, digest: bytes, num_bytes: int, key: bytes = b""
) -> Iterator[bytes]:
    """Of the whole blocks of some tokens, each with all before it; ``digest`` comes first."""
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens) if block_tokens else ():
        block = array("q", tokens[first : first + block_tokens]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=num_bytes, key=key).digest()
        yield digest


class KVAccount(Generic[T]):
    """Divides room for tokens between sequences and prefixes; sequences take it from prefixes.

    A prefix is known by a digest of all its tokens, block by block, under a key of this account's
    own. The prefixes used last stay longest, and of one prefix its beginning.
    """

    def __init__(self, capacity: int, *, block_tokens: int, least_tokens: int = 0) -> None:
        """Begins empty; blocks of 0 tokens keep no prefix, sequences have room for
        ``least_tokens``."""
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._least_tokens = min(least_tokens, capacity // PIECE * PIECE)
        self._rooms: dict[Hashable, int] = {}
        self._held = 0
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._prefixes: dict[bytes, T] = {}  # of each block, the one used longest ago first

    @property
    def sequence_tokens(self) -> int:
        return self._held

    @property
    def prefix_tokens(self) -> int:
        return len(self._prefixes) * self.block_tokens

    @property
    def available(self) -> int:
        """Tokens that a sequence could get, prefixes being given up for it."""
        return self.capacity - self._held

    def room_of(self, sequence: Hashable) -> int:
        return self._rooms.get(sequence, 0)

    def reserve(self, sequence: Hashable, num_tokens: int) -> bool:
        """Gives a sequence room for so many tokens in all; gives whether it has it now."""
        held = self._rooms.get(sequence, 0)
        num_tokens = max(num_tokens, self._least_tokens)
        if num_tokens <= held:
            return True
        least = rounded_up(num_tokens) - held
        if least > self.available:
            return False
        ample = rounded_up(num_tokens + num_tokens // SLACK_SHARE) - held
        added = ample if held and ample <= self._free() else least
        self._make_free(added)
        self._rooms[sequence] = held + added
        self._held += added
        return True

    def release(self, sequence: Hashable) -> None:
        self._held -= self._rooms.pop(sequence, 0)

    def find(self, tokens: Sequence[int], root: str = "") -> list[T]:
        """What is kept of the longest known beginning of some tokens, block by block."""
        path = list(itertools.takewhile(self._prefixes.__contains__, self._digests(tokens, root)))
        self._use(path)
        return [self._prefixes[digest] for digest in path]

    def keep(self, tokens: Sequence[int], make: Callable[[int], T], root: str = "") -> int:
        """Keeps the whole blocks of some tokens, as far as prefixes used longer ago give way.

        ``make`` gives what is kept of the block with a number; ``root`` names what computed them,
        and their owner. Returns blocks of these tokens that are kept now.
        """
        if not self.block_tokens:
            return 0
        path = list(self._digests(tokens, root))
        known = sum(1 for _ in itertools.takewhile(self._prefixes.__contains__, path))
        self._use(path[:known])
        self._make_free((len(path) - known) * self.block_tokens, most=len(self._prefixes) - known)
        del path[known + self._free() // self.block_tokens :]
        for index in range(known, len(path)):
            self._prefixes[path[index]] = make(index)
        self._use(path)
        return len(path)

    def check(self) -> None:
        """Asserts that the sums agree."""
        assert self._held == sum(self._rooms.values())
        assert all(room > 0 and room % PIECE == 0 for room in self._rooms.values())
        assert 0 <= self._held + self.prefix_tokens <= self.capacity

    def _free(self) -> int:
        return self.capacity - self._held - self.prefix_tokens

    def _make_free(self, num_tokens: int, most: int | None = None) -> None:
        if (lacking := num_tokens - self._free()) > 0 and self.block_tokens:
            num_blocks = -(-lacking // self.block_tokens)
            num_blocks = num_blocks if most is None else min(num_blocks, most)
            for digest in list(itertools.islice(self._prefixes, num_blocks)):
                del self._prefixes[digest]

    def _digests(self, tokens: Sequence[int], root: str) -> Iterator[bytes]:
        return digests_of(tokens, self.block_tokens, root.encode(), _DIGEST_BYTES, self._secret)

    def _use(self, path: Sequence[bytes]) -> None:
        """The last block first, so that beginnings stay longest."""
        for digest in reversed(path):
            self._prefixes[digest] = self._prefixes.pop(digest)
