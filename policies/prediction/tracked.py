"""An estimator at work: it remembers the running sequences and turns numbers into guesses."""

import numpy as np

from moe_runtime.policies.prediction.base import (
    Event,
    Guess,
    LayerRouted,
    Shape,
    StepBegins,
)
from moe_runtime.policies.prediction.context import Contexts, SequenceState, stack_states
from moe_runtime.policies.prediction.estimator import Estimator
from moe_runtime.types import ExpertKey

GUESSES_PER_CHOICE = 2
"""Guesses for a layer: this many times K for one token, up to all experts for many."""


class TrackedPredictor:
    """A ``Predictor`` made of an estimator and the memory of every running sequence.

    Not thread-safe. Equal events give equal guesses.
    """

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.shape: Shape = estimator.shape
        self._states: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._rows = np.zeros(0, dtype=np.int64)  # row of _running that each token belongs to
        self._is_prompt = False
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._path = np.zeros((0, 0, 0), dtype=np.int64)
        self._weights = np.zeros((0, 0, 0), dtype=np.float32)
        self._hidden: np.ndarray | None = None
        self._keys = [
            [ExpertKey(layer, expert) for expert in range(self.shape.num_experts)]
            for layer in range(self.shape.num_layers)
        ]

    def observe(self, event: Event) -> None:
        """Takes note of a step's tokens or of a layer's routing.

        Raises:
            ValueError: a layer's event has another number of tokens than its step, or the layer
                does not exist.
        """
        if isinstance(event, StepBegins):
            self._begin(event)
        else:
            self._route(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        """See ``Predictor.predict``."""
        if self._is_prompt or not self._running:
            return []
        num_layers = self.shape.num_layers
        guesses: list[Guess] = []
        contexts = self._contexts()
        for layer in range(now + 1, min(now + horizon + 1, num_layers)):
            guesses += self._guesses(contexts, now, layer)
        beyond = min(now + horizon + 1 - num_layers, num_layers)
        if beyond > 0:
            following = self._next_tokens()
            for layer in range(beyond):
                guesses += self._guesses(following, -1, layer)
        return guesses

    def finish(self, sequence: int) -> None:
        """Forgets a request, and lets the estimator learn from its counts."""
        self._commit()
        state = self._states.pop(sequence, None)
        if state is not None:
            self.estimator.finish(state.counts)

    def _begin(self, event: StepBegins) -> None:
        self._commit()
        sequences = np.asarray(event.sequences)
        names, first, rows = np.unique(sequences, return_index=True, return_inverse=True)
        for name in names.tolist():
            if name not in self._states:
                self._states[name] = SequenceState(self.shape)
        self._running = [self._states[name] for name in names.tolist()]
        self._rows = rows.reshape(-1)
        self._is_prompt = len(first) < len(sequences)
        self._token_ids = np.asarray(event.token_ids, dtype=np.int64)
        size = (len(sequences), self.shape.num_layers, self.shape.top_k)
        self._path = np.full(size, self.shape.num_experts, dtype=np.int64)
        self._weights = np.zeros(size, dtype=np.float32)
        self._hidden = None

    def _route(self, event: LayerRouted) -> None:
        num_tokens, top_k = event.expert_ids.shape
        fits = num_tokens == len(self._path) and 0 < top_k <= self.shape.top_k
        if not fits or not 0 <= event.layer < self.shape.num_layers:
            raise ValueError(
                f"layer {event.layer} with expert_ids {event.expert_ids.shape} does not fit a step "
                f"of {len(self._path)} tokens, {self.shape.num_layers} layers, "
                f"top {self.shape.top_k}"
            )
        self._path[:, event.layer, :top_k] = event.expert_ids
        self._weights[:, event.layer, :top_k] = event.gate_weights
        self._hidden = event.hidden

    def _commit(self) -> None:
        """Adds the tokens of the step that ends to their sequences."""
        for token, row in enumerate(self._rows.tolist()):
            self._running[row].append(int(self._token_ids[token]), self._path[token])
        self._rows = np.zeros(0, dtype=np.int64)
        self._running = []

    def _contexts(self) -> Contexts:
        if len(self._running) == 1:
            return stack_states(
                self._running, self._token_ids, self._path, self._weights, self._hidden
            )
        order = np.argsort(self._rows)  # states stand in the order of their names
        return stack_states(
            self._running,
            self._token_ids[order],
            self._path[order],
            self._weights[order],
            None if self._hidden is None else self._hidden[order],
        )

    def _next_tokens(self) -> Contexts:
        """Contexts of the tokens after the running ones: nothing of them is known."""
        now = self._contexts()
        unknown = np.full_like(now.path, self.shape.num_experts)
        return Contexts(
            shape=self.shape,
            token_ids=np.full_like(now.token_ids, -1),
            previous_token_ids=now.token_ids,
            num_tokens=now.num_tokens,
            path=unknown,
            path_weights=np.zeros_like(now.path_weights),
            previous=now.path,
            recalled=unknown,
            counts=now.counts,
            recent=now.recent,
        )

    def _guesses(self, contexts: Contexts, now: int, layer: int) -> list[Guess]:
        chance_BE = self.estimator.estimate(contexts, now, layer)
        alone = len(chance_BE) == 1
        chance_E = chance_BE[0] if alone else 1.0 - np.prod(1.0 - chance_BE, axis=0)
        width = min(GUESSES_PER_CHOICE * self.shape.top_k * len(chance_BE), len(chance_E))
        best = np.argsort(-chance_E, kind="stable")[:width]
        keys = self._keys[layer]
        return [(keys[e], p) for e, p in zip(best.tolist(), chance_E[best].tolist(), strict=True)]
