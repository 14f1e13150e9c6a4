"""All that routing and token ids tell, with learned weights."""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts, contexts_of
from moe_runtime.policies.prediction.estimator import (
    State,
    log_odds,
    sigmoid,
    take_array,
    visits,
)
from moe_runtime.policies.prediction.logistic import fit_logistic
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.running_counts import PRIOR_TOKENS
from moe_runtime.policies.prediction.token_identity import TokenTable

DISTANCES = (1, 2, 4)
"""Look-ahead distances with weights of their own; others use those of the next larger one."""
SOURCES = 3
"""How many layers are looked at, from the last known one back."""
PATH_FREE, BLIND = len(DISTANCES), len(DISTANCES) + 1
"""Variants for tokens of which no layer is known, and of which not even the id is known."""
NUM_VARIANTS = len(DISTANCES) + 2
NUM_FEATURES = 7
TRAINING_BYTES = 768 << 20
"""Largest table of features that training holds; more tokens than fit are sampled."""


class Combination(Popularity):
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
        self.of_token = TokenTable(shape)
        self.after_token = TokenTable(shape)
        self.weights_VLF = np.zeros((NUM_VARIANTS, num_layers, NUM_FEATURES), dtype=np.float32)
        self.bias_VLE = np.zeros((NUM_VARIANTS, num_layers, num_experts), dtype=np.float32)
        self.bias_VLE += log_odds(self.share_LE)
        # of source s, expert e: row [s, e, 0] is added where e was visited, [s, e, 1] times weight
        sizes = (len(DISTANCES), num_layers, SOURCES, num_experts + 1, 2, num_experts)
        self.links_VLSE2E = np.zeros(sizes, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Counts the tables, then trains the weights; features never count their own sequence."""
        super().fit(routes)
        self.of_token = TokenTable.count(routes, routes.token_ids)
        self.after_token = TokenTable.count(routes, previous_ids(routes))
        samples = _Samples(self, routes)
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
        if len(contexts) * self.shape.num_layers * self.shape.num_experts > _MEMO_SIZE:
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

    def features(
        self,
        contexts: Contexts,
        layers: slice,
        shares: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """What is known of each expert before the token's path: ``[B, F, layers, E]``.

        Args:
            contexts: the tokens.
            layers: which layers.
            shares: what the two token tables say; looked up when omitted.
        """
        num_experts = self.shape.num_experts
        if shares is None:
            shares = (
                self.of_token.share(contexts.token_ids, self.share_LE, layers),
                self.after_token.share(contexts.previous_token_ids, self.share_LE, layers),
            )
        total = contexts.num_tokens[:, None, None].astype(np.float32) + np.float32(PRIOR_TOKENS)
        counts = (contexts.counts[:, layers] + PRIOR_TOKENS * self.share_LE[layers]) / total
        return np.stack(
            (
                log_odds(counts),
                log_odds(shares[0]),
                log_odds(shares[1]),
                visits(contexts.previous[:, layers], num_experts),
                visits(contexts.recalled[:, layers], num_experts),
                contexts.recent[:, 0, layers],
                contexts.recent[:, 1, layers],
            ),
            axis=1,
        )

    def _weigh(self, features: np.ndarray, variant: int, layers: slice) -> np.ndarray:
        weights_FL1 = self.weights_VLF[variant, layers].T[:, :, None]
        return (features * weights_FL1).sum(axis=1) + self.bias_VLE[variant, layers]

    def _fit_layer(self, samples: "_Samples", target: np.ndarray, variant: int, layer: int) -> None:
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
        dense = samples.dense(layer, variant, num_sources)
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
            **self.of_token.state("token"),
            **self.after_token.state("following"),
            "weights": self.weights_VLF,
            "bias": self.bias_VLE,
            "links": self.links_VLSE2E,
        }

    def restore(self, state: State) -> None:
        """Takes over everything."""
        super().restore(state)
        self.of_token = TokenTable.restored(self.shape, state, "token")
        self.after_token = TokenTable.restored(self.shape, state, "following")
        self.weights_VLF = take_array(state, "weights", "<f4", self.weights_VLF.shape)
        self.bias_VLE = take_array(state, "bias", "<f4", self.bias_VLE.shape)
        self.links_VLSE2E = take_array(state, "links", "<f4", self.links_VLSE2E.shape)


_MEMO_SIZE = 1 << 20


def variant_of(contexts: Contexts, now: int, layer: int) -> int:
    """Which set of weights serves a prediction; the tokens of a step are all known or all not."""
    if now >= 0 and layer - now <= DISTANCES[-1]:
        return next(v for v, distance in enumerate(DISTANCES) if layer - now <= distance)
    return PATH_FREE if contexts.token_ids[0] >= 0 else BLIND


def previous_ids(routes: Routes) -> np.ndarray:
    """The id of the token before each token, -1 at the start of a sequence: ``[T]``."""
    before = np.concatenate([[-1], routes.token_ids[:-1]])
    before[routes.offsets[:-1][np.diff(routes.offsets) > 0]] = -1
    return before


class _Samples:
    """Training rows: features in float16, paths and gate weights."""

    def __init__(self, model: Combination, routes: Routes) -> None:
        self.shape = shape = routes.shape
        row_bytes = 2 * NUM_FEATURES * shape.num_layers * shape.num_experts
        num_rows = min(routes.num_tokens, max(TRAINING_BYTES // row_bytes, 1))
        chosen = np.sort(np.random.default_rng(0).permutation(routes.num_tokens)[:num_rows])
        self.path = routes.expert_ids[chosen]
        self.path_weights = routes.gate_weights[chosen]
        size = (num_rows, NUM_FEATURES, shape.num_layers, shape.num_experts)
        self.features = np.empty(size, dtype=np.float16)
        everything = slice(0, shape.num_layers)
        filled = 0
        for sequence in range(routes.num_sequences):
            rows = routes.tokens_of(sequence)
            inside = chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start
            if not inside.size:
                continue
            alone = routes.select([sequence])
            own = (
                TokenTable.count(alone, alone.token_ids),
                TokenTable.count(alone, previous_ids(alone)),
            )
            (contexts,) = contexts_of(alone, max_rows=len(alone.token_ids))
            contexts = contexts.rows(inside)
            shares = (
                model.of_token.share_without(contexts.token_ids, model.share_LE, own[0]),
                model.after_token.share_without(
                    contexts.previous_token_ids, model.share_LE, own[1]
                ),
            )
            part = slice(filled, filled + len(inside))
            self.features[part] = model.features(contexts, everything, shares)
            filled += len(inside)

    def dense(self, layer: int, variant: int, num_sources: int) -> np.ndarray:
        """Visits and gate weights of the source layers: ``[n, sources * E * 2]``."""
        num_rows, num_experts = len(self.path), self.shape.num_experts
        dense = np.zeros((num_rows, num_sources, num_experts + 1, 2), dtype=np.float32)
        for source in range(num_sources):
            at = layer - DISTANCES[variant] - source
            ids = self.path[:, at]
            np.put_along_axis(dense[:, source, :, 0], ids, 1.0, axis=1)
            np.put_along_axis(dense[:, source, :, 1], ids, self.path_weights[:, at], axis=1)
        return np.ascontiguousarray(dense[:, :, :-1]).reshape(num_rows, -1)
