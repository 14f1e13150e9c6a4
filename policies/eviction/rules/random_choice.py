"""Random eviction: the line below which a policy does harm."""

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule

_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
"""Knuth's linear congruential generator (MMIX): a compiled replay draws the same numbers."""
_MODULUS = 1 << 64


class RandomChoice(EvictionPolicy[K], has_rule=True):
    """Evicts any evictable key with equal probability; equal calls give equal victims."""

    rule = ReplayRule("random")

    def __init__(self) -> None:
        self._state = 0
        self._keys: list[K] = []
        self._place: dict[K, int] = {}

    def touch(self, key: K) -> None:
        """A use changes nothing."""
        if key not in self._place:
            raise KeyError(key)

    def insert(self, key: K) -> None:
        """Starts to hold a key."""
        if key in self._place:
            raise ValueError(f"{key} is held already")
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def remove(self, key: K) -> None:
        """Stops holding a key; the last one takes its place."""
        place = self._place.pop(key)
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """Any evictable key."""
        for _ in range(4):
            if self._keys and evictable(key := self._any_of(self._keys)):
                return key
        candidates = [key for key in self._keys if evictable(key)]
        return self._any_of(candidates) if candidates else None

    def check(self) -> None:
        """Proves that every key is found at its place."""
        assert self._place == {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._place

    def _any_of(self, keys: list[K]) -> K:
        self._state = (self._state * _MULTIPLIER + _INCREMENT) % _MODULUS
        # the low digits of such a generator repeat soon
        return keys[(self._state >> 33) * len(keys) >> 31]
