"""A predictor made of an estimator and the memory of the running sequences."""

from dataclasses import replace

import numpy as np

from moe_runtime.policies.prediction.base import (
    LEAST_CHANCE,
    Event,
    Guess,
    LayerRouted,
    Shape,
    StepBegins,
    keys_of,
)
from moe_runtime.policies.prediction.estimator import (
    Contexts,
    Estimator,
    SequenceState,
    State,
    of_any,
    stack_states,
)

GUESSES_PER_CHOICE = 2
"""Guesses for a layer: so many times K for each token, up to all experts."""


class TrackedPredictor:
    """A ``Predictor`` made of an estimator and the memory of every running sequence."""

    needs_history = True

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.shape: Shape = estimator.shape
        self._states: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._tokens_of: list[np.ndarray] = []  # rows of the step, for each of _running
        self._order = np.zeros(0, dtype=np.int64)
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._path = np.zeros((0, 0, 0), dtype=np.int64)
        self._weights = np.zeros((0, 0, 0), dtype=np.float32)
        self._contexts: Contexts | None = None
        self._following: Contexts | None = None  # the next tokens, once predicted for
        self._keys = [key for layer in keys_of(self.shape) for key in layer]

    def observe(self, event: Event) -> None:
        if isinstance(event, StepBegins):
            self._begin(event)
        else:
            self._route(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        contexts = self._contexts
        if contexts is None:
            return []
        num_layers = self.shape.num_layers
        guesses = self._guesses(contexts, now, range(now + 1, min(now + horizon + 1, num_layers)))
        beyond = min(now + horizon + 1 - num_layers, num_layers)
        if beyond > 0:
            # unless the horizon is wide, those layers of this step were routed before it was made
            following = self._following if 2 * horizon <= num_layers + 1 else None
            following = self._following = following or self._next_tokens(contexts)
            guesses += self._guesses(following, -1, range(beyond))
        return guesses

    def chances(self, now: int, layer: int) -> np.ndarray:
        """``[E]``: probabilities that the next token at a layer visits its experts; 0 during a
        prompt."""
        contexts = self._contexts
        if contexts is None:
            return np.zeros(self.shape.num_experts, np.float32)
        if layer > now:
            return of_any(self.estimator.checked_estimate(contexts, now, layer))
        return of_any(self.estimator.checked_estimate(self._next_tokens(contexts), -1, layer))

    def finish(self, sequence: int) -> None:
        """Forgets a request, and lets the estimator learn from its counts."""
        self._commit()
        state = self._states.pop(sequence, None)
        if state is not None:
            self.estimator.finish(state.counts)

    @property
    def name(self) -> str:
        return self.estimator.name

    def learned(self) -> State:
        return self.estimator.learned()

    def restore(self, state: State) -> None:
        self.estimator.restore(state)

    def _begin(self, event: StepBegins) -> None:
        self._commit()
        names, first = np.unique(np.asarray(event.sequences), return_index=True)
        for name in names.tolist():
            if name not in self._states:
                self._states[name] = SequenceState(self.shape)
        running = [self._states[name] for name in names.tolist()]
        # tokens in the order of their requests' numbers, each request's in order of position
        self._order = np.argsort(event.sequences, kind="stable")
        num_tokens = len(self._order)
        bounds = np.searchsorted(np.asarray(event.sequences)[self._order], names, side="right")
        tokens_of = np.split(np.arange(num_tokens), bounds[:-1])
        self._token_ids = np.asarray(event.token_ids, dtype=np.int64)[self._order]
        size = (num_tokens, self.shape.num_layers, self.shape.top_k)
        self._path = np.full(size, self.shape.num_experts, dtype=np.int64)
        self._weights = np.zeros(size, dtype=np.float32)
        # set last: an exception may strike before
        self._running, self._tokens_of = running, tokens_of
        if len(first) == num_tokens:
            self._contexts = stack_states(self._running, self._token_ids, self._path, self._weights)

    def _route(self, event: LayerRouted) -> None:
        num_tokens, top_k = event.expert_ids.shape
        fits = num_tokens == len(self._path) and 0 < top_k <= self.shape.top_k
        if not fits or not 0 <= event.layer < self.shape.num_layers:
            raise ValueError(
                f"layer {event.layer} with expert_ids {event.expert_ids.shape} does not fit a step "
                f"of {len(self._path)} tokens, {self.shape.num_layers} layers, "
                f"top {self.shape.top_k}"
            )
        # one token needs no order, which would take as long as a guess
        order = self._order if num_tokens > 1 else slice(None)
        self._path[:, event.layer, :top_k] = event.expert_ids[order]
        self._weights[:, event.layer, :top_k] = event.gate_weights[order]
        if self._contexts is not None:
            self._contexts.hidden = None if event.hidden is None else event.hidden[order]

    def _commit(self) -> None:
        """Appends the tokens of the last step to their sequences."""
        running, tokens_of = self._running, self._tokens_of
        self._running, self._tokens_of = [], []
        self._contexts = self._following = None
        for state, tokens in zip(running, tokens_of, strict=True):
            for token in tokens.tolist():
                state.append(int(self._token_ids[token]), self._path[token])

    def _next_tokens(self, now: Contexts) -> Contexts:
        """Contexts of the tokens after the running ones, of which nothing is known."""
        unknown = np.full_like(now.path, self.shape.num_experts)
        return replace(
            now,
            token_ids=np.full_like(now.token_ids, -1),
            previous_token_ids=now.token_ids,
            path=unknown,
            path_weights=np.zeros_like(now.path_weights),
            previous=now.path,
            recalled=unknown,
            hidden=None,
            memo={},
        )

    def _guesses(self, contexts: Contexts, now: int, layers: range) -> list[Guess]:
        shape = self.shape
        if not layers:
            return []
        width = min(GUESSES_PER_CHOICE * shape.top_k * len(contexts), shape.num_experts)
        best, chances = self.estimator.guess(contexts, now, layers, width, LEAST_CHANCE)
        return list(zip(map(self._keys.__getitem__, best), chances, strict=True))
