"""LFRU: evicts the key of lowest frequency over time since its last use (as in vLLM's cache)."""

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule


class LFRU(EvictionPolicy[K], has_rule=True):
    """Frequency-weighted recency: a key is worth its uses while held, over its age.

    ``victim`` looks at every held key, since all ages change with every use.
    """

    rule = ReplayRule("lfru")

    def __init__(self) -> None:
        self._num_uses: dict[K, int] = {}
        self._last_use: dict[K, int] = {}
        self._clock = 0

    def touch(self, key: K) -> None:
        """Counts a use of a held key."""
        self._num_uses[key] += 1
        self._stamp(key)

    def insert(self, key: K) -> None:
        """Starts to hold a key, used once."""
        if key in self._num_uses:
            raise ValueError(f"{key} is held already")
        self._num_uses[key] = 1
        self._stamp(key)

    def remove(self, key: K) -> None:
        """Stops holding a key and forgets its uses."""
        del self._num_uses[key]
        del self._last_use[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of lowest worth, the least recently used one among equals."""
        now = self._clock + 1
        worth = (
            (num_uses / (now - self._last_use[key]), self._last_use[key], key)
            for key, num_uses in self._num_uses.items()
            if evictable(key)
        )
        lowest = min(worth, key=lambda entry: entry[:2], default=None)
        return None if lowest is None else lowest[2]

    def check(self) -> None:
        """Proves that every held key has uses and an age."""
        assert self._num_uses.keys() == self._last_use.keys()
        assert all(stamp <= self._clock for stamp in self._last_use.values())

    def __len__(self) -> int:
        return len(self._num_uses)

    def __contains__(self, key: object) -> bool:
        return key in self._num_uses

    def _stamp(self, key: K) -> None:
        self._clock += 1
        self._last_use[key] = self._clock
