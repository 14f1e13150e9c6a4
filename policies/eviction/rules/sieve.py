"""SIEVE: a queue in order of arrival, and a hand that spares what was used since it last came by.

Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches",
NSDI 2024.
"""

from collections.abc import Callable, Sequence

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule


class SIEVE(EvictionPolicy[K], has_rule=True):
    """Keys in order of insertion; a use only sets a mark, and the hand takes marks away.

    ``victim`` moves the hand, so that asking again gives the same key until it is removed.
    ``remove`` closes a gap in the queue, which takes a time proportional to its length.
    """

    rule = ReplayRule("sieve")

    def __init__(self) -> None:
        self._queue: list[K] = []  # the oldest first
        self._used: dict[K, bool] = {}
        self._hand = 0

    def touch(self, key: K) -> None:
        """Marks a held key as used."""
        if key not in self._used:
            raise KeyError(key)
        self._used[key] = True

    def insert(self, key: K) -> None:
        """Starts to hold a key at the young end of the queue, without a mark."""
        if key in self._used:
            raise ValueError(f"{key} is held already")
        self._used[key] = False
        self._queue.append(key)

    def remove(self, key: K) -> None:
        """Stops holding a key; a hand that points at it moves on."""
        del self._used[key]
        self._close_gap(self._queue.index(key))

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The first evictable key without a mark, from the hand towards the young end."""
        if not any(evictable(key) for key in self._queue):
            return None
        return self._find(lambda key: not evictable(key))

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """The steps of ``access`` in one loop."""
        queue, used, hits = self._queue, self._used, []
        for keys in events:
            if len(keys) > num_slots:
                hits.append(self.access(keys, num_slots))
                continue
            missing = [key for key in keys if key not in used]
            hits.append(len(keys) - len(missing))
            for _ in range(len(queue) + len(missing) - num_slots):
                del used[self._find(keys.__contains__)]
                self._close_gap(self._hand)
            for key in keys:
                if key in used:
                    used[key] = True
                else:
                    used[key] = False
                    queue.append(key)
        return hits

    def check(self) -> None:
        """Proves that the queue holds every key once, and that the hand points into it."""
        assert len(self._queue) == len(self._used)
        assert set(self._queue) == self._used.keys()
        assert 0 <= self._hand < max(1, len(self._queue))

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: object) -> bool:
        return key in self._used

    def _close_gap(self, place: int) -> None:
        del self._queue[place]
        self._hand -= place < self._hand
        if self._hand == len(self._queue):
            self._hand = 0

    def _find(self, spared: Callable[[K], bool]) -> K:
        """Moves the hand to the next unmarked key that is not spared; there must be one."""
        queue, used, place = self._queue, self._used, self._hand
        while True:
            if place >= len(queue):
                place = 0
            key = queue[place]
            if not spared(key):
                if not used[key]:
                    self._hand = place
                    return key
                used[key] = False
            place += 1
