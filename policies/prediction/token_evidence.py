"""What the tokens alone tell of each expert: the evidence that trained predictors weigh.

Legend: B rows, T tokens, L layers, E experts of a layer, K experts that a token visits, F features.
"""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts, contexts_of
from moe_runtime.policies.prediction.estimator import State, log_odds, visits
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.running_counts import PRIOR_TOKENS
from moe_runtime.policies.prediction.token_identity import TokenTable

NUM_FEATURES = 7
TRAINING_BYTES = 768 << 20
"""Largest table of features that training holds; more tokens than fit are sampled."""

_MEMO_SIZE = 1 << 20
"""Most numbers for each feature that are kept for a step's later layers."""


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
        """Counts the tables."""
        super().fit(routes)
        self.of_token = TokenTable.count(routes, routes.token_ids)
        self.after_token = TokenTable.count(routes, previous_ids(routes))

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
        """Takes over everything."""
        super().restore(state)
        self.of_token = TokenTable.restored(self.shape, state, "token")
        self.after_token = TokenTable.restored(self.shape, state, "following")


def previous_ids(routes: Routes) -> np.ndarray:
    """The id of the token before each token, -1 at the start of a sequence: ``[T]``."""
    before = np.concatenate([[-1], routes.token_ids[:-1]])
    before[routes.offsets[:-1][np.diff(routes.offsets) > 0]] = -1
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
                model.of_token.share_without(contexts.token_ids, model.share_LE, own[0]),
                model.after_token.share_without(
                    contexts.previous_token_ids, model.share_LE, own[1]
                ),
            )
            part = slice(filled, filled + len(inside))
            self.features[part] = model.features(contexts, everything, shares)
            filled += len(inside)
