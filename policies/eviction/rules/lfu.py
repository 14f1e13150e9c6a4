"""Least frequently used: evicts the key with the fewest uses; among equals the least recent."""

from collections.abc import Sequence

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking

_ONE_USE = 1 << 48
"""A rank is uses times this plus the time of the last one: one comparison orders by both."""


class LFU(EvictionPolicy[K], has_rule=True):
    """Orders keys by all their uses so far, also those before they were evicted."""

    rule = ReplayRule("lfu")

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

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """Counts the uses of an event, then lets the least used go for the missing."""
        ranking, ranks, num_uses = self._ranking, self._ranking.ranks, self._num_uses
        clock, hits = self._clock, []
        for keys in events:
            if len(keys) > num_slots:
                self._clock = clock
                hits.append(self.access(keys, num_slots))
                clock = self._clock
                continue
            missing = []
            for key in keys:
                clock += 1
                uses = num_uses[key] = num_uses.get(key, 0) + 1
                if key in ranks:
                    ranks[key] = uses * _ONE_USE + clock
                else:
                    missing.append((key, uses * _ONE_USE + clock))
            hits.append(len(keys) - len(missing))
            if missing:
                ranking.replace(missing, num_slots, keys)
        self._clock = clock
        return hits

    def check(self) -> None:
        """Proves that held keys are ranked by their counts."""
        self._ranking.check()
        for key in self._ranking:
            assert self._ranking[key] // _ONE_USE == self._num_uses[key]

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking

    def _next_rank(self, key: K) -> int:
        self._clock += 1
        num_uses = self._num_uses[key] = self._num_uses.get(key, 0) + 1
        return num_uses * _ONE_USE + self._clock
