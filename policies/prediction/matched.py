"""Predictors that search past requests or tokens for similar ones.

Legend in ``base``; C stored matrices or maps, B rows.
"""

from typing import ClassVar

import numpy as np

from moe_runtime.policies.prediction.base import COLLECTED_MATRICES, Routes, Shape
from moe_runtime.policies.prediction.estimator import (
    Contexts,
    Kept,
    Popularity,
    State,
    take_array,
    visits,
)
from moe_runtime.policies.prediction.tables import sum_to

NEVER_SEEN = 1e-8  # share of an expert that no matched request visited
COVERED = 0.75
"""Least cosine of a request that the collection covers, as in the paper's bound."""
NUM_MAPS = 1024  # maps that ``expert-map`` keeps
NEIGHBOURS = 16  # maps that are averaged
PRIOR_MAPS = 1.0  # maps that popularity weighs as much as


class MatrixCollection:
    """Expert activation matrices of past requests (MoE-Infinity, Xue et al., arXiv 2401.14361).

    An activation matrix counts, for one request, how many tokens visited each expert of each layer.
    A new matrix takes the place of the most similar one where the collection is full, so that what
    is kept stays diverse (the paper's variant).
    """

    def __init__(self, shape: Shape, *, capacity: int = COLLECTED_MATRICES) -> None:
        self._matrices = np.zeros((capacity, shape.num_layers, shape.num_experts), np.float32)
        self.norms = np.zeros(capacity, np.float32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def matrices(self) -> np.ndarray:
        """``[C, L, E]`` float32, what was collected."""
        return self._matrices[: self._size]

    def add(self, counts_LE: np.ndarray) -> None:
        """Collects the matrix of a finished request, unless it is empty."""
        norm = float(np.linalg.norm(counts_LE))
        if norm == 0.0:
            return
        place = self._size
        if place == len(self._matrices):
            place = int(np.argmax(self.likeness(counts_LE)))
        else:
            self._size += 1
        self._matrices[place] = counts_LE
        self.norms[place] = norm

    def fit(self, routes: Routes) -> None:
        for sequence in range(routes.num_sequences):
            self.add(_counts_of(routes, sequence))

    def likeness(self, counts_LE: np.ndarray) -> np.ndarray:
        """``[C]`` cosine with every collected matrix, times the matrix's own norm."""
        return np.tensordot(self.matrices, counts_LE, axes=2) / self.norms[: self._size]

    def restore(self, state: State) -> None:
        capacity, *sizes = self._matrices.shape
        found = take_array(state, "matrices", "<f4", (None, *sizes))
        if len(found) > capacity or np.any(found < 0) or not found.any(axis=(1, 2)).all():
            raise ValueError(
                f"array 'matrices' must hold at most {capacity} matrices of counts, none empty"
            )
        self._size = len(found)
        self._matrices[: self._size] = found
        self.norms[: self._size] = np.linalg.norm(
            found.reshape(len(found), sizes[0] * sizes[1]), axis=1
        )


class EamCollection(Popularity):
    """The nearest collected activation matrix, row by row, as probabilities (MoE-Infinity).

    The iEAM is the matrix of the running step, filled layer by layer; the rEAM is the sum over the
    request's steps. Finished rEAMs are collected; a running request is compared with them, and the
    most similar one says what comes. While nothing is known, popularity serves.
    """

    name = "eam"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.collection = MatrixCollection(shape)

    def fit(self, routes: Routes) -> None:
        super().fit(routes)
        self.collection = MatrixCollection(self.shape)
        self.collection.fit(routes)

    def finish(self, counts_LE: np.ndarray) -> None:
        self.collection.add(counts_LE)

    def match(self, contexts: Contexts, now: int) -> tuple[np.ndarray, np.ndarray]:
        """``[B]`` indices of the matrices most like running requests (rEAM plus iEAM up to
        ``now``), and their cosines, 0 where nothing is known.

        Also their cosines, 0 where nothing is known.
        """
        matrices = self.collection.matrices
        if not len(matrices):
            raise ValueError("no activation matrix has been collected yet")
        if self.name not in contexts.memo:  # products with the rEAM, the same for all layers
            flat = contexts.counts.reshape(len(contexts), -1)
            contexts.memo[self.name] = flat @ matrices.reshape(len(matrices), -1).T
        dots = contexts.memo[self.name]
        square = np.square(contexts.counts).sum(axis=(1, 2))
        if now >= 0:
            known = contexts.path[:, : now + 1]
            layers = np.arange(now + 1)[:, None]
            inside = known < self.shape.num_experts
            experts = np.where(inside, known, 0)
            visited = matrices[:, layers, experts] * inside
            dots = dots + visited.sum(axis=(2, 3)).T
            rows = np.arange(len(contexts))[:, None, None]
            own = contexts.counts[rows, layers, experts]
            square = square + ((2.0 * own + 1.0) * inside).sum(axis=(1, 2))
        norms = self.collection.norms[: len(matrices)]
        cosines = dots / np.maximum(np.sqrt(square)[:, None] * norms, 1e-6)
        nearest = cosines.argmax(axis=1)
        return nearest, cosines[np.arange(len(cosines)), nearest]

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        if not len(self.collection):
            return super().estimate(contexts, now, layer)
        nearest, cosine = self.match(contexts, now)
        rows = self.collection.matrices[nearest, layer]
        share = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1.0) + NEVER_SEEN
        chance = sum_to(share, self.shape.top_k)
        return np.where(cosine[:, None] > 0, chance, self.share_LE[layer])

    def coverage(self, routes: Routes) -> float:
        """Share of finished requests whose nearest matrix has a cosine of at least ``COVERED``."""
        if not len(self.collection) or not routes.num_sequences:
            return 0.0
        covered = 0
        for sequence in range(routes.num_sequences):
            counts = _counts_of(routes, sequence)
            cosine = self.collection.likeness(counts).max() / np.linalg.norm(counts)
            covered += bool(cosine >= COVERED)
        return covered / routes.num_sequences

    def learned(self) -> State:
        return self.state() if len(self.collection) else {}

    def state(self) -> State:
        return {**super().state(), "matrices": self.collection.matrices.copy()}

    def restore(self, state: State) -> None:
        super().restore(state)
        self.collection.restore(state)


class ExpertMapSearch(Popularity):
    """The mean of the maps whose gate weights along the known layers are nearest by cosine.

    FineMoE (Yu et al., arXiv 2502.05370) stores a map of gate weights for each token, where
    MoE-Infinity stores counts for each request. Before a layer of the token is known, maps of
    tokens with the same id serve in the place of the paper's search by an embedding of the prompt.
    """

    name = "expert-map"
    kept: ClassVar = {
        **Popularity.kept,
        "paths": Kept("paths_CLK", "<i8"),  # [C, L, K]
        "weights": Kept("weights_CLK"),  # [C, L, K]
        "token_ids": Kept("token_ids_C", "<i8"),  # [C]
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.paths_CLK = np.zeros((0, shape.num_layers, shape.top_k), dtype=np.int64)
        self.weights_CLK = np.zeros((0, shape.num_layers, shape.top_k), dtype=np.float32)
        self.token_ids_C = np.zeros(0, dtype=np.int64)
        self._prepare()

    def fit(self, routes: Routes) -> None:
        """Keeps the maps of randomly chosen tokens, with a fixed seed."""
        super().fit(routes)
        rows = np.random.default_rng(0).permutation(routes.num_tokens)[:NUM_MAPS]
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

    def restore(self, state: State) -> None:
        super().restore(state)
        paths = self.paths_CLK
        if len(paths) and not 0 <= paths.min() <= paths.max() <= self.shape.num_experts:
            raise ValueError(f"array 'paths' must lie in [0, {self.shape.num_experts}]")
        if not len(paths) == len(self.weights_CLK) == len(self.token_ids_C):
            raise ValueError("arrays 'paths', 'weights' and 'token_ids' must be equally long")
        self._prepare()


def _counts_of(routes: Routes, sequence: int) -> np.ndarray:
    return routes.counts(routes.tokens_of(sequence)).astype(np.float32)
