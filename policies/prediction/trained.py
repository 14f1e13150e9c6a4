"""All that routing and token ids tell, with learned weights."""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import (
    State,
    log_odds,
    sigmoid,
    take_array,
    visits,
)
from moe_runtime.policies.prediction.logistic import fit_logistic
from moe_runtime.policies.prediction.token_evidence import (
    NUM_FEATURES,
    Samples,
    TokenEvidence,
)

DISTANCES = (1, 2, 4)
"""Look-ahead distances with weights of their own; others use those of the next larger one."""
SOURCES = 3
"""How many layers are looked at, from the last known one back."""
PATH_FREE, BLIND = len(DISTANCES), len(DISTANCES) + 1
"""Variants for tokens of which no layer is known, and of which not even the id is known."""
NUM_VARIANTS = len(DISTANCES) + 2


class Combination(TokenEvidence):
    """Logistic regression for every layer and distance over what the other predictors know.

    The logit of an expert is a weighted sum of: its log-odds in the sequence so far, in tokens with
    this id, and in tokens that follow the previous id; whether the previous token and the last
    token with this id visited it; its running means over few and many tokens; and, learned from
    pairs of experts, of the last ``SOURCES`` known layers of the token and their gate weights.

    What depends on the tokens alone is computed once a step for all layers; a call for the next
    layer then costs a gather and a sum.
    """

    name = "combined"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self.weights_VLF = np.zeros((NUM_VARIANTS, num_layers, NUM_FEATURES), dtype=np.float32)
        self.bias_VLE = np.zeros((NUM_VARIANTS, num_layers, num_experts), dtype=np.float32)
        self.bias_VLE += log_odds(self.share_LE)
        # of source s, expert e: row [s, e, 0] is added where e was visited, [s, e, 1] times weight
        sizes = (len(DISTANCES), num_layers, SOURCES, num_experts + 1, 2, num_experts)
        self.links_VLSE2E = np.zeros(sizes, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Counts the tables, then trains the weights."""
        super().fit(routes)
        samples = Samples(self, routes)
        for layer in range(self.shape.num_layers):
            target = visits(samples.path[:, layer], self.shape.num_experts)
            for variant in range(NUM_VARIANTS):
                self._fit_layer(samples, target, variant, layer)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Sum of the evidence, as probabilities."""
        logits_BE = self.token_logits(contexts, now, layer)
        if now >= 0:
            logits_BE = logits_BE + self.path_logits(contexts, now, layer)
        return sigmoid(logits_BE)

    def token_logits(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The part of the logits that does not depend on the token's own path: ``[B, E]``."""
        variant = variant_of(contexts, now, layer)
        if not self.keeps_memo(contexts):
            features = self.features(contexts, slice(layer, layer + 1))
            return self._weigh(features, variant, slice(layer, layer + 1))[:, 0]
        memo = f"{self.name}.{variant}"
        if memo not in contexts.memo:
            everything = slice(0, self.shape.num_layers)
            features = contexts.memo.get(self.name)
            if features is None:
                features = contexts.memo[self.name] = self.features(contexts, everything)
            contexts.memo[memo] = self._weigh(features, variant, everything)
        return contexts.memo[memo][:, layer]

    def path_logits(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """What the last known layers of the token add: ``[B, E]``."""
        num_sources = min(SOURCES, now + 1)
        variant = variant_of(contexts, now, layer)
        known = slice(now + 1 - num_sources, now + 1)
        ids_BSK = contexts.path[:, known][:, ::-1]
        weights_BSK = contexts.path_weights[:, known][:, ::-1]
        sources = np.arange(num_sources)[:, None]
        rows_BSK2E = self.links_VLSE2E[variant, layer][sources, ids_BSK]
        factors = np.stack((np.ones_like(weights_BSK), weights_BSK), axis=-1)
        size = len(contexts), -1
        rows = rows_BSK2E.reshape(*size, self.shape.num_experts)
        return np.matmul(factors.reshape(len(contexts), 1, -1), rows)[:, 0]

    def _weigh(self, features: np.ndarray, variant: int, layers: slice) -> np.ndarray:
        weights_FL1 = self.weights_VLF[variant, layers].T[:, :, None]
        return (features * weights_FL1).sum(axis=1) + self.bias_VLE[variant, layers]

    def _fit_layer(self, samples: Samples, target: np.ndarray, variant: int, layer: int) -> None:
        aligned = samples.features[:, :, layer]
        if variant == BLIND:
            aligned = aligned.copy()
            aligned[:, 1] = log_odds(self.share_LE[layer])
            aligned[:, 4] = 0
        num_sources = 0
        if variant < len(DISTANCES):
            num_sources = min(SOURCES, layer + 1 - DISTANCES[variant])
            if num_sources < 1:
                return
        dense = _links_of(samples, layer, variant, num_sources)
        fit = fit_logistic(aligned, dense, target, seed=layer)
        self.weights_VLF[variant, layer] = fit.aligned_F
        self.bias_VLE[variant, layer] = fit.bias_E
        if num_sources:
            sizes = (num_sources, self.shape.num_experts, 2, self.shape.num_experts)
            self.links_VLSE2E[variant, layer, :num_sources, :-1] = fit.dense_XE.reshape(sizes)

    def state(self) -> State:
        """The tables and ``weights``, ``bias`` and ``links``."""
        return {
            **super().state(),
            "weights": self.weights_VLF,
            "bias": self.bias_VLE,
            "links": self.links_VLSE2E,
        }

    def restore(self, state: State) -> None:
        """Takes over everything."""
        super().restore(state)
        self.weights_VLF = take_array(state, "weights", "<f4", self.weights_VLF.shape)
        self.bias_VLE = take_array(state, "bias", "<f4", self.bias_VLE.shape)
        self.links_VLSE2E = take_array(state, "links", "<f4", self.links_VLSE2E.shape)


def variant_of(contexts: Contexts, now: int, layer: int) -> int:
    """Which set of weights serves a prediction; the tokens of a step are all known or all not."""
    if now >= 0 and layer - now <= DISTANCES[-1]:
        return next(v for v, distance in enumerate(DISTANCES) if layer - now <= distance)
    return PATH_FREE if contexts.token_ids[0] >= 0 else BLIND


def _links_of(samples: Samples, layer: int, variant: int, num_sources: int) -> np.ndarray:
    """Visits and gate weights of the source layers: ``[n, sources * E * 2]``."""
    num_rows, num_experts = len(samples.path), samples.shape.num_experts
    dense = np.zeros((num_rows, num_sources, num_experts + 1, 2), dtype=np.float32)
    for source in range(num_sources):
        at = layer - DISTANCES[variant] - source
        ids = samples.path[:, at]
        np.put_along_axis(dense[:, source, :, 0], ids, 1.0, axis=1)
        np.put_along_axis(dense[:, source, :, 1], ids, samples.path_weights[:, at], axis=1)
    return np.ascontiguousarray(dense[:, :, :-1]).reshape(num_rows, -1)
