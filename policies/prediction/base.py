"""The contract of a predictor: it watches the routing and guesses the experts of coming layers.

Legend: N tokens of a step, T tokens of many steps, L Mixture-of-Experts layers, E experts of a
layer, K experts that a token visits, D width of a hidden state. An expert id equal to E stands for
"not known".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moe_runtime.types import ExpertKey, ModelSignature

Guess = tuple[ExpertKey, float]  # An expert, and the probability that the running step visits it

LEAST_CHANCE = 0.1
"""Probability of a guess to be made: half of these are read. An expert without a guess may have it.
"""

COLLECTED_MATRICES = 120
"""Activation matrices that are kept; MoE-Infinity finds 120 enough for 290 tasks."""

REMEMBERED_TOKENS = 2048  # tokens among which similar moments are searched


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that a predictor is made for."""

    num_layers: int
    num_experts: int  # experts of the widest layer
    top_k: int  # experts that a token visits in a layer


def shape_of(signature: ModelSignature) -> Shape:
    return Shape(
        num_layers=signature.num_layers, num_experts=signature.num_experts, top_k=signature.top_k
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepBegins:
    """A forward pass begins; its tokens are known, its routing is not."""

    # ``[N]`` number of the request that each token belongs to; the tokens of one request stand
    # together, in the order of their positions
    sequences: np.ndarray
    token_ids: np.ndarray  # ``[N]`` ids in the vocabulary, -1 where there is none


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerRouted:
    """The gate of a layer has routed the tokens of the step."""

    layer: int  # index among the Mixture-of-Experts layers
    expert_ids: np.ndarray  # ``[N, K]`` in the gate's order; E where a slot is not used
    # ``[N, K]`` what the experts' outputs are multiplied by; may be empty for a predictor that
    # needs no history
    gate_weights: np.ndarray
    # ``[N, D]`` what the gate was given, in the form that the predictor's scorer takes; None where
    # only routing is known
    hidden: Any = None


Event = StepBegins | LayerRouted


class Predictor(Protocol):
    """Guesses the experts that coming layers visit.

    It has no clock and no random source, so equal events give equal guesses, live and replayed. It
    moves nothing; its caller decides what a guess is worth.
    """

    needs_history: bool  # it must see all events, also while no guesses are wanted

    def observe(self, event: Event) -> None: ...

    def predict(self, now: int, horizon: int) -> list[Guess]:
        """Guesses for the layers after one.

        Args:
            now: the last layer that was routed in the running step, -1 before the first one.
            horizon: how many layers to look ahead. Beyond the last layer come the first layers of
                the same requests' next tokens, which are not known yet.

        Returns:
            Guesses by layer in order of execution, likeliest first within a layer. Empty during a
            step that runs several tokens of one request: a prompt visits nearly every expert.
        """
        ...

    def finish(self, sequence: int) -> None:
        """Ends a request: learns from it, or forgets it."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Learns from the requests that it watches; another process may continue under its name."""

    @property
    def name(self) -> str: ...

    def finish(self, sequence: int) -> None:
        """Ends a request; does nothing if it does not run."""
        ...

    def learned(self) -> Mapping[str, np.ndarray]:
        """What finished requests taught; empty if nothing was learned."""
        ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Starts with the result of ``learned``."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """The paths of whole sequences through a model, for training and evaluation."""

    shape: Shape
    expert_ids: np.ndarray  # ``[T, L, K]`` int64 in the gate's order; E where nothing was recorded
    gate_weights: np.ndarray  # ``[T, L, K]`` float32, 0 where nothing was recorded
    token_ids: np.ndarray  # ``[T]`` int64, -1 where there is none
    offsets: np.ndarray  # ``[S + 1]`` int64; sequence ``s`` is ``offsets[s]:offsets[s + 1]``

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    def tokens_of(self, sequence: int) -> slice:
        return slice(int(self.offsets[sequence]), int(self.offsets[sequence + 1]))

    def counts(self, tokens: slice = slice(None)) -> np.ndarray:
        """``[L, E]`` int64: tokens that visited each expert."""
        width = self.shape.num_experts + 1
        layers = self.expert_ids[tokens].transpose(1, 0, 2)
        return np.stack([np.bincount(ids.ravel(), minlength=width)[:-1] for ids in layers])

    def select(self, sequences: Sequence[int]) -> "Routes":
        parts = [self.tokens_of(sequence) for sequence in sequences]
        rows = np.concatenate([np.arange(0), *(np.arange(p.start, p.stop) for p in parts)])
        rows = rows.astype(np.int64)
        lengths = [part.stop - part.start for part in parts]
        return Routes(
            shape=self.shape,
            expert_ids=self.expert_ids[rows],
            gate_weights=self.gate_weights[rows],
            token_ids=self.token_ids[rows],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )


def most_learned_bytes(shape: Shape) -> int:
    """Most bytes that one learner keeps for later processes: a full collection, and popularity."""
    return (COLLECTED_MATRICES + 1) * shape.num_layers * shape.num_experts * 4


def most_remembered_bytes(shape: Shape) -> int:
    """Most bytes that a policy and a predictor without training remember of a model's routing."""
    # a full ring of tokens: paths (uint8), followers (float32), ids
    ring = REMEMBERED_TOKENS * (shape.num_layers * (shape.num_experts + 1) * 5 + 5 * 8)
    return ring + 3 * most_learned_bytes(shape)


def keys_of(shape: Shape) -> list[list[ExpertKey]]:
    return [
        [ExpertKey(layer, expert) for expert in range(shape.num_experts)]
        for layer in range(shape.num_layers)
    ]
