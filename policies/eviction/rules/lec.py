"""Least expected cost: keeps the keys whose probability of use times cost of a miss is largest.

Zhu et al., "On Optimal Caching and Model Multiplexing for Large Model Inference", NeurIPS 2023.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Self

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking
from moe_runtime.policies.eviction.setting import Setting


class LeastExpectedCost(EvictionPolicy[K], has_rule=True):
    """Ranks by uses so far times cost; a newcomer is kept only if it is worth more than a victim.

    Args:
        cost: what a miss of a key costs; only ratios matter. All keys cost the same when omitted.
    """

    may_decline: bool = True

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """See ``EvictionPolicy.maker``."""
        return partial(cls, setting.cost_of)

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        self.rule = ReplayRule("lec") if cost is None else None
        self._cost = cost or _one
        self._ranking: Ranking[K] = Ranking()
        self._num_uses: Counter[K] = Counter()
        self._num_stamps = 0

    def touch(self, key: K) -> None:
        """Counts a use of a held key."""
        if key not in self._ranking:
            raise KeyError(key)
        self._num_uses[key] += 1
        self._ranking.move(key, self._rank(key))

    def insert(self, key: K) -> None:
        """Counts a use of a key and starts to hold it."""
        if key in self._ranking:
            raise ValueError(f"{key} is held already")
        self._num_uses[key] += 1
        self._ranking.add(key, self._rank(key))

    def decline(self, key: K) -> None:
        """Counts a use of a key that was not kept."""
        self._num_uses[key] += 1

    def remove(self, key: K) -> None:
        """Stops holding a key; its uses stay counted."""
        self._ranking.remove(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of least expected cost."""
        return self._ranking.smallest(evictable)

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer is not worth more, its present use included."""
        expected_cost = (self._num_uses[incoming] + 1) * self._cost(incoming)
        return expected_cost <= self._ranking[victim][0]

    def check(self) -> None:
        """Proves that held keys are ranked by what they are expected to cost."""
        self._ranking.check()
        for key in self._ranking:
            assert self._ranking[key][0] == self._num_uses[key] * self._cost(key)

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking

    def _rank(self, key: K) -> tuple[float, int]:
        self._num_stamps += 1
        return self._num_uses[key] * self._cost(key), self._num_stamps


def _one(_: Hashable) -> float:
    return 1.0
