"""A predictor that looks at hidden states alone: no memory of sequences, little work per layer."""

from typing import Any

from moe_runtime.policies.prediction.base import (
    Event,
    Guess,
    LayerRouted,
    Predictor,
    StepBegins,
)
from moe_runtime.policies.prediction.estimator import Estimator
from moe_runtime.policies.prediction.next_gate import NextGate
from moe_runtime.policies.prediction.ranks import RankRecord
from moe_runtime.policies.prediction.tracked import TrackedPredictor
from moe_runtime.types import ExpertKey


class LookaheadPredictor:
    """A ``Predictor`` made of an estimator that reads hidden states.

    What the estimator says orders the experts of a layer; how probable the first, the second and so
    on are is counted while it runs, because the softmax of a later gate is no probability. Before
    the first layer there is no hidden state, and it is silent.

    Args:
        estimator: with its scorer set.
    """

    needs_history = False

    def __init__(self, estimator: NextGate) -> None:
        self.estimator = estimator
        shape = self.shape = estimator.shape
        self._records = [
            RankRecord(shape.num_layers, estimator.num_ranks, shape.top_k)
            for _ in range(estimator.max_distance)
        ]
        self._keys = [
            [ExpertKey(layer, expert) for expert in range(shape.num_experts)]
            for layer in range(shape.num_layers)
        ]
        self._hidden: Any = None
        self._is_prompt = True
        self._made: dict[tuple[int, int], list[list[int]]] = {}  # layer, distance: ranked experts

    def observe(self, event: Event) -> None:
        """Keeps the hidden states of a layer, and judges the guesses that were made for it."""
        if isinstance(event, StepBegins):
            self._is_prompt = len(set(event.sequences.tolist())) < len(event.sequences)
            self._hidden = None
            self._made.clear()
            return
        self._hidden = None if self._is_prompt else event.hidden
        if self._made:
            self._judge(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        """See ``Predictor.predict``; silent beyond the last layer."""
        hidden = self._hidden
        if hidden is None or now < 0:
            return []
        guesses: list[Guess] = []
        furthest = min(horizon, len(self._records), self.shape.num_layers - 1 - now)
        for distance in range(1, furthest + 1):
            layer = now + distance
            ranked = self.estimator.rank(hidden, distance, layer)
            if not ranked:
                break
            self._made[layer, distance] = ranked
            chances = self._records[distance - 1].probabilities(layer)
            guesses += self._guesses(layer, ranked, chances)
        return guesses

    def finish(self, sequence: int) -> None:
        """Nothing is remembered of a request."""

    def _judge(self, event: LayerRouted) -> None:
        visited: list[set[int]] | None = None
        for distance in range(1, len(self._records) + 1):
            ranked = self._made.pop((event.layer, distance), None)
            if ranked is None:
                continue
            visited = visited or [set(row) for row in event.expert_ids.tolist()]
            record = self._records[distance - 1]
            for experts, truth in zip(ranked, visited, strict=True):
                record.judge(event.layer, [expert in truth for expert in experts])

    def _guesses(self, layer: int, ranked: list[list[int]], chances: list[float]) -> list[Guess]:
        keys = self._keys[layer]
        if len(ranked) == 1:
            return [(keys[e], p) for e, p in zip(ranked[0], chances, strict=True)]
        missed: dict[int, float] = {}
        for experts in ranked:
            for expert, chance in zip(experts, chances, strict=True):
                missed[expert] = missed.get(expert, 1.0) * (1.0 - chance)
        likeliest = sorted(missed.items(), key=lambda item: (item[1], item[0]))
        return [(keys[expert], 1.0 - chance) for expert, chance in likeliest]


def make_predictor(estimator: Estimator) -> Predictor:
    """The predictor that puts an estimator to work."""
    if isinstance(estimator, NextGate):
        return LookaheadPredictor(estimator)
    return TrackedPredictor(estimator)
