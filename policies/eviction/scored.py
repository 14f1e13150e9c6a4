"""Evicts the expert of lowest score; the scores come from what watched the routing."""

import heapq
from collections.abc import Sequence
from typing import Protocol

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, ReplayRule
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


class Scored(EvictionPolicy[ExpertKey], has_rule=True):
    """Orders experts by a score that may change at any time; equals by their last use.

    Args:
        scorer: shared by the policies of all layers.
        may_decline: a newcomer of lower score than all that is held is not kept.
        rule: says how the scores come about, where a replay has a quicker way to them.
    """

    def __init__(
        self, scorer: Scorer, *, may_decline: bool = False, rule: ReplayRule | None = None
    ) -> None:
        self.watcher = self._scorer = scorer
        self.rule = rule
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
        return next(iter(self._lowest(1, evictable)), None)

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

    def _make_room(
        self, keys: Sequence[ExpertKey], missing: Sequence[ExpertKey], num_slots: int
    ) -> None:
        """Ranks what is held once for all that must go: the scores do not change in between."""
        excess = len(self) + len(missing) - num_slots
        if excess > 0:
            in_use = frozenset(keys)
            for key in self._lowest(excess, lambda held: held not in in_use):
                self.remove(key)

    def _lowest(self, number: int, evictable: Evictable) -> list[ExpertKey]:
        scores: dict[int, Sequence[float]] = {}
        ranked = []
        for key, last_use in self._last_use.items():
            if evictable(key):
                layer, expert = key
                if layer not in scores:
                    scores[layer] = self._scorer.scores(layer)
                ranked.append((scores[layer][expert], last_use, key))
        return [key for _, _, key in heapq.nsmallest(number, ranked)]

    def _stamp(self, key: ExpertKey) -> None:
        self._clock += 1
        self._last_use[key] = self._clock
