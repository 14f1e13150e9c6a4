"""Evicts the expert of lowest score; the scores come from what watched the routing."""

from collections.abc import Sequence
from typing import Protocol

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy
from moe_runtime.policies.prediction.base import Event
from moe_runtime.types import ExpertKey


class Scorer(Protocol):
    """A watcher of the routing that can say what each expert is worth now."""

    def observe(self, event: Event) -> None:
        """Takes note of a step or of a layer's routing."""
        ...

    def finish(self, sequence: int) -> None:
        """Ends a request."""
        ...

    def scores(self, layer: int) -> Sequence[float]:
        """``[E]`` what the layer's experts are worth; the lowest goes first."""
        ...


class Scored(EvictionPolicy[ExpertKey]):
    """Orders experts by a score that may change at any time; equals by their last use.

    Args:
        scorer: shared by the policies of all layers.
        may_decline: a newcomer of lower score than all that is held is not kept.
    """

    def __init__(self, scorer: Scorer, *, may_decline: bool = False) -> None:
        self.watcher = self._scorer = scorer
        self.may_decline = may_decline
        self._last_use: dict[ExpertKey, int] = {}
        self._clock = 0

    def touch(self, key: ExpertKey) -> None:
        """Renews the place of a held key among equals."""
        if key not in self._last_use:
            raise KeyError(key)
        self._stamp(key)

    def insert(self, key: ExpertKey) -> None:
        """Starts to hold a key."""
        if key in self._last_use:
            raise ValueError(f"{key} is held already")
        self._stamp(key)

    def remove(self, key: ExpertKey) -> None:
        """Stops holding a key."""
        del self._last_use[key]

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        """The evictable key of lowest score."""
        candidates = [key for key in self._last_use if evictable(key)]
        if not candidates:
            return None
        scores = {layer: self._scorer.scores(layer) for layer in {key.layer for key in candidates}}
        worth = {key: (scores[key.layer][key.expert], self._last_use[key]) for key in candidates}
        return min(candidates, key=worth.__getitem__)

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        """Whether the newcomer's score is lower."""
        own = self._scorer.scores(incoming.layer)[incoming.expert]
        return self.may_decline and own < self._scorer.scores(victim.layer)[victim.expert]

    def check(self) -> None:
        """Proves that last uses lie in the past."""
        assert all(stamp <= self._clock for stamp in self._last_use.values())

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, key: object) -> bool:
        return key in self._last_use

    def _stamp(self, key: ExpertKey) -> None:
        self._clock += 1
        self._last_use[key] = self._clock
