"""FineMoE: gate weights of single past tokens, matched by the path so far.

Yu et al., arXiv 2502.05370. Where MoE-Infinity stores one matrix of counts for a request, this
stores one map of gate weights for a token: what was searched for is found with finer grain.
"""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import State, take_array, visits
from moe_runtime.policies.prediction.popularity import Popularity

CAPACITY = 1024
"""Maps that are kept."""
NEIGHBOURS = 16
"""Maps that are averaged."""
PRIOR_MAPS = 1.0
"""Maps that popularity weighs as much as."""


class ExpertMapSearch(Popularity):
    """The maps whose gate weights along the known layers are nearest by cosine, averaged.

    Before a layer of the token is known, maps of tokens with the same id stand in for the search by
    meaning, for which the paper uses an embedding of the prompt.
    """

    name = "expert-map"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.paths_CLK = np.zeros((0, shape.num_layers, shape.top_k), dtype=np.int64)
        self.weights_CLK = np.zeros((0, shape.num_layers, shape.top_k), dtype=np.float32)
        self.token_ids_C = np.zeros(0, dtype=np.int64)
        self._prepare()

    def fit(self, routes: Routes) -> None:
        """Keeps the maps of tokens drawn at random, the same ones every time."""
        super().fit(routes)
        rows = np.random.default_rng(0).permutation(routes.num_tokens)[:CAPACITY]
        self.paths_CLK = routes.expert_ids[rows]
        self.weights_CLK = routes.gate_weights[rows]
        self.token_ids_C = routes.token_ids[rows]
        self._prepare()

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Mean of the nearest maps in the layer, smoothed by popularity."""
        if not len(self.paths_CLK):
            return super().estimate(contexts, now, layer)
        score_BC = self._scores(contexts, now)
        width = min(NEIGHBOURS, score_BC.shape[1])
        nearest = np.argpartition(-score_BC, width - 1, axis=1)[:, :width]
        nearest.sort(axis=1)
        worth = np.maximum(np.take_along_axis(score_BC, nearest, axis=1), 0.0)[:, :, None]
        visited = visits(self.paths_CLK[nearest, layer], self.shape.num_experts)
        total = worth.sum(axis=1) + PRIOR_MAPS
        return ((visited * worth).sum(axis=1) + PRIOR_MAPS * self.share_LE[layer]) / total

    def _scores(self, contexts: Contexts, now: int) -> np.ndarray:
        """Similarity of each row with each map: ``[B, C]``, cosine along the known layers."""
        same_token = contexts.token_ids[:, None] == self.token_ids_C
        same_token &= contexts.token_ids[:, None] >= 0
        if now < 0:
            return same_token.astype(np.float32)
        num_rows = len(contexts)
        known = slice(0, now + 1)
        layers = np.arange(now + 1)[:, None]
        maps_BLE = np.zeros((num_rows, now + 1, self.shape.num_experts + 1), dtype=np.float32)
        weights = contexts.path_weights[:, known]
        np.put_along_axis(maps_BLE, contexts.path[:, known], weights, axis=2)
        dots = np.zeros((num_rows, len(self.paths_CLK)), dtype=np.float32)
        for row in range(num_rows):
            shared = maps_BLE[row][layers, self.paths_CLK[:, known]] * self.weights_CLK[:, known]
            dots[row] = shared.sum(axis=(1, 2))
        norm_B1 = np.sqrt(np.square(weights).sum(axis=(1, 2)))[:, None]
        return dots / np.maximum(norm_B1 * self._prefix_norms[:, now], 1e-6)

    def _prepare(self) -> None:
        squares = np.square(self.weights_CLK).sum(axis=2)
        self._prefix_norms = np.sqrt(np.cumsum(squares, axis=1))

    def state(self) -> State:
        """``share``, ``paths`` and ``weights`` ``[C, L, K]``, ``token_ids`` ``[C]``."""
        return {
            **super().state(),
            "paths": self.paths_CLK,
            "weights": self.weights_CLK,
            "token_ids": self.token_ids_C,
        }

    def restore(self, state: State) -> None:
        """Takes over all four."""
        super().restore(state)
        sizes = (None, self.shape.num_layers, self.shape.top_k)
        paths = take_array(state, "paths", "<i8", sizes)
        if len(paths) and not 0 <= paths.min() <= paths.max() <= self.shape.num_experts:
            raise ValueError(f"array 'paths' must lie in [0, {self.shape.num_experts}]")
        self.weights_CLK = take_array(state, "weights", "<f4", paths.shape)
        self.token_ids_C = take_array(state, "token_ids", "<i8", (len(paths),))
        self.paths_CLK = paths
        self._prepare()
