"""Shares that move to the layers where another slot saves the most misses."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.shares import LayerShares
from moe_runtime.types import ExpertKey

_GHOST_SHARE = 0.5
"""Evicted keys that a layer remembers, as a share of its slots: what a few more would have held."""
_USES_BETWEEN_MOVES = 64
"""Uses for each slot of the cache before the next move, so that a count means something."""


class AdaptiveShares(LayerShares):
    """Moves slots from the layer whose lately evicted experts are missed least to the one that
    misses them most.

    A use of an expert that was evicted lately is a miss that a slightly larger share would have
    saved. A slot moves only when the counts differ by more than chance explains.

    Args:
        make_policy: makes the policy of one layer.
        shares: how many experts each layer may hold at first; their sum stays.
        smallest: no layer's share falls below; a token's experts must fit.
        worths: what a saved miss of each layer is worth; only ratios matter. One each when omitted.
    """

    counts_uses = True

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy[ExpertKey]],
        shares: Sequence[int],
        *,
        smallest: int,
        worths: Sequence[float] | None = None,
    ) -> None:
        super().__init__(make_policy, shares)
        self._worths = [1.0] * len(shares) if worths is None else list(worths)
        self._smallest = smallest
        self._num_slots = sum(self._shares)
        self._ghosts: list[OrderedDict[ExpertKey, None]] = [OrderedDict() for _ in shares]
        self._saved = [0.0] * len(self._shares)
        self._num_uses = 0

    def touch(self, key: ExpertKey) -> None:
        """Notes a use of a held key."""
        super().touch(key)
        self._count_use()

    def insert(self, key: ExpertKey) -> None:
        """Starts to hold a key, which may be one that was evicted too early."""
        super().insert(key)
        if key in self._ghosts[key.layer]:
            del self._ghosts[key.layer][key]
            self._saved[key.layer] += 1
        self._count_use()

    def remove(self, key: ExpertKey) -> None:
        """Stops holding a key, and remembers for a while that it was held."""
        super().remove(key)
        ghosts = self._ghosts[key.layer]
        ghosts[key] = None
        # One more than counts: room is made before the newcomer, which may be a ghost, comes in.
        while len(ghosts) > 1 + _GHOST_SHARE * self._shares[key.layer]:
            ghosts.popitem(last=False)

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event; the slots of all layers together are the limit, as in a store."""
        return EvictionPolicy.access(self, keys, self._num_slots)

    def access_all(self, events: Sequence[Sequence[ExpertKey]], num_slots: int) -> list[int]:
        """Serves the events in their order: a slot may move from layer to layer in between."""
        return EvictionPolicy.access_all(self, events, num_slots)

    def restore(self, keys: Collection[ExpertKey]) -> None:
        """Holds just these keys, none of which was evicted."""
        super().restore(keys)
        for key in keys:
            self._ghosts[key.layer].pop(key, None)

    def check(self) -> None:
        """Proves that no held key is a ghost, and that shares only move."""
        super().check()
        assert sum(self._shares) == self._num_slots
        assert not any(key in self for ghosts in self._ghosts for key in ghosts)
        assert all(share >= 0 for share in self._shares)

    def _count_use(self) -> None:
        self._num_uses += 1
        if self._num_uses >= _USES_BETWEEN_MOVES * max(1, self._num_slots):
            self._num_uses = 0
            self._move_slot()

    def _move_slot(self) -> None:
        # Per remembered key, since a larger share remembers more of them.
        counts = [
            saved / max(1.0, _GHOST_SHARE * share)
            for saved, share in zip(self._saved, self._shares, strict=True)
        ]
        worth = [each * count for each, count in zip(self._worths, counts, strict=True)]
        givers = [n for n, share in enumerate(self._shares) if share > self._smallest]
        if givers:
            giver = min(givers, key=worth.__getitem__)
            taker = max(range(len(worth)), key=worth.__getitem__)
            chance = math.hypot(*(self._worths[n] * math.sqrt(counts[n]) for n in (taker, giver)))
            if worth[taker] - worth[giver] > 2 * chance:
                moved = [
                    share + (layer == taker) - (layer == giver)
                    for layer, share in enumerate(self._shares)
                ]
                # At once: an interrupt in between would lose the slot for ever.
                self._shares = moved
        self._saved = [saved / 2 for saved in self._saved]
