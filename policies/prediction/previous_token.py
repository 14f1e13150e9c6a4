"""Previous token: its experts, with how often they are used again."""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import State, take_chances, visits
from moe_runtime.policies.prediction.popularity import Popularity


class PreviousToken(Popularity):
    """What the sequence's previous token visited in the same layer, then popularity.

    ExpertFlow (arXiv 2410.17954) calls this the token-level baseline (TLP).
    """

    name = "previous-token"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.reuse_L = np.full(shape.num_layers, 0.5, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Measures how often an expert of one token is visited by the next one, by layer."""
        super().fit(routes)
        visited = visits(routes.expert_ids, self.shape.num_experts)
        follows = np.ones(routes.num_tokens, dtype=bool)
        follows[routes.offsets[:-1][np.diff(routes.offsets) > 0]] = False
        rows = np.flatnonzero(follows)
        again_L = (visited[rows] * visited[rows - 1]).sum(axis=(0, 2))
        self.reuse_L = ((again_L + 0.5) / (visited[rows - 1].sum(axis=(0, 2)) + 1.0)).astype("<f4")

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The measured chance of reuse for visited experts, what is left of K for the others."""
        visited = visits(contexts.previous[:, layer], self.shape.num_experts)
        reuse, share = self.reuse_L[layer], self.share_LE[layer]
        left = np.float32(self.shape.top_k) - reuse * visited.sum(axis=1, keepdims=True)
        others = share * (1.0 - visited)
        scale = left / np.maximum(others.sum(axis=1, keepdims=True), 1e-6)
        return np.where(visited > 0, reuse, np.minimum(others * scale, 1.0)).astype(np.float32)

    def state(self) -> State:
        """``share`` of popularity and ``reuse``: ``[L]``."""
        return {**super().state(), "reuse": self.reuse_L}

    def restore(self, state: State) -> None:
        """Takes over both."""
        super().restore(state)
        self.reuse_L = take_chances(state, "reuse", (self.shape.num_layers,))
