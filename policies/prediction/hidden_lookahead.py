"""A small learned look-ahead from hidden states: the later gates, corrected by experience."""

from typing import Any

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import State, sigmoid, take_array, visits
from moe_runtime.policies.prediction.logistic import fit_logistic
from moe_runtime.policies.prediction.next_gate import MAX_GATE_DISTANCE, NextGate
from moe_runtime.policies.prediction.popularity import Popularity

EPOCHS = 12


class HiddenLookahead(NextGate):
    """Logistic regression on the hidden state and on what the later layer's gate says to it.

    One set of weights for each layer and distance up to ``MAX_GATE_DISTANCE``. It starts from the
    next gate (whose logit is one feature) and learns what the layers between change on average.
    """

    name = "hidden-lookahead"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self.max_distance = max(1, min(MAX_GATE_DISTANCE, num_layers - 1))
        self.maps_DLEX = np.zeros((self.max_distance, num_layers, num_experts, 0), np.float32)
        self.offsets_DLE = np.zeros((self.max_distance, num_layers, num_experts), np.float32)

    def fit(self, routes: Routes) -> None:
        """Refuses: routing alone holds no hidden states.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.name} learns from hidden states, which traces do not hold; give a model and a "
            "text instead"
        )

    def fit_hidden(
        self, routes: Routes, hidden_TLD: np.ndarray, gates_LED: np.ndarray, bias_LE: np.ndarray
    ) -> None:
        """Learns from recorded hidden states.

        The gate's part is folded into the map, so a call costs one product with the hidden state.

        Args:
            routes: where the tokens went.
            hidden_TLD: ``[T, L, D]`` what each layer's gate was given.
            gates_LED: the model's gates, float32.
            bias_LE: their biases.

        Raises:
            ValueError: the gates are of another shape or width.
        """
        width = hidden_TLD.shape[2]
        sizes = (self.shape.num_layers, self.shape.num_experts)
        if gates_LED.shape != (*sizes, width) or bias_LE.shape != sizes:
            raise ValueError(
                f"expected gates {(*sizes, width)} with biases {sizes}, got {gates_LED.shape} and "
                f"{bias_LE.shape}"
            )
        Popularity.fit(self, routes)
        self.maps_DLEX = np.zeros((self.max_distance, *sizes, width), dtype=np.float32)
        for distance in range(1, self.max_distance + 1):
            for layer in range(distance, self.shape.num_layers):
                hidden = hidden_TLD[:, layer - distance].astype(np.float32)
                said = hidden @ gates_LED[layer].T + bias_LE[layer]
                target = visits(routes.expert_ids[:, layer], self.shape.num_experts)
                fit = fit_logistic(said[:, None], hidden, target, seed=layer, epochs=EPOCHS)
                gate_weight = fit.aligned_F[0]
                at = (distance - 1, layer)
                self.maps_DLEX[at] = fit.dense_XE.T + gate_weight * gates_LED[layer]
                self.offsets_DLE[at] = fit.bias_E + gate_weight * bias_LE[layer]
        self.scorer = self._score

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """One product with the hidden state; popularity where there is none."""
        logits = self.hidden_logits(contexts, now, layer)
        if logits is None:
            return Popularity.estimate(self, contexts, now, layer)
        return sigmoid(logits)

    def state(self) -> State:
        """``share`` of popularity, ``maps`` ``[distances, L, E, D]``, ``offsets``."""
        return {**super().state(), "maps": self.maps_DLEX, "offsets": self.offsets_DLE}

    def restore(self, state: State) -> None:
        """Takes over all three."""
        super().restore(state)
        sizes = (self.max_distance, self.shape.num_layers, self.shape.num_experts)
        self.maps_DLEX = take_array(state, "maps", "<f4", (*sizes, None))
        self.offsets_DLE = take_array(state, "offsets", "<f4", sizes)
        self.scorer = self._score

    def _score(self, hidden_BD: Any, distance: int, layer: int) -> np.ndarray:
        at = (distance - 1, layer)
        return hidden_BD @ self.maps_DLEX[at].T + self.offsets_DLE[at]
