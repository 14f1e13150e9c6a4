"""Who has how many tokens of the memory for keys and values: running sequences and known prefixes.

Nothing here holds a tensor or knows one: what a prefix keeps is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

PIECE = 16
"""Sequences get room for a multiple of so many tokens."""
SLACK_SHARE = 16
"""A sequence that grows gets room for a sixteenth of its tokens beyond, while nobody lacks it."""

T = TypeVar("T")


def rounded_up(num_tokens: int) -> int:
    """The least room for so many tokens."""
    return -(-num_tokens // PIECE) * PIECE


@dataclass(slots=True, eq=False)
class _Prefix(Generic[T]):
    """A block of tokens behind those of its parents, and what is kept of it."""

    key: tuple[int, tuple[int, ...]]
    number: int
    parent: _Prefix[T] | None
    kept: T


class KVAccount(Generic[T]):
    """Divides room for tokens between sequences and prefixes; sequences take it from prefixes.

    A prefix is known by all its tokens, in blocks: two prompts share the blocks that are equal from
    the beginning, and the root: what computed them. The prefixes used last stay longest.
    """

    def __init__(self, capacity: int, *, block_tokens: int) -> None:
        """An account in which nobody has anything.

        Args:
            capacity: tokens in all.
            block_tokens: tokens of a block of a prefix; 0 keeps none.
        """
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._rooms: dict[Hashable, int] = {}
        self._held = 0
        # the prefix used longest ago first; one comes before those that it continues
        self._prefixes: OrderedDict[tuple[int, tuple[int, ...]], _Prefix[T]] = OrderedDict()
        self._next_number = 1

    @property
    def sequence_tokens(self) -> int:
        """Tokens that sequences have room for."""
        return self._held

    @property
    def prefix_tokens(self) -> int:
        """Tokens that prefixes keep."""
        return len(self._prefixes) * self.block_tokens

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
        if num_tokens <= held:
            return True
        least = rounded_up(num_tokens) - held
        if least > self.available:
            return False
        ample = rounded_up(num_tokens + num_tokens // SLACK_SHARE) - held
        added = ample if held and ample <= self._free() else least
        while self._free() < added:
            self._forget_oldest()
        self._rooms[sequence] = held + added
        self._held += added
        return True

    def release(self, sequence: Hashable) -> None:
        """Takes back all that a sequence has."""
        self._held -= self._rooms.pop(sequence, 0)

    def find(self, tokens: Sequence[int], root: int = 0) -> list[T]:
        """What is kept of the longest known beginning of some tokens, block by block."""
        return [prefix.kept for prefix in self._walk(tokens, root)]

    def keep(self, tokens: Sequence[int], make: Callable[[int], T], root: int = 0) -> int:
        """Keeps the whole blocks of some tokens, as far as prefixes used longer ago give way.

        Args:
            tokens: from the beginning of a sequence.
            make: gives what is kept of the block with a number, 0 the first.
            root: 0, or a negative number of what else computed them, such as an adapter.

        Returns:
            Blocks of these tokens that are kept now.
        """
        path = self._walk(tokens, root)
        for index in range(len(path), len(tokens) // (self.block_tokens or 1)):
            if not self.block_tokens or not self._make_place_beside(path):
                break
            parent = path[-1] if path else None
            key = self._key(tokens, index, parent, root)
            prefix = _Prefix(key, self._next_number, parent, make(index))
            self._next_number += 1
            self._prefixes[key] = prefix
            path.append(prefix)
            self._touch(path)
        return len(path)

    def forget(self) -> None:
        """Gives up all prefixes."""
        while self._prefixes:
            self._forget_oldest()

    def check(self) -> None:
        """Proves that what is had adds up, and that no prefix outlives those it continues.

        Raises:
            AssertionError: it does not.
        """
        assert self._held == sum(self._rooms.values())
        assert all(room > 0 and room % PIECE == 0 for room in self._rooms.values())
        assert 0 <= self._held + self.prefix_tokens <= self.capacity
        seen: set[int] = set()
        for key, prefix in reversed(self._prefixes.items()):
            assert key == prefix.key
            assert len(key[1]) == self.block_tokens
            assert prefix.number not in seen
            seen.add(prefix.number)
            if prefix.parent is None:
                assert key[0] <= 0
            else:
                assert key[0] == prefix.parent.number
                assert self._prefixes[prefix.parent.key] is prefix.parent
                assert prefix.parent.number in seen, "a prefix was used later than its beginning"

    def _free(self) -> int:
        return self.capacity - self._held - self.prefix_tokens

    def _key(
        self, tokens: Sequence[int], index: int, parent: _Prefix[T] | None, root: int
    ) -> tuple[int, tuple[int, ...]]:
        size = self.block_tokens
        block = tuple(tokens[index * size : (index + 1) * size])
        return (root if parent is None else parent.number), block

    def _walk(self, tokens: Sequence[int], root: int) -> list[_Prefix[T]]:
        """The longest known beginning, which is used now."""
        path: list[_Prefix[T]] = []
        for index in range(len(tokens) // self.block_tokens if self.block_tokens else 0):
            parent = path[-1] if path else None
            found = self._prefixes.get(self._key(tokens, index, parent, root))
            if found is None:
                break
            path.append(found)
        self._touch(path)
        return path

    def _touch(self, path: Sequence[_Prefix[T]]) -> None:
        for prefix in reversed(path):
            self._prefixes.move_to_end(prefix.key)

    def _make_place_beside(self, path: Sequence[_Prefix[T]]) -> bool:
        """Makes place for one block more, without giving up any of the path."""
        while self._free() < self.block_tokens:
            if len(self._prefixes) <= len(path):
                return False
            self._forget_oldest()
        return True

    def _forget_oldest(self) -> None:
        # whatever continues it was used no later, so it is gone
        self._prefixes.popitem(last=False)
