"""Room for keys and values of running sequences, and of known prefixes; no tensors."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from array import array
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

PIECE = 16
"""The room of a sequence is a multiple of this many tokens."""
SLACK_SHARE = 16
"""A growing sequence gets room for a sixteenth more tokens, while memory is free."""
_DIGEST_BYTES = 16
_STATE = b"state"
"""The digest of a block and this name the state after the block."""

T = TypeVar("T")


def rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // PIECE) * PIECE


def digests_of(
    tokens: Sequence[int],
    block_tokens: int,
    digest: bytes,
    num_bytes: int,
    key: bytes = b"",
    *,
    with_rest: bool = False,
) -> Iterator[bytes]:
    """Digests of whole blocks, each with all tokens before it; ``digest`` comes first. With the
    rest, also of the tokens after the last whole block."""
    end = len(tokens) if with_rest else len(tokens) - block_tokens + 1
    for first in range(0, end, block_tokens) if block_tokens else ():
        block = array("q", tokens[first : first + block_tokens]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=num_bytes, key=key).digest()
        yield digest


class KVAccount(Generic[T]):
    """Divides room for tokens between sequences and prefixes; sequences take it from prefixes.

    A prefix is found by a digest of all its tokens, block by block, under a key of this account's
    own. The least recently used blocks are evicted first, and of one prefix its end. If sequences
    have states, a prefix ends with a block after which a state is kept.
    """

    def __init__(
        self,
        capacity: int,
        *,
        block_tokens: int,
        least_tokens: int = 0,
        block_room: int | None = None,
        state_room: int = 0,
    ) -> None:
        """Starts empty.

        Args:
            capacity: tokens of all sequences and prefixes.
            block_tokens: tokens of a block; 0 keeps no prefixes.
            least_tokens: room that each sequence gets.
            block_room: tokens whose room a block takes; its own if omitted.
            state_room: tokens whose room a state takes; 0 keeps no states.
        """
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.block_room = block_tokens if block_room is None else block_room
        self.state_room = state_room
        self.prefix_tokens = 0  # the room that prefixes take
        self.sequence_tokens = 0
        self._least_tokens = min(least_tokens, capacity // PIECE * PIECE)
        self._rooms: dict[Hashable, int] = {}
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._prefixes: dict[bytes, T] = {}  # blocks and states, the one used longest ago first

    @property
    def available(self) -> int:
        """Tokens that a sequence could get if prefixes are evicted."""
        return self.capacity - self.sequence_tokens

    def room_of(self, sequence: Hashable) -> int:
        return self._rooms.get(sequence, 0)

    def reserve(self, sequence: Hashable, num_tokens: int) -> bool:
        """Gives a sequence room for ``num_tokens`` in all; returns whether it has it."""
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
        self.sequence_tokens += added
        return True

    def release(self, sequence: Hashable) -> None:
        self.sequence_tokens -= self._rooms.pop(sequence, 0)

    def find(self, tokens: Sequence[int], root: str = "") -> list[T]:
        """The kept blocks of the longest known beginning of some tokens."""
        path = self._known(tokens, root)
        if self.state_room:
            while path and path[-1] + _STATE not in self._prefixes:
                path.pop()
        self._use(path)
        return [self._prefixes[digest] for digest in path]

    def num_known(self, tokens: Sequence[int], root: str = "") -> int:
        """Number of kept blocks of the beginning of some tokens, also beyond the last state."""
        return len(self._known(tokens, root))

    def state_after(self, tokens: Sequence[int], root: str = "") -> T | None:
        """The kept state after the whole blocks of some tokens."""
        *_, last = b"", *self._digests(tokens, root)
        return self._prefixes.get(last + _STATE)

    def keep(self, tokens: Sequence[int], make: Callable[[int], T], root: str = "") -> int:
        """Keeps the whole blocks of some tokens, as far as older prefixes make room.

        ``make`` copies the block with a number; ``root`` names the adapter and owner. Returns the
        number of blocks of these tokens that are kept now.
        """
        if not self.block_tokens:
            return 0
        path = list(self._digests(tokens, root))
        known = sum(1 for _ in itertools.takewhile(self._prefixes.__contains__, path))
        self._use(path[:known])
        stays = {*path[:known], *(digest + _STATE for digest in path[-1:])}
        self._make_free((len(path) - known) * self.block_room, stays)
        del path[known + max(self._free(), 0) // self.block_room :]
        for index in range(known, len(path)):
            self._add(path[index], make(index))
        self._use(path)
        return len(path)

    def keep_state(self, tokens: Sequence[int], make: Callable[[], T], root: str = "") -> bool:
        """Keeps the state after some tokens, whole blocks, if older prefixes make room.

        Returns whether it is kept now; ``make`` is called if it was not before.
        """
        *_, last = self._digests(tokens, root)
        path = self._known(tokens, root)
        self._use(path)
        if last + _STATE in self._prefixes:
            return True
        self._make_free(self.state_room, {*path})
        if self._free() < self.state_room:
            return False
        self._add(last + _STATE, make())
        return True

    def drop_state(self, tokens: Sequence[int], root: str = "") -> None:
        *_, last = self._digests(tokens, root)
        if self._prefixes.pop(last + _STATE, None) is not None:
            self.prefix_tokens -= self.state_room

    def check(self) -> None:
        """Asserts that the sums agree."""
        assert self.sequence_tokens == sum(self._rooms.values())
        assert all(room > 0 and room % PIECE == 0 for room in self._rooms.values())
        assert self.prefix_tokens == sum(map(self._room_taken, self._prefixes))
        assert 0 <= self.sequence_tokens + self.prefix_tokens <= self.capacity

    def _free(self) -> int:
        return self.capacity - self.sequence_tokens - self.prefix_tokens

    def _make_free(self, num_tokens: int, stays: Collection[bytes] = ()) -> None:
        """Evicts prefixes until ``num_tokens`` are free or the next one must stay."""
        if self._free() >= num_tokens:
            return
        for digest in list(self._prefixes):
            if self._free() >= num_tokens or digest in stays:
                return
            del self._prefixes[digest]
            self.prefix_tokens -= self._room_taken(digest)

    def _add(self, digest: bytes, kept: T) -> None:
        self._prefixes[digest] = kept
        self.prefix_tokens += self._room_taken(digest)

    def _room_taken(self, digest: bytes) -> int:
        return self.block_room if len(digest) == _DIGEST_BYTES else self.state_room

    def _known(self, tokens: Sequence[int], root: str) -> list[bytes]:
        digests = self._digests(tokens, root)
        return list(itertools.takewhile(self._prefixes.__contains__, digests))

    def _digests(self, tokens: Sequence[int], root: str) -> Iterator[bytes]:
        return digests_of(tokens, self.block_tokens, root.encode(), _DIGEST_BYTES, self._secret)

    def _use(self, path: Sequence[bytes]) -> None:
        """Notes a use of the last state, then of the last block first: beginnings stay longest."""
        state = [digest + _STATE for digest in path[-1:] if digest + _STATE in self._prefixes]
        for digest in (*state, *reversed(path)):
            self._prefixes[digest] = self._prefixes.pop(digest)
