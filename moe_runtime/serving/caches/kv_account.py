"""Who has how many tokens of the memory for keys and values: running sequences and known prefixes.

Nothing here holds a tensor or knows one: what a prefix keeps is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from moe_runtime.serving.caches.prefix_index import PrefixIndex

PIECE = 16
"""Sequences get room for a multiple of so many tokens."""
SLACK_SHARE = 16
"""A sequence that grows gets room for a sixteenth of its tokens beyond, while nobody lacks it."""

T = TypeVar("T")


def rounded_up(num_tokens: int) -> int:
    """The least room for so many tokens."""
    return -(-num_tokens // PIECE) * PIECE


class KVAccount(Generic[T]):
    """Divides room for tokens between sequences and prefixes; sequences take it from prefixes.

    A prefix is known by all its tokens, in blocks: two prompts of one root share the blocks that
    are equal from the beginning. The prefixes used last stay longest.
    """

    def __init__(self, capacity: int, *, block_tokens: int, least_tokens: int = 0) -> None:
        """An account in which nobody has anything.

        Args:
            capacity: tokens in all.
            block_tokens: tokens of a block of a prefix; 0 keeps none.
            least_tokens: that a sequence has room for at least, as far as there is so much.
        """
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._least_tokens = min(least_tokens, capacity // PIECE * PIECE)
        self._rooms: dict[Hashable, int] = {}
        self._held = 0
        self._prefixes: PrefixIndex[T] | None = None
        if block_tokens:
            self._prefixes = PrefixIndex(capacity // block_tokens, block_tokens)

    @property
    def sequence_tokens(self) -> int:
        """Tokens that sequences have room for."""
        return self._held

    @property
    def prefix_tokens(self) -> int:
        """Tokens that prefixes keep."""
        return 0 if self._prefixes is None else len(self._prefixes) * self.block_tokens

    @property
    def available(self) -> int:
        """Tokens that a sequence could get, prefixes being given up for it."""
        return self.capacity - self._held

    def room_of(self, sequence: Hashable) -> int:
        """Tokens that a sequence has room for."""
        return self._rooms.get(sequence, 0)

    def reserve(self, sequence: Hashable, num_tokens: int) -> bool:
        """Gives a sequence room for so many tokens in all, if it can be had.

        Returns:
            Whether it has it now; if not, everything is as it was.
        """
        held = self._rooms.get(sequence, 0)
        num_tokens = max(num_tokens, self._least_tokens)
        if num_tokens <= held:
            return True
        least = rounded_up(num_tokens) - held
        if least > self.available:
            return False
        ample = rounded_up(num_tokens + num_tokens // SLACK_SHARE) - held
        added = ample if held and ample <= self._free() else least
        while self._prefixes is not None and self._free() < added:
            self._prefixes.forget_oldest()
        self._rooms[sequence] = held + added
        self._held += added
        return True

    def release(self, sequence: Hashable) -> None:
        """Takes back all that a sequence has."""
        self._held -= self._rooms.pop(sequence, 0)

    def find(self, tokens: Sequence[int], root: str = "") -> list[T]:
        """What is kept of the longest known beginning of some tokens, block by block."""
        return [] if self._prefixes is None else self._prefixes.find(tokens, root)

    def keep(self, tokens: Sequence[int], make: Callable[[int], T], root: str = "") -> int:
        """Keeps the whole blocks of some tokens, as far as prefixes used longer ago give way.

        Args:
            tokens: from the beginning of a sequence.
            make: gives what is kept of the block with a number, 0 the first.
            root: names what computed them, such as an adapter, and their owner.

        Returns:
            Blocks of these tokens that are kept now.
        """
        if self._prefixes is None:
            return 0
        return self._prefixes.keep(tokens, root, make, self._make_place_beside)

    def forget(self) -> None:
        """Gives up all prefixes."""
        while self._prefixes is not None and len(self._prefixes):
            self._prefixes.forget_oldest()

    def check(self) -> None:
        """Proves that what is had adds up, and that no prefix outlives those it continues.

        Raises:
            AssertionError: it does not.
        """
        assert self._held == sum(self._rooms.values())
        assert all(room > 0 and room % PIECE == 0 for room in self._rooms.values())
        assert 0 <= self._held + self.prefix_tokens <= self.capacity
        if self._prefixes is not None:
            self._prefixes.check()

    def _free(self) -> int:
        return self.capacity - self._held - self.prefix_tokens

    def _make_place_beside(self, num_blocks: int) -> bool:
        """Makes place for one block more, without giving up so many that were used last."""
        assert self._prefixes is not None
        while self._free() < self.block_tokens:
            if len(self._prefixes) <= num_blocks:
                return False
            self._prefixes.forget_oldest()
        return True
