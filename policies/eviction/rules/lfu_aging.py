"""LFU with ageing: every use counts, and counts less the longer ago it was (as LRFU does).

Lee et al., "LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies", IEEE TC 2001.
"""

import math

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking


class AgingLFU(EvictionPolicy[K], has_rule=True):
    """Orders keys by uses whose weight halves over time.

    Instead of shrinking every count, a new use weighs more than the ones before; logarithms keep
    the numbers small.

    Args:
        half_life: time in which a use loses half its weight, in turns of the cache: one turn has
            passed after as many uses as keys are held.
    """

    def __init__(self, half_life: float = 8.0) -> None:
        self.rule = ReplayRule("lfu-aging", parameter=half_life)
        self._half_life = half_life
        self._ranking: Ranking[K] = Ranking()
        self._log2_uses: dict[K, float] = {}
        self._now = 0.0  # in half-lives

    def touch(self, key: K) -> None:
        """Counts a use of a held key."""
        if key not in self._ranking:
            raise KeyError(key)
        self._ranking.move(key, self._count(key))

    def insert(self, key: K) -> None:
        """Counts a use of a key and starts to hold it."""
        if key in self._ranking:
            raise ValueError(f"{key} is held already")
        self._ranking.add(key, self._count(key))

    def remove(self, key: K) -> None:
        """Stops holding a key; its uses go on ageing."""
        self._ranking.remove(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key whose uses weigh least."""
        return self._ranking.smallest(evictable)

    def check(self) -> None:
        """Proves that held keys are ranked by their uses."""
        self._ranking.check()
        assert all(self._ranking[key] == self._log2_uses[key] for key in self._ranking)

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking

    def _count(self, key: K) -> float:
        self._now += 1 / (self._half_life * max(1, len(self._ranking)))
        before = self._log2_uses.get(key, -math.inf)
        self._log2_uses[key] = self._now + math.log2(1 + math.exp2(min(before - self._now, 1000.0)))
        return self._log2_uses[key]
