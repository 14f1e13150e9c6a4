"""Least recently used: evicts the key whose last use lies furthest back."""

from collections import OrderedDict
from collections.abc import Sequence

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule


class LRU(EvictionPolicy[K], has_rule=True):
    """Least-recently-used order over keys.

    ``touch``, ``insert`` and ``remove`` take constant time; ``victim`` takes one step for every key
    at the old end that is not evictable.
    """

    rule = ReplayRule("lru")

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """Makes a held key the most recent one."""
        self._order.move_to_end(key)

    def insert(self, key: K) -> None:
        """Starts to hold a key as the most recent one."""
        if key in self._order:
            raise ValueError(f"{key} is held already")
        self._order[key] = None

    def remove(self, key: K) -> None:
        """Stops holding a key."""
        del self._order[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The least recently used key that may be evicted."""
        return next((key for key in self._order if evictable(key)), None)

    def access(self, keys: Sequence[K], num_slots: int) -> int:
        """Moves the event to the recent end and lets the old end go."""
        return LRU.access_all(self, [keys], num_slots)[0]

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """The same for many events."""
        order, hits = self._order, []
        renew, let_go = order.move_to_end, order.popitem
        for keys in events:
            if len(keys) > num_slots:
                hits.append(super().access(keys, num_slots))
                continue
            num_hits = 0
            for key in keys:
                if key in order:
                    num_hits += 1
                    renew(key)
                else:
                    order[key] = None
            hits.append(num_hits)
            while len(order) > num_slots:
                let_go(last=False)
        return hits

    def check(self) -> None:
        """Nothing can contradict itself here: the order is the state."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
