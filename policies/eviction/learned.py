"""Learns while it runs how soon an expert comes back, and keeps those that come back soonest.

Ours. Belady's optimum orders experts by their next use; this estimates it from what was used, how
often and how heavily, and from what followed similar moments. The estimate is a logistic regression
whose weights are fitted to the very uses that it tried to predict, some tokens later. Nothing is
trained beforehand, and no constant is fitted to a model.

Legend: L layers, E experts of a layer, K experts that a token visits, F features.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_runtime.policies.eviction.episodes import Episodes
from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.setting import Maker, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted, Shape, StepBegins
from moe_runtime.policies.prediction.estimator import State, take_array
from moe_runtime.policies.prediction.limits import REMEMBERED_TOKENS

_MEMORIES = np.array([0.8, 0.95, 0.99, 0.996, 0.9995], np.float32)
"""What is kept from step to step of each average of uses: from a handful of tokens to a day."""
_WEIGHT_MEMORY = 0.95
_FLOOR = 0.003
_HORIZON = 16
_DISCOUNT = 0.8
"""The target: uses in the next steps, each worth less than the one before."""
_PRIOR_STRENGTH = 30.0
_NUM_FEATURES = len(_MEMORIES) + 6
_RECENCY = len(_MEMORIES)
_KEPT = ("gram", "moment", "uses", "gates")


@dataclass(slots=True)
class _Example:
    """Features of some experts at one moment, to be judged by what comes."""

    step: int
    experts: np.ndarray
    features: np.ndarray


class ReuseEstimator:
    """Scores experts by their expected discounted uses, as log odds.

    Args:
        shape: the sizes of the model.
        memory: tokens that similar moments are looked for in.
        learn_every: every so many estimates one is learned from.
    """

    name = "reuse"

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        """Makes what orders experts by these scores."""
        return partial(Scored, cls(setting.shape), may_decline=True)

    def __init__(
        self, shape: Shape, *, memory: int = REMEMBERED_TOKENS, learn_every: int = 4
    ) -> None:
        self._shape = shape
        self._episodes = Episodes(shape, capacity=memory)
        self._learn_every = learn_every
        layers, experts = shape.num_layers, shape.num_experts
        self._uses = np.zeros((layers, len(_MEMORIES), experts), np.float32)
        self._gates = np.zeros((layers, experts), np.float32)
        self._now_gates = np.zeros((layers, experts), np.float32)
        self._last_use = np.full((layers, experts), -(10**4), np.int64)
        self._step = np.zeros(layers, np.int64)
        self._recent: list[deque[np.ndarray]] = [deque(maxlen=_HORIZON) for _ in range(layers)]
        self._examples: list[deque[_Example]] = [deque() for _ in range(layers)]
        self._scores: list[list[float] | None] = [None] * layers
        self._last_scores = [[0.0] * experts for _ in range(layers)]
        self._routed = -1
        self._num_estimates = self._num_learned = 0
        # Weighted least squares, starting from what LRU knows: the longer ago, the worse.
        self._weights = np.zeros(_NUM_FEATURES)
        self._weights[_RECENCY] = -1.0
        self._gram = _PRIOR_STRENGTH * np.eye(_NUM_FEATURES)
        self._moment = self._gram @ self._weights
        self._worth = (1 - _DISCOUNT) * _DISCOUNT ** np.arange(_HORIZON)

    def observe(self, event: Event) -> None:
        """Updates the averages of a layer and learns from estimates that can be judged now."""
        if isinstance(event, StepBegins):
            self._episodes.begin(event)
            return
        layer = event.layer
        self._episodes.route(event)
        self._routed = layer
        self._scores[layer] = None
        self._update(layer, event)
        self._learn(layer)

    def finish(self, sequence: int) -> None:
        """Ends a request."""
        self._episodes.finish(sequence)

    def learned(self) -> State:
        """The regression and the averages of uses; the remembered tokens are too many to keep.

        Returns:
            ``gram`` ``[F, F]`` and ``moment`` ``[F]`` float64, ``uses`` ``[L, memories, E]`` and
            ``gates`` ``[L, E]`` float32; nothing before the first estimate was judged.
        """
        if not self._num_learned:
            return {}
        arrays = (self._gram, self._moment, self._uses, self._gates)
        return dict(zip(_KEPT, arrays, strict=True))

    def restore(self, state: State) -> None:
        """Takes over the regression and the averages."""
        layers, experts = self._gates.shape
        axes = ((_NUM_FEATURES,) * 2, (_NUM_FEATURES,), self._uses.shape, (layers, experts))
        gram, moment, uses, gates = (
            take_array(state, name, dtype, sizes)
            for name, dtype, sizes in zip(_KEPT, ("<f8", "<f8", "<f4", "<f4"), axes, strict=True)
        )
        if min(uses.min(), gates.min()) < 0:
            raise ValueError("arrays 'uses' and 'gates' must hold averages, got negative numbers")
        np.linalg.cholesky(gram)  # refuses what cannot be the products of features
        self._weights = np.linalg.solve(gram, moment)
        self._gram, self._moment = gram.copy(), moment.copy()
        self._uses, self._gates = uses.copy(), gates.copy()

    def scores(self, layer: int) -> list[float]:
        """``[E]`` log odds of an early use; of a layer still to run, those of its last run."""
        known = self._scores[layer]
        if known is None and layer == self._routed:
            features = self._features(layer)
            known = self._scores[layer] = (features @ self._weights).tolist()
            self._last_scores[layer] = known
            self._num_estimates += 1
            if self._num_estimates % self._learn_every == 0:
                self._remember(layer, features)
        return known or self._last_scores[layer]

    def _update(self, layer: int, event: LayerRouted) -> None:
        num_experts = self._shape.num_experts
        ids, gates = event.expert_ids.ravel(), event.gate_weights.ravel()
        if len(event.expert_ids) > 1:
            gates = np.bincount(ids, weights=gates, minlength=num_experts + 1)
            ids = np.unique(ids)
            gates = gates[ids] / len(event.expert_ids)
        if ids.size and ids.max() >= num_experts:
            ids, gates = ids[ids < num_experts], gates[ids < num_experts]
        self._step[layer] += 1
        uses = self._uses[layer]
        uses *= _MEMORIES[:, None]
        uses[:, ids] += (1 - _MEMORIES)[:, None]
        self._gates[layer] *= _WEIGHT_MEMORY
        self._gates[layer, ids] += (1 - _WEIGHT_MEMORY) * gates
        self._now_gates[layer] = 0
        self._now_gates[layer, ids] = gates
        self._last_use[layer, ids] = self._step[layer]
        self._recent[layer].append(ids)

    def _features(self, layer: int) -> np.ndarray:
        """``[E, F]`` float32."""
        ages = self._step[layer] - self._last_use[layer]
        features = np.empty((self._shape.num_experts, _NUM_FEATURES), np.float32)
        features[:, :_RECENCY] = np.log(self._uses[layer] + _FLOOR).T
        features[:, _RECENCY] = np.log1p(ages)
        features[:, _RECENCY + 1] = ages == 0
        features[:, _RECENCY + 2] = self._gates[layer]
        features[:, _RECENCY + 3] = self._now_gates[layer]
        features[:, _RECENCY + 4] = np.log(self._episodes.recall(layer) + 0.01)
        features[:, _RECENCY + 5] = 1.0
        return features

    def _remember(self, layer: int, features: np.ndarray) -> None:
        """Keeps the more recently used half of the experts: the others are hardly ever held."""
        half = self._shape.num_experts // 2
        experts = np.argpartition(-self._last_use[layer], half)[: half + 1]
        self._examples[layer].append(
            _Example(int(self._step[layer]), experts, features[experts].astype(np.float64))
        )

    def _learn(self, layer: int) -> None:
        examples = self._examples[layer]
        if not examples or examples[0].step + _HORIZON > self._step[layer]:
            return
        example = examples.popleft()
        target = np.zeros(self._shape.num_experts)
        for worth, ids in zip(self._worth, self._recent[layer], strict=True):
            target[ids] += worth
        # One step of iteratively reweighted least squares at the present weights.
        features = example.features
        logits = features @ self._weights
        chance = 1 / (1 + np.exp(-logits))
        certainty = chance * (1 - chance) + 0.02
        wanted = logits + (target[example.experts] - chance) / certainty
        weighted = features * certainty[:, None]
        self._gram += weighted.T @ features
        self._moment += weighted.T @ wanted
        self._num_learned += 1
        if self._num_learned % 32 == 0:
            self._weights = np.linalg.solve(self._gram, self._moment)
