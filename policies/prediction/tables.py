"""Tables of the experts that follow a visited expert, in the next token or in a later layer."""

from typing import ClassVar

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.estimator import (
    Contexts,
    Kept,
    Popularity,
    log_odds,
    pair_counts,
    sigmoid,
    visit_counts,
    visits,
)

PRIOR_VISITS = 8.0  # visits of an expert that weigh as much as popularity in its row of a table
MAX_DISTANCE = 8
"""Most layers between the known and the predicted one; popularity serves beyond."""
PRIOR_TOKENS = 8.0  # how many tokens of the sequence weigh as much as everything recorded before


class RunningCounts(Popularity):
    """Running counts: the share of the sequence's own tokens that visited an expert, starting at
    popularity.

    The request-level activation matrix of MoE-Infinity (arXiv 2401.14361) as it is.
    """

    name = "running-counts"

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        return smoothed_counts(contexts, self.share_LE, slice(layer, layer + 1))[:, 0]


class PreviousToken(Popularity):
    """The experts of the sequence's previous token in the same layer, then popularity.

    ExpertFlow (arXiv 2410.17954) calls this the token-level baseline (TLP).
    """

    name = "previous-token"
    kept: ClassVar = {**Popularity.kept, "reuse": Kept("reuse_L", is_chance=True)}  # [L]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.reuse_L = np.full(shape.num_layers, 0.5, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Measures how often the next token visits an expert again, by layer."""
        super().fit(routes)
        visited = visits(routes.expert_ids, self.shape.num_experts)
        rows = continuing_rows(routes)
        again_L = (visited[rows] * visited[rows - 1]).sum(axis=(0, 2))
        self.reuse_L = ((again_L + 0.5) / (visited[rows - 1].sum(axis=(0, 2)) + 1.0)).astype("<f4")

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The measured chance of reuse for visited experts; the rest of K for the others."""
        visited = visits(contexts.previous[:, layer], self.shape.num_experts)
        reuse, share = self.reuse_L[layer], self.share_LE[layer]
        left = np.float32(self.shape.top_k) - reuse * visited.sum(axis=1, keepdims=True)
        others = share * (1.0 - visited)
        scale = left / np.maximum(others.sum(axis=1, keepdims=True), 1e-6)
        return np.where(visited > 0, reuse, np.minimum(others * scale, 1.0)).astype(np.float32)


class TokenMarkov(Popularity):
    """``P(e visited | e' visited by the token before)`` in the same layer, averaged over e'."""

    name = "token-markov"
    kept: ClassVar = {**Popularity.kept, "table": Kept("table_LEE", is_chance=True)}
    # [L, E + 1, E]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table_LEE = _spread(self.share_LE, shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        rows = continuing_rows(routes)
        for layer, share_E in enumerate(self.share_LE):
            ids = routes.expert_ids[:, layer]
            self.table_LEE[layer, :-1] = _conditional(ids[rows - 1], ids[rows], share_E)
            self.table_LEE[layer, -1] = share_E

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        return self.table_LEE[layer][contexts.previous[:, layer]].mean(axis=1)


class LayerAffinity(Popularity):
    """``P(e in this layer | e' in an earlier layer of the same token)``, averaged over e'.

    The transition matrix of ExFlow (arXiv 2401.08383), made there for placing experts, used as a
    predictor for up to ``MAX_DISTANCE`` layers ahead.
    """

    name = "layer-affinity"
    kept: ClassVar = {**Popularity.kept, "table": Kept("table_DLEE", is_chance=True)}
    # [distances, L, E + 1, E]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = (distances_of(shape), shape.num_layers, shape.num_experts + 1, shape.num_experts)
        self.table_DLEE = np.broadcast_to(self.share_LE[None, :, None], sizes).copy()

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        ids = routes.expert_ids
        self.table_DLEE[:] = self.share_LE[None, :, None]
        for distance, layer in _layer_pairs(self.shape):
            source = ids[:, layer - distance]
            self.table_DLEE[distance - 1, layer, :-1] = _conditional(
                source, ids[:, layer], self.share_LE[layer]
            )

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Mean of the rows of layer ``now``'s experts; popularity without such a layer."""
        if now < 0 or layer - now > len(self.table_DLEE):
            return super().estimate(contexts, now, layer)
        table_EE = self.table_DLEE[layer - now - 1, layer]
        return table_EE[contexts.path[:, now]].mean(axis=1)


class NaiveBayes(Popularity):
    """Every expert of layers ``now`` and ``now - 1`` as independent evidence for each expert.

    The log-odds of an expert are those of its popularity plus, for each visited earlier expert,
    ``log P(e' | e visited) - log P(e' | e not visited)``, scaled to fit the training sequences.
    """

    name = "naive-bayes"
    kept: ClassVar = {
        **Popularity.kept,
        "evidence": Kept("evidence_DLEE"),
    }  # [distances, L, E + 1, E]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = (distances_of(shape) + 1, shape.num_layers, shape.num_experts + 1)
        self.evidence_DLEE = np.zeros((*sizes, shape.num_experts), dtype=np.float32)

    def fit(self, routes: Routes) -> None:
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


def smoothed_counts(contexts: Contexts, share_LE: np.ndarray, layers: slice) -> np.ndarray:
    """Share of each sequence's tokens that visited an expert: ``[B, layers, E]``."""
    total = contexts.num_tokens[:, None, None].astype(np.float32) + np.float32(PRIOR_TOKENS)
    return (contexts.counts[:, layers] + PRIOR_TOKENS * share_LE[layers]) / total


def continuing_rows(routes: Routes) -> np.ndarray:
    """Tokens that are not the first of their sequence."""
    continues = np.ones(routes.num_tokens, dtype=bool)
    continues[routes.offsets[:-1][np.diff(routes.offsets) > 0]] = False
    return np.flatnonzero(continues)


def distances_of(shape: Shape) -> int:
    """Layers ahead that the tables of a model cover."""
    return max(1, min(MAX_DISTANCE, shape.num_layers - 1))


def sum_to(chance_BE: np.ndarray, total: float) -> np.ndarray:
    """Scales the rows of probabilities to a sum, with entries of at most 1."""
    scale = total / np.maximum(chance_BE.sum(axis=1, keepdims=True), 1e-6)
    return np.minimum(chance_BE * scale, 1.0)


def _layer_pairs(shape: Shape, beyond: int = 0) -> list[tuple[int, int]]:
    distances = range(1, distances_of(shape) + beyond + 1)
    return [(d, layer) for d in distances for layer in range(d, shape.num_layers)]


def _conditional(source_TK: np.ndarray, target_TK: np.ndarray, share_E: np.ndarray) -> np.ndarray:
    """``P(target | source)`` as ``[E, E]``, smoothed towards the target's popularity.

    Of a token that chose an expert twice, pairs are counted more often than sources.
    """
    num_experts = len(share_E)
    pairs_EE = pair_counts(source_TK, target_TK, num_experts)
    source_E1 = visit_counts(source_TK, num_experts)[:, None]
    return np.minimum((pairs_EE + PRIOR_VISITS * share_E) / (source_E1 + PRIOR_VISITS), 1.0)


def _spread(share_LE: np.ndarray, shape: Shape) -> np.ndarray:
    sizes = (shape.num_layers, shape.num_experts + 1, shape.num_experts)
    return np.broadcast_to(share_LE[:, None], sizes).copy()
