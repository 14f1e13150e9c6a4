"""Belady's optimum: evicts the key whose next use lies furthest ahead (IBM Systems Journal 1966).

No running system can know the future; these two bound what any policy can reach on a trace.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K
from moe_runtime.policies.eviction.ranking import Ranking
from moe_runtime.policies.prediction.base import Event, LayerRouted


class Future:
    """When every key is used, told by a clock that advances with the routing events.

    Args:
        events: the keys of every layer of every step, in the order in which they will be routed.
    """

    def __init__(self, events: Sequence[Sequence[Hashable]]) -> None:
        uses: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number, keys in enumerate(events):
            for key in keys:
                uses[key].append(number)
        self._uses = {key: numbers[::-1] for key, numbers in uses.items()}
        self._now = -1

    def observe(self, event: Event) -> None:
        """Moves the clock to the next layer."""
        self._now += isinstance(event, LayerRouted)

    def finish(self, sequence: int) -> None:
        """Nothing ends here: the events say it all."""

    def next_use(self, key: Hashable) -> float:
        """The number of the next event that uses the key; infinite where there is none."""
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else math.inf


class Belady(EvictionPolicy[K]):
    """The fewest misses that a cache can have which keeps everything that it loads.

    Args:
        future: the uses to come; its clock must advance before the keys of an event are used.
    """

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

    def check(self) -> None:
        """Proves the order's invariants."""
        self._ranking.check()

    def __len__(self) -> int:
        return len(self._ranking)

    def __contains__(self, key: object) -> bool:
        return key in self._ranking


class BeladyBypass(Belady[K]):
    """The fewest misses that any cache can have: what is needed last is used once and not kept."""

    may_decline: bool = True

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer is used after all that is held."""
        return -self._future.next_use(incoming) < self._ranking[victim]
