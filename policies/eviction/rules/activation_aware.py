"""Activation-aware eviction: keeps what requests like the running ones activated.

MoE-Infinity (arXiv 2401.14361), after the paper: an activation matrix counts the tokens that a
request sent to each expert; the finished matrix most like the running one predicts the rest.

Legend: L layers, E experts of a layer, C stored matrices.
"""

from functools import partial

import numpy as np

from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.setting import Maker, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted, Routes, Shape
from moe_runtime.policies.prediction.eam import activation_counts, take_matrices
from moe_runtime.policies.prediction.estimator import State
from moe_runtime.policies.prediction.limits import COLLECTED_MATRICES

_NEVER_SEEN = 1e-3
"""Probability given to every expert, so that the unseen keep an order."""


class ActivationMatrices:
    """Scores experts by the activation matrix of the running requests and their nearest twins.

    Args:
        shape: the sizes of the model.
        capacity: finished matrices that are kept; a full collection replaces the one most like the
            newcomer, so that what is kept stays diverse.
        own_share: weight of the running request's own counts beside those of its twin. The paper
            uses the twin alone, which loses where a request's own past tells more.
        layer_decay: prefers early layers, which a prefetcher has least time for.
    """

    name = "activation-aware"

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        """Makes what orders experts by these scores."""
        matrices = cls(setting.shape)
        if setting.training is not None:
            matrices.fit(setting.training)
        return partial(Scored, matrices)

    def __init__(
        self,
        shape: Shape,
        *,
        capacity: int = COLLECTED_MATRICES,
        own_share: float = 0.5,
        layer_decay: bool = False,
    ) -> None:
        self._shape = shape
        layers, experts = shape.num_layers, shape.num_experts
        self._own_share = own_share
        self._stored = np.zeros((capacity, layers, experts), np.float32)
        self._num_stored = 0
        self._decay = np.ones(layers)
        if layer_decay:
            self._decay = 1 - np.arange(layers) / layers
        self._running: dict[int, np.ndarray] = {}
        self._sequences = np.zeros(0, np.int64)
        self._predicted = np.zeros((layers, experts))
        self._scores: dict[int, list[float]] = {}

    def observe(self, event: Event) -> None:
        """Counts a layer's tokens for their requests; matches at the beginning of a step."""
        if isinstance(event, LayerRouted):
            for sequence, experts in zip(self._sequences, event.expert_ids, strict=True):
                np.add.at(self._running[int(sequence)][event.layer], experts, 1)
            self._scores.pop(event.layer, None)
            return
        self._scores.clear()
        self._sequences = event.sequences
        shape = (self._stored.shape[1], self._stored.shape[2] + 1)
        for sequence in np.unique(event.sequences).tolist():
            self._running.setdefault(sequence, np.zeros(shape, np.float32))
        matrices = [self._running[s] for s in dict.fromkeys(event.sequences.tolist())]
        self._predicted = sum(map(self._predict, matrices), np.zeros(self._stored.shape[1:]))

    def finish(self, sequence: int) -> None:
        """Stores the matrix of a request that ended."""
        matrix = self._running.pop(sequence, None)
        self._scores.clear()
        if matrix is not None:
            self._collect(matrix[:, :-1])

    def fit(self, routes: Routes) -> None:
        """Collects the matrices of recorded requests in order."""
        for sequence in range(routes.num_sequences):
            self._collect(activation_counts(routes, sequence))

    def learned(self) -> State:
        """``matrices`` of requests that ended: ``[number, L, E]``, or nothing if there is none."""
        return {"matrices": self._stored[: self._num_stored]} if self._num_stored else {}

    def restore(self, state: State) -> None:
        """Takes over the matrices."""
        matrices = take_matrices(state, self._shape, len(self._stored))
        self._num_stored = len(matrices)
        self._stored[: self._num_stored] = matrices

    def scores(self, layer: int) -> list[float]:
        """``[E]`` probability of activation, with the layer's decay."""
        if layer not in self._scores:
            self._scores[layer] = self._mix(layer)
        return self._scores[layer]

    def _collect(self, counts_LE: np.ndarray) -> None:
        """Stores the matrix of a request; an empty one is not worth a place."""
        if not counts_LE.any():
            return
        place = self._num_stored
        if place < len(self._stored):
            self._num_stored += 1
        else:
            place = int(np.argmax(self._likeness(counts_LE)))
        self._stored[place] = counts_LE

    def _mix(self, layer: int) -> list[float]:
        own = sum(
            (_by_layer(matrix[layer : layer + 1, :-1])[0] for matrix in self._running.values()),
            np.zeros(self._stored.shape[2]),
        )
        share = self._own_share if self._num_stored else 1.0
        mixed = share * own + (1 - share) * self._predicted[layer]
        return ((mixed + _NEVER_SEEN) * self._decay[layer]).tolist()

    def _predict(self, matrix: np.ndarray) -> np.ndarray:
        if not self._num_stored or not matrix[:, :-1].any():
            return np.zeros(self._stored.shape[1:])
        return _by_layer(self._stored[int(np.argmax(self._likeness(matrix[:, :-1])))])

    def _likeness(self, matrix: np.ndarray) -> np.ndarray:
        """``[C]`` cosine of a matrix with every stored one."""
        stored = self._stored[: self._num_stored].reshape(self._num_stored, -1)
        lengths = np.sqrt(np.einsum("cx,cx->c", stored, stored))
        return stored @ matrix.ravel() / np.maximum(lengths, 1e-12)


def _by_layer(matrix: np.ndarray) -> np.ndarray:
    """Every row divided by its sum; rows without counts stay zero."""
    return matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1.0)
