"""Predictors from hidden states: gates of later layers, applied to the input of an earlier one."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from moe_runtime.policies.prediction.base import (
    Event,
    Guess,
    LayerRouted,
    Predictor,
    Routes,
    Shape,
    StepBegins,
    keys_of,
)
from moe_runtime.policies.prediction.estimator import (
    Contexts,
    Estimator,
    Kept,
    Popularity,
    State,
    sigmoid,
    visits,
)
from moe_runtime.policies.prediction.logistic import fit_logistic
from moe_runtime.policies.prediction.tables import sum_to
from moe_runtime.policies.prediction.tracked import GUESSES_PER_CHOICE, TrackedPredictor

MAX_GATE_DISTANCE = 3
"""Layers ahead for which a hidden state is of use; popularity serves beyond."""

HiddenScorer = Callable[[Any, int, int], np.ndarray]
"""Takes hidden states ``[B, D]``, a distance and the layer at that distance; returns logits ``[B,
E]`` float32. The form of the hidden states is up to the scorer."""


HiddenRanker = Callable[[Any, int, int], list[list[int]]]
"""Takes the same; returns the experts of largest logit for each row, largest first."""

PRIOR = 8.0  # lists of all layers together weigh as much as so many of the layer's own
REMEMBERED = 0.97
"""Decay of older lists with each new one of a layer: the last thirty or so count."""

EPOCHS = 12


class NextGate(Popularity):
    """Applies the gate of layer ``now + d`` to the input of the gate of layer ``now``.

    A layer adds little to the residual stream, so the next gate's input resembles this one's (the
    speculative loading of Mixtral-offloading, HybriMoE's and Fate's look-ahead). Needs no training.

    Attributes:
        scorer: applies the gates; None while there are none.
        ranker: names the likeliest ``num_ranks`` experts faster than by sorting scores, if given.
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
        """Takes the model's gates in float32; hidden states are then numpy arrays."""
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
        """The scorer's logits for the rows' hidden states; None without a scorer, states, or near
        layer."""
        is_near = now >= 0 and layer - now <= self.max_distance
        if self.scorer is None or contexts.hidden is None or not is_near:
            return None
        return self.scorer(contexts.hidden, layer - now, layer)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Softmax of the gate, scaled to K; popularity without a hidden state."""
        logits = self.hidden_logits(contexts, now, layer)
        if logits is None:
            return super().estimate(contexts, now, layer)
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        return sum_to(share, self.shape.top_k)


class HiddenLookahead(NextGate):
    """Logistic regression on the hidden state and on the logits of the later layer's gate for it.

    One set of weights for each layer and distance. It starts from the next gate, whose logit is one
    feature, and learns what the layers between change on average.
    """

    name = "hidden-lookahead"
    kept: ClassVar = {
        **NextGate.kept,
        "maps": Kept("maps_DLEX"),  # [distances, L, E, D]
        "offsets": Kept("offsets_DLE"),  # [distances, L, E]
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self.max_distance = max(1, min(MAX_GATE_DISTANCE, num_layers - 1))
        self.maps_DLEX = np.zeros((self.max_distance, num_layers, num_experts, 0), np.float32)
        self.offsets_DLE = np.zeros((self.max_distance, num_layers, num_experts), np.float32)

    def fit(self, routes: Routes) -> None:
        """Raises ValueError: routing alone has no hidden states."""
        raise ValueError(
            f"{self.name} learns from hidden states, which traces do not hold; give a model and a "
            "text instead"
        )

    def fit_hidden(
        self, routes: Routes, hidden_TLD: np.ndarray, gates_LED: np.ndarray, bias_LE: np.ndarray
    ) -> None:
        """Learns from recorded hidden states.

        Args:
            hidden_TLD: ``[T, L, D]`` what each layer's gate was given.
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
        logits = self.hidden_logits(contexts, now, layer)
        if logits is None:
            return Popularity.estimate(self, contexts, now, layer)
        return sigmoid(logits)

    def restore(self, state: State) -> None:
        super().restore(state)
        self.scorer = self._score

    def _score(self, hidden_BD: Any, distance: int, layer: int) -> np.ndarray:
        at = (distance - 1, layer)
        return hidden_BD @ self.maps_DLEX[at].T + self.offsets_DLE[at]


class RankRecord:
    """Turns ranks of experts into probabilities, by how often each rank was right.

    How often the expert of each rank was visited is counted while the model runs, for each layer
    and distance; layers with short records borrow from the others. At first ``top_k`` ranks are
    believed.
    """

    def __init__(self, num_layers: int, num_ranks: int, top_k: int) -> None:
        self._all = [PRIOR * believed for believed in believed_at_first(num_ranks, top_k)]
        self._all_lists = PRIOR
        self._right = [[0.0] * num_ranks for _ in range(num_layers)]
        self._lists = [0.0] * num_layers

    def probabilities(self, layer: int) -> list[float]:
        """The share of visited experts at each rank."""
        scale = PRIOR / self._all_lists
        total = self._lists[layer] + PRIOR
        right = zip(self._right[layer], self._all, strict=True)
        return [(own + scale * every) / total for own, every in right]

    def judge(self, layer: int, hits: list[bool]) -> None:
        own, every = self._right[layer], self._all
        for rank, hit in enumerate(hits):
            own[rank] = own[rank] * REMEMBERED + hit
            every[rank] = every[rank] * REMEMBERED + hit
        self._lists[layer] = self._lists[layer] * REMEMBERED + 1.0
        self._all_lists = self._all_lists * REMEMBERED + 1.0


def believed_at_first(num_ranks: int, top_k: int) -> list[float]:
    """The probability of each rank before anything is known: 1 for the first K."""
    return [1.0 if rank < top_k else 0.0 for rank in range(num_ranks)]


class LookaheadPredictor:
    """A ``Predictor`` made of an estimator that reads hidden states; it guesses nothing before the
    first layer.

    The softmax of a later gate is no probability: ranks are judged while it runs (`RankRecord`).
    """

    needs_history = False

    def __init__(self, estimator: NextGate) -> None:
        self.estimator = estimator
        shape = self.shape = estimator.shape
        self._records = [
            RankRecord(shape.num_layers, estimator.num_ranks, shape.top_k)
            for _ in range(estimator.max_distance)
        ]
        self._keys = keys_of(shape)
        self._hidden: Any = None
        self._is_prompt = True
        self._made: dict[tuple[int, int], list[list[int]]] = {}  # layer, distance: ranked experts

    def observe(self, event: Event) -> None:
        """Keeps the hidden states of a layer, and counts which guesses for it were right."""
        if isinstance(event, StepBegins):
            self._is_prompt = len(set(event.sequences.tolist())) < len(event.sequences)
            self._hidden = None
            self._made.clear()
            return
        self._hidden = None if self._is_prompt else event.hidden
        if self._made:
            self._judge(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        hidden = self._hidden
        if hidden is None or now < 0:
            return []
        guesses: list[Guess] = []
        furthest = min(horizon, len(self._records), self.shape.num_layers - 1 - now)
        for distance in range(1, furthest + 1):
            layer = now + distance
            ranked = self.estimator.rank(hidden, distance, layer)
            if not ranked:
                break
            self._made[layer, distance] = ranked
            chances = self._records[distance - 1].probabilities(layer)
            guesses += self._guesses(layer, ranked, chances)
        return guesses

    def finish(self, sequence: int) -> None:
        pass

    def _judge(self, event: LayerRouted) -> None:
        visited: list[set[int]] | None = None
        for distance in range(1, len(self._records) + 1):
            ranked = self._made.pop((event.layer, distance), None)
            if ranked is None:
                continue
            visited = visited or [set(row) for row in event.expert_ids.tolist()]
            record = self._records[distance - 1]
            for experts, truth in zip(ranked, visited, strict=True):
                record.judge(event.layer, [expert in truth for expert in experts])

    def _guesses(self, layer: int, ranked: list[list[int]], chances: list[float]) -> list[Guess]:
        keys = self._keys[layer]
        if len(ranked) == 1:
            return [(keys[e], p) for e, p in zip(ranked[0], chances, strict=True)]
        missed: dict[int, float] = {}
        for experts in ranked:
            for expert, chance in zip(experts, chances, strict=True):
                missed[expert] = missed.get(expert, 1.0) * (1.0 - chance)
        likeliest = sorted(missed.items(), key=lambda item: (item[1], item[0]))
        return [(keys[expert], 1.0 - chance) for expert, chance in likeliest]


def make_predictor(estimator: Estimator) -> Predictor:
    """Makes the predictor that fits an estimator."""
    if isinstance(estimator, NextGate):
        return LookaheadPredictor(estimator)
    return TrackedPredictor(estimator)
