"""Static pinning: keeps the keys that a trace used most, whatever happens now."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking
from moe_runtime.policies.eviction.setting import Setting
from moe_runtime.policies.prediction.base import Routes
from moe_runtime.types import ExpertKey


def popularity(routes: Routes) -> dict[ExpertKey, int]:
    """Counts the tokens that visited each expert."""
    shape = routes.shape
    return {
        ExpertKey(layer, expert): count
        for layer in range(shape.num_layers)
        for expert, count in enumerate(
            np.bincount(
                routes.expert_ids[:, layer].ravel(), minlength=shape.num_experts + 1
            ).tolist()[: shape.num_experts]
        )
    }


class StaticPopularity(EvictionPolicy[K], has_rule=True):
    """Keeps the keys of largest weight; a key below all that are held is not kept.

    Among equal weights the lowest slot goes first: slots fill in order, and a newcomer takes the
    slot of its victim.

    Args:
        weights: uses of each key in a trace; a key that is absent has none.
    """

    may_decline: bool = True

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """See ``EvictionPolicy.maker``."""
        if setting.training is None:
            raise ValueError("policy 'static' needs a recorded trace to count uses in")
        return partial(cls, cast(Mapping[Any, float], popularity(setting.training)))

    def __init__(self, weights: Mapping[K, float]) -> None:
        self.rule = ReplayRule("static", weights=weights)
        self._weights = weights
        self._ranking: Ranking[K] = Ranking()
        self._free_slots: list[int] = []

    def touch(self, key: K) -> None:
        """A use changes nothing."""
        if key not in self._ranking:
            raise KeyError(key)

    def insert(self, key: K) -> None:
        """Starts to hold a key in the lowest free slot."""
        if key in self._ranking:
            raise ValueError(f"{key} is held already")
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._ranking)
        self._ranking.add(key, (self._weights.get(key, 0), slot))

    def remove(self, key: K) -> None:
        """Stops holding a key and frees its slot."""
        _, slot = self._ranking[key]
        self._ranking.remove(key)
        heapq.heappush(self._free_slots, slot)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of smallest weight."""
        return self._ranking.smallest(evictable)

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer's weight is smaller."""
        return self._weights.get(incoming, 0) < self._ranking[victim][0]

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """Once full, a newcomer is held against the smallest weight, which seldom changes."""
        ranks, weights, hits = self._ranking.ranks, self._weights, []
        smallest: K | None = None
        bound = -math.inf
        for keys in events:
            if len(keys) > num_slots:
                hits.append(self.access(keys, num_slots))
                smallest = None
                continue
            missing = [key for key in keys if key not in ranks]
            hits.append(len(keys) - len(missing))
            for key in missing:
                if len(ranks) < num_slots:
                    self.insert(key)
                    smallest = None
                    continue
                if smallest is None:
                    smallest = self._ranking.smallest(ranks.__contains__)
                    assert smallest is not None
                    bound = ranks[smallest][0]
                if weights.get(key, 0) >= bound:
                    self.remove(smallest)
                    self.insert(key)
                    smallest = None
        return hits

    def check(self) -> None:
        """Proves that slots are used once."""
        self._ranking.check()
        slots = [self._ranking[key][1] for key in self._ranking] + self._free_slots
        assert sorted(slots) == list(range(len(slots)))

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking
