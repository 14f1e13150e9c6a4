"""MoE-Infinity: expert activation matrices of past requests, matched by cosine.

Xue et al., arXiv 2401.14361. An activation matrix (EAM) counts, for one request, how many tokens
visited each expert of each layer. The iEAM is that of the running step, filled layer by layer; the
rEAM is the sum over the request's steps. Finished rEAMs are collected; a running request is
compared with them, and the most similar one says what comes.
"""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import State, take_array
from moe_runtime.policies.prediction.limits import COLLECTED_MATRICES
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.transitions import sum_to

NEVER_SEEN = 1e-8
"""Share of an expert that no matched request visited: an order, but no hope."""
COVERED = 0.75
"""Cosine from which on a request counts as covered by the collection, as in the paper's bound."""


class EamCollection(Popularity):
    """The nearest collected activation matrix, row by row, as probabilities.

    Where a new matrix finds the collection full it takes the place of the most similar one, so that
    the collection stays diverse (the paper's variant). Nearer layers are read first, as in the
    paper, by the admission that orders all predictors' guesses. Before anything of a request is
    known, and while the collection is empty, popularity serves.
    """

    name = "eam"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._matrices = np.zeros(
            (COLLECTED_MATRICES, shape.num_layers, shape.num_experts), np.float32
        )
        self._norms = np.zeros(COLLECTED_MATRICES, dtype=np.float32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def matrices(self) -> np.ndarray:
        """``[number, L, E]`` float32, what was collected."""
        return self._matrices[: self._size]

    def fit(self, routes: Routes) -> None:
        """Collects the matrices of recorded requests in order."""
        super().fit(routes)
        self._size = 0
        for sequence in range(routes.num_sequences):
            self.finish(activation_counts(routes, sequence))

    def finish(self, counts_LE: np.ndarray) -> None:
        """Collects the matrix of a request that ended; an empty one is not worth a place."""
        norm = float(np.linalg.norm(counts_LE))
        if norm == 0.0:
            return
        place = self._size
        if self._size == COLLECTED_MATRICES:
            similarity = np.tensordot(self.matrices, counts_LE, axes=2) / self._norms
            place = int(np.argmax(similarity))
        else:
            self._size += 1
        self._matrices[place] = counts_LE
        self._norms[place] = norm

    def match(self, contexts: Contexts, now: int) -> tuple[np.ndarray, np.ndarray]:
        """Compares running requests (rEAM plus iEAM up to ``now``) with the collection.

        Returns:
            ``[B]`` index of the most similar matrix and its cosine; 0 where nothing is known.

        Raises:
            ValueError: the collection is empty.
        """
        if not self._size:
            raise ValueError("no activation matrix has been collected yet")
        dots = self._dots(contexts)
        square = np.square(contexts.counts).sum(axis=(1, 2))
        if now >= 0:
            known = contexts.path[:, : now + 1]
            layers = np.arange(now + 1)[:, None]
            inside = known < self.shape.num_experts
            experts = np.where(inside, known, 0)
            visited = self.matrices[:, layers, experts] * inside
            dots = dots + visited.sum(axis=(2, 3)).T
            rows = np.arange(len(contexts))[:, None, None]
            own = contexts.counts[rows, layers, experts]
            square = square + ((2.0 * own + 1.0) * inside).sum(axis=(1, 2))
        cosines = dots / np.maximum(np.sqrt(square)[:, None] * self._norms[: self._size], 1e-6)
        nearest = cosines.argmax(axis=1)
        return nearest, cosines[np.arange(len(cosines)), nearest]

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The matched matrix's row, normalised to K."""
        if not self._size:
            return super().estimate(contexts, now, layer)
        nearest, cosine = self.match(contexts, now)
        rows = self.matrices[nearest, layer]
        share = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1.0) + NEVER_SEEN
        chance = sum_to(share, self.shape.top_k)
        return np.where(cosine[:, None] > 0, chance, self.share_LE[layer])

    def coverage(self, routes: Routes) -> float:
        """Share of finished requests that have a collected matrix of cosine ``COVERED`` or more."""
        if not self._size or not routes.num_sequences:
            return 0.0
        other = EamCollection(self.shape)
        covered = 0
        for sequence in range(routes.num_sequences):
            other.fit(routes.select([sequence]))
            dots = np.tensordot(self.matrices, other.matrices[0], axes=2)
            cosine = dots / (self._norms[: self._size] * np.linalg.norm(other.matrices[0]))
            covered += bool(cosine.max() >= COVERED)
        return covered / routes.num_sequences

    def _dots(self, contexts: Contexts) -> np.ndarray:
        """Products with the rEAM: ``[B, number]``; the same for all layers of a step."""
        if self.name not in contexts.memo:
            flat = contexts.counts.reshape(len(contexts), -1)
            contexts.memo[self.name] = flat @ self.matrices.reshape(self._size, -1).T
        return contexts.memo[self.name]

    def learned(self) -> State:
        """Popularity and the matrices, once there is one."""
        return self.state() if self._size else {}

    def state(self) -> State:
        """``share`` of popularity and ``matrices``: ``[number, L, E]``."""
        return {**super().state(), "matrices": self.matrices.copy()}

    def restore(self, state: State) -> None:
        """Takes over both."""
        super().restore(state)
        matrices = take_matrices(state, self.shape, COLLECTED_MATRICES)
        self._size = len(matrices)
        self._matrices[: self._size] = matrices
        flat = matrices.reshape(len(matrices), self._matrices[0].size)
        self._norms[: self._size] = np.linalg.norm(flat, axis=1)


def activation_counts(routes: Routes, sequence: int) -> np.ndarray:
    """``[L, E]`` float32: tokens of a recorded request that visited each expert."""
    shape = routes.shape
    layers = np.arange(shape.num_layers)[:, None]
    ids = routes.expert_ids[routes.tokens_of(sequence)]
    counts = np.zeros((shape.num_layers, shape.num_experts + 1), np.float32)
    np.add.at(counts, (np.broadcast_to(layers, ids.shape[1:]), ids), 1.0)
    return counts[:, :-1]


def take_matrices(state: State, shape: Shape, capacity: int) -> np.ndarray:
    """The ``matrices`` of a state, verified: ``[number, L, E]`` float32.

    Raises:
        ValueError: they are missing, too many, of other sizes, empty or no counts.
    """
    sizes = (None, shape.num_layers, shape.num_experts)
    matrices = take_array(state, "matrices", "<f4", sizes)
    if len(matrices) > capacity or np.any(matrices < 0) or not matrices.any(axis=(1, 2)).all():
        raise ValueError(
            f"array 'matrices' must hold at most {capacity} matrices of counts, none empty"
        )
    return matrices
