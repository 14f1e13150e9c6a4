"""Eviction rules that watch the routing: what they learned of it says which expert goes first.

Legend in ``prediction.base``; M remembered tokens, F features.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, Maker, ReplayRule, Setting, Watcher
from moe_runtime.policies.eviction.classic import LRU, Stamped
from moe_runtime.policies.prediction.base import (
    COLLECTED_MATRICES,
    REMEMBERED_TOKENS,
    Event,
    LayerRouted,
    Shape,
    StepBegins,
)
from moe_runtime.policies.prediction.estimator import State, take_array
from moe_runtime.policies.prediction.matched import MatrixCollection
from moe_runtime.policies.prediction.tracked import TrackedPredictor
from moe_runtime.types import ExpertKey

_NEVER_SEEN = 1e-3  # probability given to every expert, so that the unseen keep an order
_LEAST_PROBABILITY = 1e-3
_MEMORIES = np.array([0.8, 0.95, 0.99, 0.996, 0.9995], np.float32)
"""What is kept from step to step of each average of uses: from a handful of tokens to a day."""
_WEIGHT_MEMORY = 0.95
_FLOOR = 0.003
_HORIZON = 16
_DISCOUNT = 0.8  # the target: uses in the next steps, each worth less than the one before
_PRIOR_STRENGTH = 30.0
_NUM_FEATURES = len(_MEMORIES) + 6
_RECENCY = len(_MEMORIES)
_KEPT = ("gram", "moment", "uses", "gates")
_SHARPNESS = 20.0  # exponent of the similarity: full agreement weighs e^20 times as much as none
_NUM_FOLLOWERS = 8
_FOLLOWER_DISCOUNT = 0.7
"""Of each further token that followed; after eight of them 6 % of the weight is left out."""
_LONGEST_STEP = 32
"""Tokens of a request that are remembered of one step: a prompt must not fill the memory."""


class ActiveExperts:
    """Which experts the last routed layer uses."""

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
    """Last in, first out, after the experts that the present batch does not use.

    Huang et al., "Towards MoE Deployment" (arXiv 2303.06182). Where a layer runs its experts in the
    order of their numbers, the one loaded last is the one needed last again.
    """

    rule = ReplayRule("expert-buffering")

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
        """The last evictable key in that is not active, or else the last one in."""
        candidates = [key for key in reversed(self._held) if evictable(key)]
        idle = (key for key in candidates if key not in self._active)
        return next(idle, candidates[0] if candidates else None)


class Scorer(Watcher, Protocol):
    """A watcher of the routing that can say what each expert is worth now."""

    def scores(self, layer: int) -> Sequence[float]:
        """``[E]`` what the layer's experts are worth; the lowest goes first."""
        ...


class Scored(Stamped[ExpertKey]):
    """Evicts the expert of lowest score, by a scorer that the policies of all layers share.

    Args:
        may_decline: a newcomer of lower score than all that is held is not kept.
        rule: says how the scores come about, where a replay has a quicker way to them.
    """

    rule: ReplayRule | None = None

    def __init__(
        self, scorer: Scorer, *, may_decline: bool = False, rule: ReplayRule | None = None
    ) -> None:
        super().__init__()
        self.watcher = self._scorer = scorer
        self.rule = rule
        self.may_decline = may_decline

    def worths(self, keys: Sequence[ExpertKey]) -> list[float]:
        scores = {layer: self._scorer.scores(layer) for layer in {layer for layer, _ in keys}}
        return [scores[layer][expert] for layer, expert in keys]

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        if not self.may_decline:
            return False
        own, held = self.worths([incoming, victim])
        return own < held


class RecentScores:
    """``S = alpha * top(s) + (1 - alpha) * S`` for every layer and expert.

    Minus-recent-score, the cache of HybriMoE (arXiv 2504.05897): a moving average of the router's
    highest scores. Routing has those of the chosen experts; of several tokens their mean counts.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        scores = cls(setting.shape)
        return partial(Scored, scores, rule=scores.rule)

    def __init__(self, shape: Shape, *, alpha: float = 0.5) -> None:
        # a subclass may score otherwise
        self.rule = ReplayRule("mrs", parameter=alpha) if type(self) is RecentScores else None
        self._alpha = alpha
        self._scores = np.zeros((shape.num_layers, shape.num_experts + 1))

    def observe(self, event: Event) -> None:
        if isinstance(event, LayerRouted):
            scores = self._scores[event.layer]
            scores *= 1 - self._alpha
            ids, gates = event.expert_ids.ravel(), event.gate_weights.ravel()
            sums = np.bincount(ids, weights=gates, minlength=len(scores))
            scores += self._alpha * (sums / len(event.expert_ids))

    def finish(self, sequence: int) -> None:
        pass

    def scores(self, layer: int) -> list[float]:
        return self._scores[layer, :-1].tolist()


class PredictedUse:
    """Belady's rule on predictions: scores experts by minus the layers until their next use.

    An expert visited with probability p in each of its layer's turns is next used ``1 / p`` turns
    ahead on average. A layer is asked about only when one of its experts must go.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        if setting.predictor is None:
            raise ValueError("policy 'predicted' needs a predictor; name one")
        return partial(Scored, cls(setting.shape, setting.predictor), may_decline=True)

    def __init__(self, shape: Shape, predictor: TrackedPredictor) -> None:
        self._shape = shape
        self._predictor = predictor
        self._routed = -1
        self._scores: dict[int, list[float]] = {}

    def observe(self, event: Event) -> None:
        """Passes the event on; guesses made before it are out of date."""
        self._predictor.observe(event)
        self._routed = event.layer if isinstance(event, LayerRouted) else -1
        self._scores.clear()

    def finish(self, sequence: int) -> None:
        self._predictor.finish(sequence)

    @property
    def name(self) -> str:
        return self._predictor.name

    def learned(self) -> State:
        return self._predictor.learned()

    def restore(self, state: State) -> None:
        self._predictor.restore(state)

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
    """Scores experts by the activation matrix of the running requests and their nearest twins.

    MoE-Infinity (arXiv 2401.14361), after the paper: an activation matrix counts the tokens that a
    request sent to each expert; the finished matrix most like the running one predicts the rest.

    Args:
        capacity: finished matrices that are kept.
        own_share: weight of the running request's own counts next to those of its twin. The paper
            uses the twin alone, which loses where a request's own past says more.
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
        """``matrices`` of requests that ended: ``[number, L, E]``, or nothing if there is none."""
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


@dataclass(slots=True)
class _Example:
    """Features of some experts at one moment, to be judged by what comes."""

    step: int
    experts: np.ndarray
    features: np.ndarray


class ReuseEstimator:
    """Scores experts by their expected discounted uses, as log odds: what comes back soonest stays.

    Ours. It estimates Belady's order from what was used, how often and how heavily, and from what
    followed similar moments: a logistic regression, fitted while it runs to the uses that it tried
    to predict. ``memory`` tokens are searched for similar moments; one of ``learn_every`` estimates
    is learned from.
    """

    name = "reuse"

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
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


@dataclass(slots=True)
class _Request:
    """One running request: its last remembered tokens, the youngest last."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_FOLLOWERS + 1))
    token_id: int = -1
    overlap: np.ndarray | None = None  # [M] of its last token with all remembered ones


class Episodes:
    """A ring of the latest tokens of all requests, with their paths and what followed.

    Two moments are alike when their tokens, the tokens before, and the experts visited so far
    agree. What followed alike moments, weighted by likeness, predicts what follows now.
    """

    def __init__(self, shape: Shape, *, capacity: int = REMEMBERED_TOKENS) -> None:
        self._shape = shape
        self._capacity = capacity
        self._visited = np.zeros((shape.num_layers, shape.num_experts + 1, capacity), np.uint8)
        self._followed = np.zeros((shape.num_layers, capacity, shape.num_experts + 1), np.float32)
        self._token_id = np.full(capacity, -1, np.int64)
        self._token_before = np.full(capacity, -1, np.int64)
        self._row_before = np.zeros(capacity, np.int64)
        # Added to the likeness: only tokens whose followers are all known may be recalled.
        self._closed = np.full(capacity, -np.inf, np.float32)
        self._requests: dict[int, _Request] = {}
        self._next_row = 0
        self._weights = (1 - _FOLLOWER_DISCOUNT) * _FOLLOWER_DISCOUNT ** np.arange(
            _NUM_FOLLOWERS, dtype=np.float32
        )
        self._step: list[tuple[int, int, list[int], bool]] = []  # token, row, rows it follows, last
        self._queries: list[np.ndarray] = []
        self._before: list[np.ndarray] = []
        self._num_compared = 0

    def begin(self, event: StepBegins) -> None:
        """Opens a row for every token of the step that will be remembered."""
        self._step, self._queries, self._before = [], [], []
        self._num_compared = 0
        sequences = event.sequences
        for sequence in dict.fromkeys(sequences.tolist()):
            tokens = np.flatnonzero(sequences == sequence)[-_LONGEST_STEP:].tolist()
            request = self._requests.setdefault(sequence, _Request())
            for token in tokens:
                self._open_row(request, token, int(event.token_ids[token]), token == tokens[-1])

    def route(self, event: LayerRouted) -> None:
        """Notes where a layer sent the tokens, and compares their paths with all others."""
        layer, query = event.layer, 0
        visited, followed = self._visited[layer], self._followed[layer]
        self._num_compared += 1
        for token, row, followed_rows, is_last in self._step:
            experts = event.expert_ids[token]
            if is_last:
                self._queries[query] += visited[experts].sum(axis=0, dtype=np.uint8)
                query += 1
            visited[experts, row] = 1
            if followed_rows:
                weights = self._weights[: len(followed_rows), None]
                followed[np.array(followed_rows)[:, None], experts] += weights

    def recall(self, layer: int) -> np.ndarray:
        """What followed moments like the present one.

        Returns:
            ``[E]`` float32: for each expert the expected discounted uses by the next tokens, summed
            over the running requests; a request that visits an expert at every token adds 1.
        """
        total = np.zeros(self._shape.num_experts + 1, np.float32)
        num_agreements = self._num_compared * self._shape.top_k + 6
        full_path = self._shape.num_layers * self._shape.top_k
        for path, before in zip(self._queries, self._before, strict=True):
            likeness = path * np.float32(_SHARPNESS / num_agreements)
            likeness += before * np.float32(_SHARPNESS * 0.5 / full_path)
            likeness += self._closed
            highest = likeness.max()
            if np.isfinite(highest):
                weights = np.exp(likeness - highest)
                total += (weights @ self._followed[layer]) / weights.sum()
        return total[:-1]

    def finish(self, sequence: int) -> None:
        self._requests.pop(sequence, None)

    def _open_row(self, request: _Request, token: int, token_id: int, is_last: bool) -> None:
        row = self._next_row
        self._next_row = (row + 1) % self._capacity
        self._visited[:, :, row] = 0
        self._followed[:, row] = 0
        self._closed[row] = -np.inf
        rows_before = [r for r in reversed(request.rows) if r != row][:_NUM_FOLLOWERS]
        if len(rows_before) == _NUM_FOLLOWERS:
            # The step that begins completes what followed the oldest of them; its last layers are
            # still to come, where it counts for slightly less.
            self._closed[request.rows[0]] = 0.0
        if is_last:
            agreement = 4.0 * (self._token_id == token_id) * (token_id >= 0)
            agreement += 2.0 * (self._token_before == request.token_id) * (request.token_id >= 0)
            self._queries.append(agreement.astype(np.float32))
            before = request.overlap
            self._before.append(
                np.zeros(self._capacity, np.float32) if before is None else before[self._row_before]
            )
            request.overlap = self._queries[-1]
        self._token_id[row] = token_id
        self._token_before[row] = request.token_id
        self._row_before[row] = request.rows[-1] if request.rows else row
        request.rows.append(row)
        request.token_id = token_id
        self._step.append((token, row, rows_before, is_last))
