"""Room for keys and values of running sequences, and of known prefixes; no tensors."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from array import array
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

PIECE = 16
"""Sequences get room for a multiple of so many tokens."""
SLACK_SHARE = 16
"""A sequence that grows gets room for a sixteenth of its tokens beyond, while memory is free."""
_DIGEST_BYTES = 16
_STATE = b"state"
"""After the digest of a block: what is kept of the state after it."""

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
    """Of the whole blocks of some tokens, each with all before it; ``digest`` comes first. With the
    rest, also of the tokens after them."""
    end = len(tokens) if with_rest else len(tokens) - block_tokens + 1
    for first in range(0, end, block_tokens) if block_tokens else ():
        block = array("q", tokens[first : first + block_tokens]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=num_bytes, key=key).digest()
        yield digest


class KVAccount(Generic[T]):
    """Divides room for tokens between sequences and prefixes; sequences take it from prefixes.

    A prefix is known by a digest of all its tokens, block by block, under a key of this account's
    own. The prefixes used last stay longest, and of one prefix its beginning. Where sequences have
    states beside their tokens, a prefix ends with a block after which a state is kept.
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
        """Begins empty; blocks of 0 tokens keep no prefix, sequences have room for
        ``least_tokens``.

        A kept block takes the room of ``block_room`` tokens, when omitted of its own; a state takes
        ``state_room``, and without it there are none.
        """
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.block_room = block_tokens if block_room is None else block_room
        self.state_room = state_room
        self._kept_room = 0
        self._least_tokens = min(least_tokens, capacity // PIECE * PIECE)
        self._rooms: dict[Hashable, int] = {}
        self._held = 0
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._prefixes: dict[bytes, T] = {}  # blocks and states, the one used longest ago first

    @property
    def sequence_tokens(self) -> int:
        return self._held

    @property
    def prefix_tokens(self) -> int:
        """The room that prefixes take."""
        return self._kept_room

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
        path = self._known(tokens, root)
        if self.state_room:
            while path and path[-1] + _STATE not in self._prefixes:
                path.pop()
        self._use(path)
        return [self._prefixes[digest] for digest in path]

    def num_known(self, tokens: Sequence[int], root: str = "") -> int:
        """Blocks that are kept of the beginning of some tokens, also beyond the last state."""
        return len(self._known(tokens, root))

    def state_after(self, tokens: Sequence[int], root: str = "") -> T | None:
        """What is kept of the state after the whole blocks of some tokens."""
        *_, last = b"", *self._digests(tokens, root)
        return self._prefixes.get(last + _STATE)

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
        stays = {*path[:known], *(digest + _STATE for digest in path[-1:])}
        self._make_free((len(path) - known) * self.block_room, stays)
        del path[known + max(self._free(), 0) // self.block_room :]
        for index in range(known, len(path)):
            self._add(path[index], make(index))
        self._use(path)
        return len(path)

    def keep_state(self, tokens: Sequence[int], make: Callable[[], T], root: str = "") -> bool:
        """Keeps the state after some tokens, whole blocks, if prefixes used longer ago leave room.

        Gives whether it is kept now; ``make`` is called where it was not before.
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
            self._kept_room -= self.state_room

    def check(self) -> None:
        """Asserts that the sums agree."""
        assert self._held == sum(self._rooms.values())
        assert all(room > 0 and room % PIECE == 0 for room in self._rooms.values())
        assert self._kept_room == sum(map(self._room_of_kept, self._prefixes))
        assert 0 <= self._held + self.prefix_tokens <= self.capacity

    def _free(self) -> int:
        return self.capacity - self._held - self.prefix_tokens

    def _make_free(self, num_tokens: int, stays: Collection[bytes] = ()) -> None:
        """Gives prefixes up until so many tokens are free, or the next one is to stay."""
        if self._free() >= num_tokens:
            return
        for digest in list(self._prefixes):
            if self._free() >= num_tokens or digest in stays:
                return
            del self._prefixes[digest]
            self._kept_room -= self._room_of_kept(digest)

    def _add(self, digest: bytes, kept: T) -> None:
        self._prefixes[digest] = kept
        self._kept_room += self._room_of_kept(digest)

    def _room_of_kept(self, digest: bytes) -> int:
        return self.block_room if len(digest) == _DIGEST_BYTES else self.state_room

    def _known(self, tokens: Sequence[int], root: str) -> list[bytes]:
        digests = self._digests(tokens, root)
        return list(itertools.takewhile(self._prefixes.__contains__, digests))

    def _digests(self, tokens: Sequence[int], root: str) -> Iterator[bytes]:
        return digests_of(tokens, self.block_tokens, root.encode(), _DIGEST_BYTES, self._secret)

    def _use(self, path: Sequence[bytes]) -> None:
        """The last block first, so that beginnings stay longest; the state after it before it."""
        state = [digest + _STATE for digest in path[-1:] if digest + _STATE in self._prefixes]
        for digest in (*state, *reversed(path)):
            self._prefixes[digest] = self._prefixes.pop(digest)
