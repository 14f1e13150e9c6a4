"""Segmented LRU: a key must be used twice before it can push out one that was used twice.

Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", Computer 1994.
"""

from collections import OrderedDict
from collections.abc import Sequence

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule


class SLRU(EvictionPolicy[K], has_rule=True):
    """Two orders by recency: newcomers on probation, and a protected segment.

    Args:
        protected_share: largest share of the held keys that is protected.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        self.rule = ReplayRule("slru", parameter=protected_share)
        self._protected_share = protected_share
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """Protects a held key; the oldest protected ones may fall back to probation."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        self._balance()

    def insert(self, key: K) -> None:
        """Starts to hold a key on probation."""
        if key in self:
            raise ValueError(f"{key} is held already")
        self._probation[key] = None

    def remove(self, key: K) -> None:
        """Stops holding a key."""
        del (self._protected if key in self._protected else self._probation)[key]
        self._balance()

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The oldest evictable key on probation, or else the oldest protected one."""
        segments = (self._probation, self._protected)
        return next((key for keys in segments for key in keys if evictable(key)), None)

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """The steps of ``access`` in one loop."""
        probation, protected, hits = self._probation, self._protected, []
        for keys in events:
            if len(keys) > num_slots:
                hits.append(self.access(keys, num_slots))
                continue
            missing = [key for key in keys if key not in protected and key not in probation]
            hits.append(len(keys) - len(missing))
            if missing:
                self._let_go(len(self) + len(missing) - num_slots, keys)
            for key in keys:
                if key in protected:
                    protected.move_to_end(key)
                elif key in probation:
                    self.touch(key)
                else:
                    probation[key] = None
        return hits

    def check(self) -> None:
        """Proves that no key is in both segments, and that the protected one is not too large."""
        assert not self._probation.keys() & self._protected.keys()
        assert len(self._protected) <= max(1, self._protected_share * len(self))

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._protected or key in self._probation

    def _let_go(self, excess: int, in_use: Sequence[K]) -> None:
        while excess > 0:
            for key in self._probation:
                if key not in in_use:
                    del self._probation[key]
                    break
            else:
                del self._protected[next(key for key in self._protected if key not in in_use)]
            self._balance()
            excess -= 1

    def _balance(self) -> None:
        while len(self._protected) > max(1, self._protected_share * len(self)):
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None
