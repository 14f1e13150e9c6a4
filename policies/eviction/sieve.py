"""SIEVE: a queue in order of arrival, and a hand that spares what was used since it last came by.

Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches",
NSDI 2024.
"""

from collections.abc import Iterator

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K


class SIEVE(EvictionPolicy[K]):
    """Keys in order of insertion; a use only sets a mark, and the hand takes marks away.

    ``victim`` moves the hand, so that asking again gives the same key until it is removed.
    """

    def __init__(self) -> None:
        self._used: dict[K, bool] = {}  # in order of insertion
        self._hand: K | None = None

    def touch(self, key: K) -> None:
        """Marks a held key as used."""
        if key not in self._used:
            raise KeyError(key)
        self._used[key] = True

    def insert(self, key: K) -> None:
        """Starts to hold a key at the young end of the queue, without a mark."""
        if key in self._used:
            raise ValueError(f"{key} is held already")
        self._used[key] = False

    def remove(self, key: K) -> None:
        """Stops holding a key; a hand that points at it moves on."""
        if key == self._hand:
            order = list(self._used)
            place = order.index(key) + 1
            self._hand = order[place] if place < len(order) else None
        del self._used[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The first evictable key without a mark, from the hand towards the young end."""
        if not any(evictable(key) for key in self._used):
            return None
        for _ in range(2):  # the first round takes the marks away
            for key in self._from_hand():
                if not evictable(key):
                    continue
                if not self._used[key]:
                    self._hand = key
                    return key
                self._used[key] = False
        raise AssertionError("an unmarked key was to be found in the second round")

    def check(self) -> None:
        """Proves that the hand points at a held key, or at the old end."""
        assert self._hand is None or self._hand in self._used

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: object) -> bool:
        return key in self._used

    def _from_hand(self) -> Iterator[K]:
        order = list(self._used)
        start = 0 if self._hand is None else order.index(self._hand)
        return iter(order[start:] + order[:start])
