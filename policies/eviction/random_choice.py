"""Random eviction: the line below which a policy does harm."""

import random

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K


class RandomChoice(EvictionPolicy[K]):
    """Evicts any evictable key with equal probability.

    Args:
        seed: equal seeds and equal calls give equal victims.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = random.Random(seed)
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
            if self._keys and evictable(key := self._generator.choice(self._keys)):
                return key
        candidates = [key for key in self._keys if evictable(key)]
        return self._generator.choice(candidates) if candidates else None

    def check(self) -> None:
        """Proves that every key is found at its place."""
        assert self._place == {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._place
