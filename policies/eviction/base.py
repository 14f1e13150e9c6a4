"""The contract of an eviction policy: it orders keys; who calls it moves the bytes."""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

Evictable = Callable[[Hashable], bool]
"""Says whether a key may be chosen: leased and arriving experts may not."""


class EvictionPolicy(Protocol[K]):
    """Decides which resident key gives up its slot.

    A policy holds exactly the keys that were inserted and not removed since. It touches no tensors,
    bytes, clocks or threads, so that the same object runs in a live store and in a replayed trace.
    """

    def touch(self, key: K) -> None:
        """Notes a use of a resident key.

        Raises:
            KeyError: the key is not held.
        """
        ...

    def insert(self, key: K) -> None:
        """Starts to hold a key, as just used.

        Raises:
            ValueError: the key is held already.
        """
        ...

    def remove(self, key: K) -> None:
        """Stops holding a key.

        Raises:
            KeyError: the key is not held.
        """
        ...

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """Chooses the key to evict for ``incoming``; changes nothing.

        Args:
            evictable: only keys for which this holds may be chosen.
            incoming: the key that needs the slot.

        Returns:
            The chosen key, or None when no held key is evictable.
        """
        ...

    def check(self) -> None:
        """Proves the policy's own invariants.

        Raises:
            AssertionError: the policy's state contradicts itself.
        """
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...
