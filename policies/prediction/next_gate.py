"""Next-gate look-ahead: the gates of later layers, asked about the hidden state of this one."""

import numpy as np

from moe_runtime.policies.prediction.base import Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.transitions import sum_to

MAX_GATE_DISTANCE = 3
"""Layers ahead for which a hidden state still says something; popularity serves beyond."""


class NextGate(Popularity):
    """Applies the gate of layer ``now + d`` to what the gate of layer ``now`` was given.

    A layer adds little to the residual stream, so the next gate's input resembles this one's (the
    speculative loading of Mixtral-offloading, HybriMoE's and Fate's look-ahead). Needs no training:
    only the model's own gates.
    """

    name = "next-gate"
    needs_hidden = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.gates_LED: np.ndarray | None = None
        self.bias_LE = np.zeros((shape.num_layers, shape.num_experts), dtype=np.float32)

    def set_gates(self, gates_LED: np.ndarray, bias_LE: np.ndarray) -> None:
        """Takes the model's gates, float32.

        Raises:
            ValueError: they are not of the model's shape.
        """
        sizes = (self.shape.num_layers, self.shape.num_experts)
        if gates_LED.ndim != 3 or gates_LED.shape[:2] != sizes or bias_LE.shape != sizes:
            raise ValueError(
                f"gates must be [{sizes[0]}, {sizes[1]}, D] with biases {sizes}, "
                f"got {gates_LED.shape} and {bias_LE.shape}"
            )
        self.gates_LED, self.bias_LE = gates_LED, bias_LE

    def gate_logits(self, contexts: Contexts, layer: int) -> np.ndarray | None:
        """What the gate of a layer says to the rows' hidden state; None where there is none."""
        if self.gates_LED is None or contexts.hidden is None:
            return None
        return contexts.hidden @ self.gates_LED[layer].T + self.bias_LE[layer]

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Softmax of the gate, scaled to K; popularity where there is no hidden state."""
        logits = None
        if now >= 0 and layer - now <= MAX_GATE_DISTANCE:
            logits = self.gate_logits(contexts, layer)
        if logits is None:
            return super().estimate(contexts, now, layer)
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        return sum_to(share, self.shape.top_k)
