"""Tables of what follows a visited expert: in the next token, or in a later layer."""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import (
    State,
    log_odds,
    pair_counts,
    sigmoid,
    take_array,
    visit_counts,
)
from moe_runtime.policies.prediction.popularity import Popularity

PRIOR_VISITS = 8.0
"""Visits of an expert that weigh as much as popularity in its row of a table."""
MAX_DISTANCE = 8
"""Layers between the known and the predicted one, at most; popularity serves beyond."""


class TokenMarkov(Popularity):
    """``P(e visited | e' visited by the token before)`` in the same layer, averaged over e'."""

    name = "token-markov"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table_LEE = _spread(self.share_LE, shape)

    def fit(self, routes: Routes) -> None:
        """Counts pairs of consecutive tokens within sequences."""
        super().fit(routes)
        rows = continuing_rows(routes)
        for layer, share_E in enumerate(self.share_LE):
            ids = routes.expert_ids[:, layer]
            self.table_LEE[layer, :-1] = _conditional(ids[rows - 1], ids[rows], share_E)
            self.table_LEE[layer, -1] = share_E

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Mean of the rows of the previous token's experts."""
        return self.table_LEE[layer][contexts.previous[:, layer]].mean(axis=1)

    def state(self) -> State:
        """``share`` of popularity and ``table``: ``[L, E + 1, E]``."""
        return {**super().state(), "table": self.table_LEE}

    def restore(self, state: State) -> None:
        """Takes over both."""
        super().restore(state)
        self.table_LEE = take_array(state, "table", "<f4", self.table_LEE.shape)


class LayerAffinity(Popularity):
    """``P(e in this layer | e' in an earlier layer of the same token)``, averaged over e'.

    The transition matrix of ExFlow (arXiv 2401.08383), made there for placing experts, used as a
    predictor for up to ``MAX_DISTANCE`` layers ahead. A fraction of its layers' worth of tables is
    read at a time: from layer ``now`` directly to the predicted one.
    """

    name = "layer-affinity"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = (distances_of(shape), shape.num_layers, shape.num_experts + 1, shape.num_experts)
        self.table_DLEE = np.broadcast_to(self.share_LE[None, :, None], sizes).copy()

    def fit(self, routes: Routes) -> None:
        """Counts pairs of layers for all distances."""
        super().fit(routes)
        ids = routes.expert_ids
        self.table_DLEE[:] = self.share_LE[None, :, None]
        for distance, layer in _layer_pairs(self.shape):
            source = ids[:, layer - distance]
            self.table_DLEE[distance - 1, layer, :-1] = _conditional(
                source, ids[:, layer], self.share_LE[layer]
            )

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Mean of the rows of layer ``now``'s experts; popularity where there is no such layer."""
        if now < 0 or layer - now > len(self.table_DLEE):
            return super().estimate(contexts, now, layer)
        table_EE = self.table_DLEE[layer - now - 1, layer]
        return table_EE[contexts.path[:, now]].mean(axis=1)

    def state(self) -> State:
        """``share`` of popularity and ``table``: ``[distances, L, E + 1, E]``."""
        return {**super().state(), "table": self.table_DLEE}

    def restore(self, state: State) -> None:
        """Takes over both."""
        super().restore(state)
        self.table_DLEE = take_array(state, "table", "<f4", self.table_DLEE.shape)


class NaiveBayes(Popularity):
    """Every expert of layers ``now`` and ``now - 1`` as independent evidence for each expert.

    The log-odds of an expert are those of its popularity plus, for each visited earlier expert,
    ``log P(e' | e visited) - log P(e' | e not visited)``. Evidence is not independent, so the sum
    is scaled to fit the training sequences: one factor for each distance.
    """

    name = "naive-bayes"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = (distances_of(shape) + 1, shape.num_layers, shape.num_experts + 1)
        self.evidence_DLEE = np.zeros((*sizes, shape.num_experts), dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Counts pairs of layers for all distances."""
        super().fit(routes)
        ids, num_experts = routes.expert_ids, self.shape.num_experts
        self.evidence_DLEE[:] = 0
        for distance, layer in _layer_pairs(self.shape, beyond=1):
            source, target = ids[:, layer - distance], ids[:, layer]
            with_EE = pair_counts(source, target, num_experts)
            source_E, target_E = (visit_counts(i, num_experts) for i in (source, target))
            prior_EE = PRIOR_VISITS * (source_E / max(len(ids), 1))[:, None]
            given_EE = (with_EE + prior_EE) / (target_E + PRIOR_VISITS)
            without_EE = (source_E[:, None] - with_EE + prior_EE) / (
                len(ids) - target_E + PRIOR_VISITS
            )
            ratio_EE = np.log(np.maximum(given_EE, 1e-6) / np.maximum(without_EE, 1e-6))
            self.evidence_DLEE[distance - 1, layer, :-1] = ratio_EE

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Posterior of every expert, scaled so that a row sums to K."""
        distance = layer - now
        if now < 0 or distance >= len(self.evidence_DLEE):
            return super().estimate(contexts, now, layer)
        evidence = self.evidence_DLEE[distance - 1, layer][contexts.path[:, now]].sum(axis=1)
        sources = 1
        if now > 0:
            earlier = self.evidence_DLEE[distance, layer][contexts.path[:, now - 1]]
            evidence = evidence + earlier.sum(axis=1)
            sources = 2
        logits = log_odds(self.share_LE[layer]) + evidence / sources
        return sum_to(sigmoid(logits), self.shape.top_k)

    def state(self) -> State:
        """``share`` of popularity and ``evidence``: ``[distances, L, E + 1, E]``."""
        return {**super().state(), "evidence": self.evidence_DLEE}

    def restore(self, state: State) -> None:
        """Takes over both."""
        super().restore(state)
        self.evidence_DLEE = take_array(state, "evidence", "<f4", self.evidence_DLEE.shape)


def continuing_rows(routes: Routes) -> np.ndarray:
    """Tokens that have one before them in their sequence."""
    continues = np.ones(routes.num_tokens, dtype=bool)
    continues[routes.offsets[:-1][np.diff(routes.offsets) > 0]] = False
    return np.flatnonzero(continues)


def distances_of(shape: Shape) -> int:
    """How many layers ahead tables reach in a model."""
    return max(1, min(MAX_DISTANCE, shape.num_layers - 1))


def sum_to(chance_BE: np.ndarray, total: float) -> np.ndarray:
    """Scales the rows of probabilities to a sum, as far as no entry exceeds 1."""
    scale = total / np.maximum(chance_BE.sum(axis=1, keepdims=True), 1e-6)
    return np.minimum(chance_BE * scale, 1.0)


def _layer_pairs(shape: Shape, beyond: int = 0) -> list[tuple[int, int]]:
    distances = range(1, distances_of(shape) + beyond + 1)
    return [(d, layer) for d in distances for layer in range(d, shape.num_layers)]


def _conditional(source_TK: np.ndarray, target_TK: np.ndarray, share_E: np.ndarray) -> np.ndarray:
    """``P(target | source)`` as ``[E, E]``, smoothed towards the target's popularity."""
    num_experts = len(share_E)
    pairs_EE = pair_counts(source_TK, target_TK, num_experts)
    source_E1 = visit_counts(source_TK, num_experts)[:, None]
    return (pairs_EE + PRIOR_VISITS * share_E) / (source_E1 + PRIOR_VISITS)


def _spread(share_LE: np.ndarray, shape: Shape) -> np.ndarray:
    sizes = (shape.num_layers, shape.num_experts + 1, shape.num_experts)
    return np.broadcast_to(share_LE[:, None], sizes).copy()
