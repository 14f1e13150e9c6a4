"""A small learned look-ahead from hidden states: the later gates, corrected by experience."""

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
        self.distances = max(1, min(MAX_GATE_DISTANCE, num_layers - 1))
        self.gates_LED = np.zeros((num_layers, num_experts, 0), dtype=np.float32)
        self.maps_DLXE = np.zeros((self.distances, num_layers, 0, num_experts), dtype=np.float32)
        self.offsets_DLE = np.zeros((self.distances, num_layers, num_experts), dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Refuses: routing alone holds no hidden states.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.name} learns from hidden states, which traces do not hold; give a model and a "
            "text instead"
        )

    def fit_hidden(self, routes: Routes, hidden_TLD: np.ndarray) -> None:
        """Learns from recorded hidden states; ``set_gates`` must have been called.

        The gate's part is folded into the map, so a call costs one product with the hidden state.

        Args:
            routes: where the tokens went.
            hidden_TLD: ``[T, L, D]`` what each layer's gate was given.

        Raises:
            ValueError: the gates are missing or of another width.
        """
        gates = self.gates_LED
        width = hidden_TLD.shape[2]
        if gates is None or gates.shape[2] != width:
            raise ValueError(f"expected the model's gates of width {width}; call set_gates first")
        Popularity.fit(self, routes)
        sizes = (self.distances, self.shape.num_layers, width, self.shape.num_experts)
        self.maps_DLXE = np.zeros(sizes, dtype=np.float32)
        for distance in range(1, self.distances + 1):
            for layer in range(distance, self.shape.num_layers):
                hidden = hidden_TLD[:, layer - distance].astype(np.float32)
                said = hidden @ gates[layer].T + self.bias_LE[layer]
                target = visits(routes.expert_ids[:, layer], self.shape.num_experts)
                fit = fit_logistic(said[:, None], hidden, target, seed=layer, epochs=EPOCHS)
                gate_weight = fit.aligned_F[0]
                at = (distance - 1, layer)
                self.maps_DLXE[at] = fit.dense_XE + gate_weight * gates[layer].T
                self.offsets_DLE[at] = fit.bias_E + gate_weight * self.bias_LE[layer]

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """One product with the hidden state; popularity where there is none."""
        distance = layer - now
        known = now >= 0 and contexts.hidden is not None and distance <= self.distances
        if not known or not self.maps_DLXE.shape[2]:
            return Popularity.estimate(self, contexts, now, layer)
        at = (distance - 1, layer)
        return sigmoid(contexts.hidden @ self.maps_DLXE[at] + self.offsets_DLE[at])

    def state(self) -> State:
        """``share`` of popularity, ``maps`` ``[distances, L, D, E]``, ``offsets``."""
        return {**super().state(), "maps": self.maps_DLXE, "offsets": self.offsets_DLE}

    def restore(self, state: State) -> None:
        """Takes over all three."""
        super().restore(state)
        num_layers, num_experts = self.shape.num_layers, self.shape.num_experts
        maps = take_array(state, "maps", "<f4", (self.distances, num_layers, None, num_experts))
        self.offsets_DLE = take_array(state, "offsets", "<f4", self.offsets_DLE.shape)
        self.maps_DLXE = maps
