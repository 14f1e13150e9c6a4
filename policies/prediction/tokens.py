"""What the tokens alone tell of each expert: by their ids, and by the sequence so far.

Legend: B rows, T tokens, V known labels, L layers, E experts of a layer, K experts that a token
visits, F features, n training rows.
"""

from typing import Self

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts, contexts_of
from moe_runtime.policies.prediction.estimator import (
    Popularity,
    State,
    log_odds,
    take_array,
    visits,
)
from moe_runtime.policies.prediction.tables import continuing_rows, smoothed_counts

PRIOR_OCCURRENCES = 2.0  # occurrences of a token that weigh as much as popularity
MAX_TABLE_BYTES = 64 << 20  # largest table; the tokens seen most often are kept
NUM_FEATURES = 7
TRAINING_BYTES = 768 << 20
"""Largest table of features that training holds; more tokens than fit are sampled."""
_MEMO_SIZE = 1 << 20  # most numbers for each feature that are kept for a step's later layers


class TokenIdentity(Popularity):
    """``P(e | token id)``, smoothed towards popularity for rare tokens.

    Strongest in the first layers, which look at little but the token, and therefore the complement
    of everything that predicts from earlier layers.
    """

    name = "token-identity"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = TokenTable(shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        self.table = TokenTable.count(routes, routes.token_ids)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Smoothed shares; popularity for tokens that were never seen."""
        return self.table.share(contexts.token_ids, self.share_LE, slice(layer, layer + 1))[:, 0]

    def state(self) -> State:
        """``share`` of popularity and the table's arrays."""
        return {**super().state(), **self.table.state("token")}

    def restore(self, state: State) -> None:
        super().restore(state)
        self.table = TokenTable.restored(self.shape, state, "token")


class TokenTable:
    """Visits of every expert by the tokens that carry a label, for the labels seen most often.

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
        """Counts the tokens of some sequences by label ``[T]``; negative labels are left out."""
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
        """How often tokens with each known label visited each expert: ``[V, L, E]`` uint16."""
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
        """Arrays ``PREFIX_known``, ``PREFIX_occurrences`` and ``PREFIX_visits``."""
        return {
            f"{prefix}_known": self.known_V,
            f"{prefix}_occurrences": self.counts_V,
            f"{prefix}_visits": self.visits_VLE,
        }

    @classmethod
    def restored(cls, shape: Shape, state: State, prefix: str) -> Self:
        """The table whose ``state`` this is."""
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
    """Tables over token ids, and features made of them and of the running sequence.

    The features of an expert are: its log-odds in the sequence so far, in tokens with this id, and
    in tokens that follow the previous id; whether the previous token and the last token with this
    id visited it; and its running means over few and many tokens.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.of_token = TokenTable(shape)
        self.after_token = TokenTable(shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        self.of_token = TokenTable.count(routes, routes.token_ids)
        self.after_token = TokenTable.count(routes, previous_ids(routes))

    def features(
        self,
        contexts: Contexts,
        layers: slice,
        shares: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """What is known of each expert before the token's path: ``[B, F, layers, E]``."""
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
        """Whether so few tokens are asked about that all layers are answered at once and kept."""
        return len(contexts) * self.shape.num_layers * self.shape.num_experts <= _MEMO_SIZE

    def state(self) -> State:
        """``share`` of popularity and the arrays of both tables."""
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
