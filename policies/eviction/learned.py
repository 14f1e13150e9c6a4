"""Eviction rules that watch the routing and learn from it.

Legend in ``prediction.base``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Self

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, Maker, Setting, Watcher
from moe_runtime.policies.eviction.classic import LRU, Stamped
from moe_runtime.policies.prediction.base import COLLECTED_MATRICES, Event, LayerRouted, Shape
from moe_runtime.policies.prediction.estimator import State
from moe_runtime.policies.prediction.matched import MatrixCollection
from moe_runtime.policies.prediction.tracked import TrackedPredictor
from moe_runtime.types import ExpertKey

_NEVER_SEEN = 1e-3  # added to every expert's score
_LEAST_PROBABILITY = 1e-3


class ActiveExperts:
    """The experts that the last routed layer uses."""

    def __init__(self) -> None:
        self._active: set[ExpertKey] = set()

    def observe(self, event: Event) -> None:
        if isinstance(event, LayerRouted):
            experts = set(event.expert_ids.ravel().tolist())
            self._active = {ExpertKey(event.layer, expert) for expert in experts}

    def finish(self, sequence: int) -> None:
        pass

    def __contains__(self, key: object) -> bool:
        return key in self._active


class ExpertBuffering(LRU[ExpertKey]):
    """Evicts experts that the present batch does not use, then the last one in.

    Huang et al., "Towards MoE Deployment" (arXiv 2303.06182). A layer that runs its experts in the
    order of their numbers needs the one loaded last again last.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        return partial(cls, ActiveExperts())

    def __init__(self, active: ActiveExperts) -> None:
        super().__init__()
        self.watcher = self._active = active

    def touch(self, key: ExpertKey) -> None:
        if key not in self._held:
            raise KeyError(key)

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        candidates = [key for key in reversed(self._held) if evictable(key)]
        idle = (key for key in candidates if key not in self._active)
        return next(idle, candidates[0] if candidates else None)


class Scorer(Watcher, Protocol):
    """A watcher of the routing that scores experts."""

    def scores(self, layer: int) -> Sequence[float]: ...  # ``[E]``, the lowest is evicted first


class Scored(Stamped[ExpertKey]):
    """Evicts the expert of lowest score; the policies of all layers share a scorer.

    With ``may_decline``, a newcomer of lower score than all held experts is not kept.
    """

    def __init__(self, scorer: Scorer, *, may_decline: bool = False) -> None:
        super().__init__()
        self.watcher = self.scorer = scorer
        self.may_decline = may_decline

    def worths(self, keys: Sequence[ExpertKey]) -> list[float]:
        scores = {layer: self.scorer.scores(layer) for layer in {layer for layer, _ in keys}}
        return [scores[layer][expert] for layer, expert in keys]

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        if not self.may_decline:
            return False
        own, held = self.worths([incoming, victim])
        return own < held


class RecentScores:
    """``S = alpha * top(s) + (1 - alpha) * S`` for every layer and expert.

    Minus-recent-score, the cache of HybriMoE (arXiv 2504.05897): a moving average of the router's
    highest scores: here those of the chosen experts, averaged over the tokens of a step.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        return partial(Scored, cls(setting.shape))

    def __init__(self, shape: Shape, *, alpha: float = 0.5) -> None:
        self.alpha = alpha
        self._scores = np.zeros((shape.num_layers, shape.num_experts + 1))

    def observe(self, event: Event) -> None:
        if isinstance(event, LayerRouted):
            scores = self._scores[event.layer]
            scores *= 1 - self.alpha
            ids, gates = event.expert_ids.ravel(), event.gate_weights.ravel()
            sums = np.bincount(ids, weights=gates, minlength=len(scores))
            scores += self.alpha * (sums / len(event.expert_ids))

    def finish(self, sequence: int) -> None:
        pass

    def scores(self, layer: int) -> list[float]:
        return self._scores[layer, :-1].tolist()


class PredictedUse:
    """Belady's rule on predictions: scores experts by minus the layers until their next use.

    An expert that each turn of its layer visits with probability p is next used ``1 / p`` turns
    ahead on average.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        if setting.predictor is None:
            raise ValueError("policy 'predicted' needs a predictor")
        return partial(Scored, cls(setting.shape, setting.predictor), may_decline=True)

    def __init__(self, shape: Shape, predictor: TrackedPredictor) -> None:
        self._shape = shape
        self._predictor = predictor
        self._routed = -1
        self._scores: dict[int, list[float]] = {}

    def observe(self, event: Event) -> None:
        self._predictor.observe(event)
        self._routed = event.layer if isinstance(event, LayerRouted) else -1
        self._scores.clear()

    def finish(self, sequence: int) -> None:
        self._predictor.finish(sequence)

    def scores(self, layer: int) -> list[float]:
        """``[E]`` minus the expected number of layers until the next use."""
        if layer not in self._scores:
            num_layers = self._shape.num_layers
            ahead = (layer - self._routed - 1) % num_layers + 1
            chance = self._predictor.chances(self._routed, layer)
            turns = 1.0 / np.maximum(chance, _LEAST_PROBABILITY) - 1.0
            self._scores[layer] = (-(ahead + num_layers * turns)).tolist()
        return self._scores[layer]


class ActivationMatrices:
    """Scores experts by the activation matrices of running requests and of similar finished ones.

    MoE-Infinity (arXiv 2401.14361): an activation matrix counts the tokens that a request sent to
    each expert. The finished matrix most similar to the running one predicts the rest.

    Args:
        capacity: finished matrices that are kept.
        own_share: weight of the running request's own counts. The paper has 0, which is worse where
            a request's own past says more.
    """

    name = "activation-aware"

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        matrices = cls(setting.shape)
        if setting.training is not None:
            matrices.collection.fit(setting.training)
        return partial(Scored, matrices)

    def __init__(
        self, shape: Shape, *, capacity: int = COLLECTED_MATRICES, own_share: float = 0.5
    ) -> None:
        layers, experts = shape.num_layers, shape.num_experts
        self._own_share = own_share
        self.collection = MatrixCollection(shape, capacity=capacity)
        self._sizes = (layers, experts)
        self._running: dict[int, np.ndarray] = {}
        self._sequences = np.zeros(0, np.int64)
        self._predicted = np.zeros((layers, experts))
        self._scores: dict[int, list[float]] = {}

    def observe(self, event: Event) -> None:
        """Counts a layer's tokens for their requests; matches at the beginning of a step."""
        if isinstance(event, LayerRouted):
            for sequence, experts in zip(self._sequences, event.expert_ids, strict=True):
                np.add.at(self._running[int(sequence)][event.layer], experts, 1)
            self._scores.pop(event.layer, None)
            return
        self._scores.clear()
        self._sequences = event.sequences
        num_layers, num_experts = self._sizes
        requests = dict.fromkeys(event.sequences.tolist())
        for request in requests:
            if request not in self._running:
                self._running[request] = np.zeros((num_layers, num_experts + 1), np.float32)
        predictions = (self._predict(self._running[request][:, :-1]) for request in requests)
        self._predicted = sum(predictions, np.zeros(self._sizes))

    def finish(self, sequence: int) -> None:
        matrix = self._running.pop(sequence, None)
        self._scores.clear()
        if matrix is not None:
            self.collection.add(matrix[:, :-1])

    def learned(self) -> State:
        """``matrices`` of finished requests, ``[number, L, E]``; empty if there is none."""
        return {"matrices": self.collection.matrices} if len(self.collection) else {}

    def restore(self, state: State) -> None:
        self.collection.restore(state)

    def scores(self, layer: int) -> list[float]:
        if layer not in self._scores:
            self._scores[layer] = self._mix(layer)
        return self._scores[layer]

    def _mix(self, layer: int) -> list[float]:
        own = sum(
            (_by_layer(matrix[layer : layer + 1, :-1])[0] for matrix in self._running.values()),
            np.zeros(self._sizes[1]),
        )
        share = self._own_share if len(self.collection) else 1.0
        mixed = share * own + (1 - share) * self._predicted[layer]
        return (mixed + _NEVER_SEEN).tolist()

    def _predict(self, counts_LE: np.ndarray) -> np.ndarray:
        if not len(self.collection) or not counts_LE.any():
            return np.zeros(self._sizes)
        likeness = self.collection.likeness(counts_LE)
        return _by_layer(self.collection.matrices[int(np.argmax(likeness))])


def _by_layer(matrix: np.ndarray) -> np.ndarray:
    """Every row divided by its sum; rows without counts stay zero."""
    return matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1.0)
