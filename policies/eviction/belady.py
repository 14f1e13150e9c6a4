"""Belady's optimum: evicts the key whose next use lies furthest ahead (IBM Systems Journal 1966).

No running system can know the future; these two bound what any policy can reach on a trace.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Self

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule
from moe_runtime.policies.eviction.ranking import Ranking
from moe_runtime.policies.eviction.setting import Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted


class Future:
    """When every key is used, told by a clock that advances with the routing events.

    Args:
        events: the keys of every layer of every step, in the order in which they will be routed.
    """

    def __init__(self, events: Sequence[Sequence[Hashable]]) -> None:
        self._events = events
        self._now = -1

    @cached_property
    def _uses(self) -> dict[Hashable, list[float]]:
        """The events to come of every key, the next one last."""
        uses: defaultdict[Hashable, list[float]] = defaultdict(list)
        for number, keys in enumerate(self._events):
            for place, key in enumerate(keys):
                uses[key].append(number + place / len(keys))
        return {key: numbers[::-1] for key, numbers in uses.items()}

    def observe(self, event: Event) -> None:
        """Moves the clock to the next layer."""
        self._now += isinstance(event, LayerRouted)

    def finish(self, sequence: int) -> None:
        """Nothing ends here: the events say it all."""

    def next_use(self, key: Hashable) -> float:
        """The number of the next event that uses the key, and as a fraction its place there.

        Infinite where there is none.
        """
        uses = self._uses.get(key, [])
        while uses and uses[-1] < self._now + 1:
            uses.pop()
        return uses[-1] if uses else math.inf


def _ranks_by_next_use(events: Sequence[Sequence[Hashable]]) -> list[list[float]]:
    """For every key of every event minus its next use, as ``Future.next_use`` tells it."""
    ranks: list[list[float]] = []
    next_rank: dict[Hashable, float] = {}
    for number in range(len(events) - 1, -1, -1):
        keys = events[number]
        ranks.append([next_rank.get(key, -math.inf) for key in keys])
        for place, key in enumerate(keys):
            next_rank[key] = -(number + place / len(keys))
    return ranks[::-1]


class Belady(EvictionPolicy[K], has_rule=True):
    """The fewest misses that a cache can have which keeps everything that it loads.

    Args:
        future: the uses to come; its clock must advance before the keys of an event are used.
            ``access_all`` needs no clock: its events are the future.
    """

    needs_no_events: bool = True
    rule = ReplayRule("belady")

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """See ``EvictionPolicy.maker``."""
        if setting.future is None:
            raise ValueError("Belady's policies must be told the future, which only a replay can")
        return partial(cls, Future(setting.future))

    def __init__(self, future: Future) -> None:
        self.watcher = self._future = future
        self._ranking: Ranking[K] = Ranking()

    def touch(self, key: K) -> None:
        """Looks up the next use of a held key."""
        self._ranking.move(key, -self._future.next_use(key))

    def insert(self, key: K) -> None:
        """Starts to hold a key."""
        self._ranking.add(key, -self._future.next_use(key))

    def remove(self, key: K) -> None:
        """Stops holding a key."""
        self._ranking.remove(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key whose next use is furthest ahead."""
        return self._ranking.smallest(evictable)

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """Serves all events that there will be, from an empty cache.

        Raises:
            ValueError: something is held already.
        """
        if self._ranking.ranks:
            raise ValueError("all events of a Belady policy must be served at once")
        ranking, ranks, hits = self._ranking, self._ranking.ranks, []
        for keys, later in zip(events, _ranks_by_next_use(events), strict=True):
            missing = []
            for key, rank in zip(keys, later, strict=True):
                if key in ranks:
                    ranking.move(key, rank)
                else:
                    missing.append((key, rank))
            hits.append(len(keys) - len(missing))
            if missing and self.may_decline:
                self._settle(missing, num_slots)
            elif missing:
                ranking.replace(missing[max(0, len(keys) - num_slots) :], num_slots, keys)
        return hits

    def _settle(self, missing: Sequence[tuple[K, float]], num_slots: int) -> None:
        ranking = self._ranking
        for key, rank in missing:
            if len(ranking.ranks) >= num_slots:
                victim = ranking.smallest(ranking.ranks.__contains__)
                if victim is None or rank < ranking.ranks[victim]:
                    continue
                ranking.remove(victim)
            ranking.add(key, rank)

    def check(self) -> None:
        """Proves the order's invariants."""
        self._ranking.check()

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking


class BeladyBypass(Belady[K], has_rule=True):
    """The fewest misses that any cache can have: what is needed last is used once and not kept."""

    may_decline: bool = True
    rule = ReplayRule("belady-bypass")

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer is used after all that is held."""
        return -self._future.next_use(incoming) < self._ranking[victim]
