"""Predictors with trained weights.

Legend in ``base``; B rows, n training rows, F features of an expert, X features of a token, V
variants (``combined``) or known tokens (``path-network``), S sources, D embedding, H hidden.
"""

import ctypes
from typing import Any, ClassVar, Self

import numpy as np

from moe_runtime.policies.eviction.compiled import library
from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.estimator import (
    Contexts,
    Kept,
    Popularity,
    State,
    contexts_of,
    log_odds,
    sigmoid,
    take_array,
    visits,
)
from moe_runtime.policies.prediction.logistic import Adam, fit_logistic
from moe_runtime.policies.prediction.tables import continuing_rows, smoothed_counts

PRIOR_OCCURRENCES = 2.0  # occurrences of a token that weigh as much as popularity
MAX_TABLE_BYTES = 64 << 20  # largest table; the tokens seen most often are kept
NUM_FEATURES = 7
TRAINING_BYTES = 768 << 20
"""Largest table of features in training; of more tokens some are sampled."""
_MEMO_SIZE = 1 << 20  # most numbers of a feature that are kept for the later layers of a step


class TokenIdentity(Popularity):
    """``P(e | token id)``, smoothed towards popularity; strongest in the first layers."""

    name = "token-identity"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = TokenTable(shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        self.table = TokenTable.count(routes, routes.token_ids)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        return self.table.share(contexts.token_ids, self.share_LE, slice(layer, layer + 1))[:, 0]

    def state(self) -> State:
        return {**super().state(), **self.table.state("token")}

    def restore(self, state: State) -> None:
        super().restore(state)
        self.table = TokenTable.restored(self.shape, state, "token")


class TokenTable:
    """Visits of every expert by the tokens with a label, for the most frequent labels.

    The label is the token's own id, or that of the token before it.

    Attributes:
        known_V: ``[V]`` int64, labels in the table, ascending.
        counts_V: ``[V]`` float32, tokens that carried them.
        visits_VLE: ``[V, L, E]`` uint16, how many of these visited each expert.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.known_V = np.zeros(0, dtype=np.int64)
        self.counts_V = np.zeros(0, dtype=np.float32)
        self.visits_VLE = np.zeros((0, shape.num_layers, shape.num_experts), dtype=np.uint16)

    @classmethod
    def count(cls, routes: Routes, labels: np.ndarray) -> Self:
        """Counts tokens by their labels ``[T]``; negative labels are left out."""
        table = cls(routes.shape)
        row_bytes = 2 * routes.shape.num_layers * routes.shape.num_experts
        known, counts = np.unique(labels[labels >= 0], return_counts=True)
        kept = np.sort(np.argsort(-counts, kind="stable")[: MAX_TABLE_BYTES // row_bytes])
        table.known_V, table.counts_V = known[kept], counts[kept].astype(np.float32)
        table.visits_VLE = table.visits(routes, labels)
        return table

    def share(
        self,
        labels: np.ndarray,
        prior_LE: np.ndarray,
        layers: slice = slice(None),
        *,
        without: "TokenTable | None" = None,
    ) -> np.ndarray:
        """Share of the tokens with each label that visited each expert: ``[B, layers, E]``.

        Args:
            labels: ``[B]``; a label that is not in the table gets the prior.
            prior_LE: ``[L, E]`` what ``PRIOR_OCCURRENCES`` more occurrences would have visited.
        """
        rows = self.rows_of(labels)
        found, prior = rows >= 0, prior_LE[layers]
        if without is not None:
            found &= without.rows_of(labels) >= 0
        share = np.broadcast_to(prior, (len(labels), *prior.shape)).astype(np.float32)
        rows = rows[found]
        if not rows.size:
            return share
        visited, total = self.visits_VLE[rows, layers].astype(np.float32), self.counts_V[rows]
        if without is not None:
            own = without.rows_of(labels)[found]
            visited -= without.visits_VLE[own, layers]
            total = total - without.counts_V[own]
        visited += PRIOR_OCCURRENCES * prior
        share[found] = np.clip(visited / (total[:, None, None] + PRIOR_OCCURRENCES), 0.0, 1.0)
        return share

    def rows_of(self, labels: np.ndarray) -> np.ndarray:
        """Row of each label, -1 for those that are not in the table."""
        if not len(self.known_V):
            return np.full(len(labels), -1)
        rows = np.minimum(np.searchsorted(self.known_V, labels), len(self.known_V) - 1)
        return np.where(self.known_V[rows] == labels, rows, -1)

    def visits(self, routes: Routes, labels: np.ndarray) -> np.ndarray:
        """``[V, L, E]`` uint16: how often tokens with each known label visited each expert."""
        rows = self.rows_of(labels)
        taken = np.flatnonzero(rows >= 0)
        width = routes.shape.num_experts + 1
        size = (len(self.known_V), routes.shape.num_layers, routes.shape.num_experts)
        table = np.zeros(size, dtype=np.uint16)
        for layer in range(routes.shape.num_layers):
            codes = rows[taken, None] * width + routes.expert_ids[taken, layer]
            counts = np.bincount(codes.ravel(), minlength=len(self.known_V) * width)
            table[:, layer] = np.minimum(counts.reshape(-1, width)[:, :-1], 0xFFFF)
        return table

    def state(self, prefix: str) -> State:
        return {
            f"{prefix}_known": self.known_V,
            f"{prefix}_occurrences": self.counts_V,
            f"{prefix}_visits": self.visits_VLE,
        }

    @classmethod
    def restored(cls, shape: Shape, state: State, prefix: str) -> Self:
        table = cls(shape)
        known = take_array(state, f"{prefix}_known", "<i8", (None,))
        if np.any(np.diff(known) <= 0):
            raise ValueError(f"array '{prefix}_known' must rise")
        sizes = (len(known), shape.num_layers, shape.num_experts)
        table.counts_V = take_array(state, f"{prefix}_occurrences", "<f4", (len(known),))
        table.visits_VLE = take_array(state, f"{prefix}_visits", "<u2", sizes)
        table.known_V = known
        return table


class TokenEvidence(Popularity):
    """Tables over token ids, and features made of them and of the running sequence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.of_token = TokenTable(shape)
        self.after_token = TokenTable(shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        self.of_token = TokenTable.count(routes, routes.token_ids)
        self.after_token = TokenTable.count(routes, previous_ids(routes))

    def features(
        self, contexts: Contexts, layers: slice, shares: tuple[np.ndarray, np.ndarray] | None = None
    ) -> np.ndarray:
        """Features of each expert before the token's path is known: ``[B, F, layers, E]``.

        Log-odds in the sequence so far, in tokens with this id, and in tokens that follow the
        previous id; visits by the previous token and the last one with this id; running means over
        few and many tokens.
        """
        num_experts = self.shape.num_experts
        if shares is None:
            shares = (
                self.of_token.share(contexts.token_ids, self.share_LE, layers),
                self.after_token.share(contexts.previous_token_ids, self.share_LE, layers),
            )
        counts = smoothed_counts(contexts, self.share_LE, layers)
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

    def keeps_memo(self, contexts: Contexts) -> bool:
        """Whether the features of all layers are computed at once, for steps of few tokens."""
        return len(contexts) * self.shape.num_layers * self.shape.num_experts <= _MEMO_SIZE

    def state(self) -> State:
        return {
            **super().state(),
            **self.of_token.state("token"),
            **self.after_token.state("following"),
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        self.of_token = TokenTable.restored(self.shape, state, "token")
        self.after_token = TokenTable.restored(self.shape, state, "following")


def previous_ids(routes: Routes) -> np.ndarray:
    """The id of the token before each token, -1 at the start of a sequence: ``[T]``."""
    before = np.full_like(routes.token_ids, -1)
    rows = continuing_rows(routes)
    before[rows] = routes.token_ids[rows - 1]
    return before


class Samples:
    """Training rows in the order of their tokens; no feature counts the row's own sequence.

    Attributes:
        rows: ``[n]`` int64, which tokens of the routes these are.
        path: ``[n, L, K]`` where they went.
        path_weights: ``[n, L, K]`` with which gate weights.
        features: ``[n, F, L, E]`` float16.
    """

    def __init__(self, model: TokenEvidence, routes: Routes) -> None:
        self.shape = shape = routes.shape
        row_bytes = 2 * NUM_FEATURES * shape.num_layers * shape.num_experts
        num_rows = min(routes.num_tokens, max(TRAINING_BYTES // row_bytes, 1))
        chosen = np.sort(np.random.default_rng(0).permutation(routes.num_tokens)[:num_rows])
        self.rows = chosen
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
                model.of_token.share(contexts.token_ids, model.share_LE, without=own[0]),
                model.after_token.share(
                    contexts.previous_token_ids, model.share_LE, without=own[1]
                ),
            )
            part = slice(filled, filled + len(inside))
            self.features[part] = model.features(contexts, everything, shares)
            filled += len(inside)


DISTANCES = (1, 2, 4)
"""Look-ahead distances with own weights; others use those of the next larger one."""
SOURCES = 3  # layers that are looked at, from the last known one back
_VARIANT_AT = tuple(
    next(variant for variant, most in enumerate(DISTANCES) if distance <= most)
    for distance in range(DISTANCES[-1] + 1)
)
"""The variant for each distance."""
PATH_FREE, BLIND = len(DISTANCES), len(DISTANCES) + 1
"""Variants for tokens without known layers, and for tokens with unknown id."""
NUM_VARIANTS = len(DISTANCES) + 2

EMBEDDING = 32
HISTORY = 48
HIDDEN = 128
EPOCHS = 10
BATCH_ROWS = 256
RATE = 4e-3
DECAY = 0.05
UNKNOWN_SHARE = 0.1
"""Share of tokens whose id is hidden in training, to learn about unknown tokens."""
_TOKEN, _RECALLED, _RECENT = 1, 4, slice(5, 7)
"""Features: the token's own table, its last visit here, and the running means."""

_PARAMETERS = ("token", "before", "history", "inner", "inner_bias", "outer", "outer_bias", "mix")


class Combination(TokenEvidence):
    """Logistic regression for every layer and distance over the evidence of the other predictors.

    The logit of an expert is a weighted sum of `TokenEvidence.features` and, learned from pairs of
    experts, of the last ``SOURCES`` known layers of the token and their gate weights. What depends
    on the tokens alone is computed once a step for all layers.
    """

    name = "combined"
    kept: ClassVar = {
        **TokenEvidence.kept,
        "weights": Kept("weights_VLF"),
        "bias": Kept("bias_VLE"),
        "links": Kept("links_VLSE2E"),
    }

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
        super().fit(routes)
        samples = Samples(self, routes)
        for layer in range(self.shape.num_layers):
            target = visits(samples.path[:, layer], self.shape.num_experts)
            for variant in range(NUM_VARIANTS):
                self._fit_layer(samples, target, variant, layer)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        logits_BE = self.token_logits(contexts, now, layer)
        if now >= 0:
            logits_BE = logits_BE + self.path_logits(contexts, now, layer)
        return sigmoid(logits_BE)

    def guess(
        self, contexts: Contexts, now: int, layers: range, width: int, least: float = 0.0
    ) -> tuple[list[int], list[float]]:
        compiled = library()
        if compiled is None or not self.keeps_memo(contexts):
            return super().guess(contexts, now, layers, width, least)
        known = contexts.memo.get("compiled")
        if known is None:
            known = contexts.memo["compiled"] = self._compiled_tokens(compiled, contexts)
        asked = (now, layers.start, len(layers), width, least)
        number = compiled.moe_combined_guess(known.at, *asked)
        return known.best_experts[:number], known.best_chances[:number]

    def _compiled_tokens(self, compiled: Any, contexts: Contexts) -> "_Tokens":
        shape, tables = self.shape, (self.of_token, self.after_token)
        rows_2B = (
            self.of_token.rows_of(contexts.token_ids),
            self.after_token.rows_of(contexts.previous_token_ids),
        )
        logits = np.empty((len(contexts), *self.bias_VLE.shape), np.float32)
        known = [
            np.ascontiguousarray(array)
            for array in (contexts.counts, contexts.recent, contexts.previous, contexts.recalled)
        ]
        learned = [a.ctypes.data for a in (self.share_LE, self.weights_VLF, self.bias_VLE)]
        for row in range(len(contexts)):
            seen: list[Any] = []
            for table, rows_B in zip(tables, rows_2B, strict=True):
                number = rows_B[row]
                is_known = number >= 0
                seen += [table.visits_VLE[number].ctypes.data if is_known else None]
                seen += [float(table.counts_V[number]) if is_known else 0.0]
            compiled.moe_combined_token(
                *(NUM_VARIANTS, shape.num_layers, shape.num_experts, shape.top_k, *learned, *seen),
                *(int(contexts.num_tokens[row]), *(array[row].ctypes.data for array in known)),
                logits[row].ctypes.data,
            )
        path, gates = map(np.ascontiguousarray, (contexts.path, contexts.path_weights))
        assert path is contexts.path, "layers are noted in it as they are routed"
        places = shape.num_layers * shape.num_experts
        any_expert = (ctypes.c_float * (2 * shape.num_experts))()
        best, chances = (ctypes.c_int32 * places)(), (ctypes.c_float * places)()
        tables = (logits, self.links_VLSE2E, path, gates)
        found = _Tokens(
            *(array.ctypes.data for array in tables),
            *map(ctypes.addressof, (any_expert, chances, best)),
            *(len(contexts), NUM_VARIANTS, shape.num_layers, shape.num_experts, shape.top_k),
            variant_of(contexts, -1, 0),
        )
        found.kept = (*tables, any_expert)
        found.best_experts, found.best_chances = best, chances
        found.at = ctypes.addressof(found)
        return found

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


class _Tokens(ctypes.Structure):
    """The arguments of ``combined.c`` for the tokens of a step."""

    at: int
    kept: tuple[Any, ...]  # arrays that the fields point into
    best_experts: Any
    best_chances: Any
    _fields_: ClassVar = [
        *[(name, ctypes.c_void_p) for name in ("logits", "links", "path", "gates")],
        *[(name, ctypes.c_void_p) for name in ("any", "chances", "best")],
        *[(name, ctypes.c_int32) for name in ("num_tokens", "num_variants", "num_layers")],
        *[(name, ctypes.c_int32) for name in ("num_experts", "top_k", "path_free")],
    ]


def variant_of(contexts: Contexts, now: int, layer: int) -> int:
    """The variant of a prediction; either all tokens of a step are known, or none."""
    if now >= 0 and layer - now <= DISTANCES[-1]:
        return _VARIANT_AT[layer - now]
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


class PathNetwork(TokenEvidence):
    """A hidden layer over the tokens and the recent past that predicts all layers at once.

    The role of ExpertFlow's routing-path predictor (He et al., arXiv 2410.17954), which gives a
    transformer the tokens and asks it for the whole path before the first layer has run. Ours has
    one hidden layer over embeddings of the token, of the one before and over what the sequence
    visited lately, added to the evidence of tables. Layers that were routed meanwhile change
    nothing.
    """

    name = "path-network"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = self._sizes(0)
        self.parameters = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        self.parameters["outer_bias"] += log_odds(self.share_LE).ravel()

    def fit(self, routes: Routes) -> None:
        """Counts the tables, then trains on the cross-entropy over the experts of all layers."""
        super().fit(routes)
        samples = Samples(self, routes)
        sizes = self._sizes(len(self.of_token.known_V))
        rng = np.random.default_rng(0)
        self.parameters = {name: _initial(name, size, rng) for name, size in sizes.items()}
        self.parameters["outer_bias"] += log_odds(self.share_LE).ravel()
        self.parameters["mix"][_TOKEN] = 1.0
        token = self.of_token.rows_of(routes.token_ids[samples.rows])
        before = self.of_token.rows_of(previous_ids(routes)[samples.rows])
        batches = max(1, len(token) // BATCH_ROWS)
        parameters = [self.parameters[name] for name in _PARAMETERS]
        adam = Adam(parameters, num_steps=EPOCHS * batches, rate=RATE, decay=DECAY)
        for _ in range(EPOCHS):
            for rows in np.array_split(rng.permutation(len(token)), batches):
                hidden_away = rng.random(len(rows)) < UNKNOWN_SHARE
                features = samples.features[rows].astype(np.float32)
                features[hidden_away, _TOKEN] = log_odds(self.share_LE)
                features[hidden_away, _RECALLED] = 0.0
                seen = np.where(hidden_away, -1, token[rows])
                adam.step(self._gradients(features, seen, before[rows], samples.path[rows]))

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Ignores layers that are known already."""
        if not self.keeps_memo(contexts):
            return sigmoid(self._logits(contexts, slice(layer, layer + 1))[:, 0])
        if self.name not in contexts.memo:
            contexts.memo[self.name] = sigmoid(
                self._logits(contexts, slice(0, self.shape.num_layers))
            )
        return contexts.memo[self.name][:, layer]

    def state(self) -> State:
        return {**super().state(), **self.parameters}

    def restore(self, state: State) -> None:
        super().restore(state)
        sizes = self._sizes(len(self.of_token.known_V))
        self.parameters = {n: take_array(state, n, "<f4", size) for n, size in sizes.items()}

    def _sizes(self, num_known: int) -> dict[str, tuple[int, ...]]:
        experts = self.shape.num_layers * self.shape.num_experts
        # the last embedding is that of unknown tokens
        sizes = (
            *((num_known + 1, EMBEDDING), (num_known + 1, EMBEDDING)),
            *((2 * experts, HISTORY), (2 * EMBEDDING + HISTORY, HIDDEN), (HIDDEN,)),
            *((HIDDEN, experts), (experts,), (NUM_FEATURES, self.shape.num_layers)),
        )
        return dict(zip(_PARAMETERS, sizes, strict=True))

    def _logits(self, contexts: Contexts, layers: slice) -> np.ndarray:
        everything = slice(0, self.shape.num_layers)
        features = self.features(contexts, layers)
        recent = contexts.recent[:, :, everything] - self.share_LE
        token = self.of_token.rows_of(contexts.token_ids)
        before = self.of_token.rows_of(contexts.previous_token_ids)
        hidden_BH, _ = self._hidden(recent, token, before)
        outer = self.parameters["outer"].reshape(HIDDEN, *self.share_LE.shape)[:, layers]
        bias = self.parameters["outer_bias"].reshape(self.share_LE.shape)[layers]
        logits = np.tensordot(hidden_BH, outer, axes=1) + bias
        return logits + np.einsum("bfle,fl->ble", features, self.parameters["mix"][:, layers])

    def _hidden(
        self, recent: np.ndarray, token: np.ndarray, before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The hidden layer and what it was given: ``[B, H]`` and ``[B, 2 * D + history]``."""
        own = self.parameters
        past = recent.reshape(len(recent), -1) @ own["history"]
        given = np.concatenate((own["token"][token], own["before"][before], past), axis=1)
        return np.maximum(given @ own["inner"] + own["inner_bias"], 0.0), given

    def _gradients(
        self, features: np.ndarray, token: np.ndarray, before: np.ndarray, path: np.ndarray
    ) -> list[np.ndarray]:
        """Of the mean cross-entropy of some rows, in the order of the parameters."""
        own, num_rows = self.parameters, len(features)
        recent = features[:, _RECENT] - self.share_LE
        hidden, given = self._hidden(recent, token, before)
        logits = (hidden @ own["outer"] + own["outer_bias"]).reshape(num_rows, *self.share_LE.shape)
        logits += np.einsum("bfle,fl->ble", features, own["mix"])
        error = (sigmoid(logits) - visits(path, self.shape.num_experts)) / num_rows
        error[path[:, :, 0] == self.shape.num_experts] = 0.0  # nothing was recorded there
        flat = error.reshape(num_rows, -1)
        to_hidden = (flat @ own["outer"].T) * (hidden > 0)
        to_given = to_hidden @ own["inner"].T
        to_token, to_before = np.zeros_like(own["token"]), np.zeros_like(own["before"])
        np.add.at(to_token, token, to_given[:, :EMBEDDING])
        np.add.at(to_before, before, to_given[:, EMBEDDING : 2 * EMBEDDING])
        to_past = to_given[:, 2 * EMBEDDING :]
        return [
            *(to_token, to_before, recent.reshape(num_rows, -1).T @ to_past),
            *(given.T @ to_hidden, to_hidden.sum(axis=0)),
            *(hidden.T @ flat, flat.sum(axis=0), np.einsum("bfle,ble->fl", features, error)),
        ]


def _initial(name: str, size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Embeddings and matrices start small and random; biases and the output layer at zero."""
    if name in ("inner_bias", "outer_bias", "outer", "mix"):
        return np.zeros(size, np.float32)
    width = 1.0 if name in ("token", "before") else 1.0 / np.sqrt(size[0])
    return (width * rng.standard_normal(size)).astype(np.float32)
