"""Least frequently used: evicts the key with the fewest uses; among equals the least recent."""

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K
from moe_runtime.policies.eviction.ranking import Ranking


class LFU(EvictionPolicy[K]):
    """Orders keys by all their uses so far, also those before they were evicted."""

    def __init__(self) -> None:
        self._ranking: Ranking[K] = Ranking()
        self._num_uses: dict[K, int] = {}
        self._clock = 0

    def touch(self, key: K) -> None:
        """Counts a use of a held key."""
        self._ranking.move(key, self._next_rank(key))

    def insert(self, key: K) -> None:
        """Counts a use of a key and starts to hold it."""
        if key in self._ranking:
            raise ValueError(f"{key} is held already")
        self._ranking.add(key, self._next_rank(key))

    def remove(self, key: K) -> None:
        """Stops holding a key; its uses stay counted."""
        self._ranking.remove(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key with the fewest uses."""
        return self._ranking.smallest(evictable)

    def check(self) -> None:
        """Proves that held keys are ranked by their counts."""
        self._ranking.check()
        assert all(self._ranking[key][0] == self._num_uses[key] for key in self._ranking)

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking

    def _next_rank(self, key: K) -> tuple[int, int]:
        self._clock += 1
        num_uses = self._num_uses[key] = self._num_uses.get(key, 0) + 1
        return num_uses, self._clock
