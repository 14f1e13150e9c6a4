"""Next-gate look-ahead: the gates of later layers, asked about the hidden state of this one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_runtime.policies.prediction.base import Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.tracked import GUESSES_PER_CHOICE
from moe_runtime.policies.prediction.transitions import sum_to

MAX_GATE_DISTANCE = 3
"""Layers ahead for which a hidden state still says something; popularity serves beyond."""

HiddenScorer = Callable[[Any, int, int], np.ndarray]
"""Takes hidden states ``[B, D]``, a distance and the layer that many layers ahead; returns its
logits ``[B, E]`` float32. In what form hidden states come is up to who makes the scorer."""


HiddenRanker = Callable[[Any, int, int], list[list[int]]]
"""Takes the same; returns for each row the experts of largest logit, the largest first."""


class NextGate(Popularity):
    """Applies the gate of layer ``now + d`` to what the gate of layer ``now`` was given.

    A layer adds little to the residual stream, so the next gate's input resembles this one's (the
    speculative loading of Mixtral-offloading, HybriMoE's and Fate's look-ahead). Needs no training:
    only the model's own gates.

    Attributes:
        scorer: applies the gates; None while there are none.
        ranker: names the likeliest ``num_ranks`` experts, if there is a faster way than to sort
            what the scorer says.
        num_ranks: experts of a layer that are worth naming for a token.
        max_distance: layers ahead that the scorer serves.
    """

    name = "next-gate"
    needs_hidden = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.scorer: HiddenScorer | None = None
        self.ranker: HiddenRanker | None = None
        self.num_ranks = min(GUESSES_PER_CHOICE * shape.top_k, shape.num_experts)
        self.max_distance = MAX_GATE_DISTANCE

    def set_gates(self, gates_LED: np.ndarray, bias_LE: np.ndarray) -> None:
        """Takes the model's gates, float32, and hidden states as numpy arrays.

        Raises:
            ValueError: they are not of the model's shape.
        """
        sizes = (self.shape.num_layers, self.shape.num_experts)
        if gates_LED.ndim != 3 or gates_LED.shape[:2] != sizes or bias_LE.shape != sizes:
            raise ValueError(
                f"gates must be [{sizes[0]}, {sizes[1]}, D] with biases {sizes}, "
                f"got {gates_LED.shape} and {bias_LE.shape}"
            )

        def score(hidden_BD: Any, distance: int, layer: int) -> np.ndarray:
            return hidden_BD @ gates_LED[layer].T + bias_LE[layer]

        self.scorer = score

    def rank(self, hidden_BD: Any, distance: int, layer: int) -> list[list[int]]:
        """The likeliest experts of a layer for each row, best first; none without a scorer."""
        if self.ranker is not None:
            return self.ranker(hidden_BD, distance, layer)
        if self.scorer is None:
            return []
        logits_BE = self.scorer(hidden_BD, distance, layer)
        return (-logits_BE).argsort(axis=1, kind="stable")[:, : self.num_ranks].tolist()

    def hidden_logits(self, contexts: Contexts, now: int, layer: int) -> np.ndarray | None:
        """What the scorer says of the rows' hidden states; None where it has nothing to say."""
        is_near = now >= 0 and layer - now <= self.max_distance
        if self.scorer is None or contexts.hidden is None or not is_near:
            return None
        return self.scorer(contexts.hidden, layer - now, layer)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Softmax of the gate, scaled to K; popularity where there is no hidden state."""
        logits = self.hidden_logits(contexts, now, layer)
        if logits is None:
            return super().estimate(contexts, now, layer)
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        return sum_to(share, self.shape.top_k)
