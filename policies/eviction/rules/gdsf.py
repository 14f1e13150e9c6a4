"""Greedy-Dual-Size-Frequency: frequency times cost, on a clock that ages what stays idle.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP
Laboratories 1998.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Self

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking
from moe_runtime.policies.eviction.setting import Setting


class GDSF(EvictionPolicy[K], has_rule=True):
    """Rank = clock + uses * cost; the clock is the rank of the last victim.

    The paper divides by the size; here every key takes one slot, however small it is. With equal
    costs this is LFU with dynamic ageing.

    Args:
        cost: what a miss of a key costs; only ratios matter. All keys cost the same when omitted.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """See ``EvictionPolicy.maker``."""
        return partial(cls, setting.cost_of)

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        self.rule = ReplayRule("gdsf") if cost is None else None
        self._cost = cost or _one
        self._ranking: Ranking[K] = Ranking()
        self._num_uses: dict[K, int] = {}
        self._clock = 0.0
        self._num_stamps = 0
        self._candidate: K | None = None

    def touch(self, key: K) -> None:
        """Counts a use of a held key and renews its rank."""
        self._num_uses[key] += 1
        self._ranking.move(key, self._rank(key))

    def insert(self, key: K) -> None:
        """Starts to hold a key, used once."""
        if key in self._ranking:
            raise ValueError(f"{key} is held already")
        self._num_uses[key] = 1
        self._ranking.add(key, self._rank(key))

    def remove(self, key: K) -> None:
        """Stops holding a key; the clock advances to its rank if it was chosen as a victim."""
        if key == self._candidate:
            self._clock = max(self._clock, self._ranking[key][0])
            self._candidate = None
        self._ranking.remove(key)
        del self._num_uses[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of lowest rank."""
        self._candidate = self._ranking.smallest(evictable)
        return self._candidate

    def check(self) -> None:
        """Proves that every held key is ranked and counted."""
        self._ranking.check()
        assert set(self._ranking) == self._num_uses.keys()

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking

    def _rank(self, key: K) -> tuple[float, int]:
        self._num_stamps += 1
        return self._clock + self._num_uses[key] * self._cost(key), self._num_stamps


def _one(_: Hashable) -> float:
    return 1.0
