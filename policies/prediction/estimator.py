"""Estimators: the probability of each expert, given what is known of a token."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape

_ROUNDED = 1e-5
"""Above 1 by float32: a quotient of two sums of up to 64 terms, each rounded by 2**-24."""
RECENT_RATES = (0.3, 0.05)
"""Weight of the newest token in the running means: the last few tokens, the last few dozen."""


@dataclass(kw_only=True, eq=False)
class Contexts:
    """The state of B sequences, each in the middle of one token.

    An estimator that predicts from layer ``now`` must not look at ``path`` beyond ``now``.
    """

    shape: Shape
    token_ids: np.ndarray  # ``[B]`` int64, -1 where not known
    previous_token_ids: np.ndarray  # ``[B]`` int64, the token before; -1 where not known
    num_tokens: np.ndarray  # ``[B]`` int64, tokens of the sequence before this one
    path: np.ndarray  # ``[B, L, K]`` int64, experts of the current token; E where not known
    path_weights: np.ndarray  # ``[B, L, K]`` float32, its gate weights
    previous: np.ndarray  # ``[B, L, K]`` int64, experts of the previous token
    recalled: np.ndarray  # ``[B, L, K]`` int64, of the sequence's last token with the same id
    counts: np.ndarray  # ``[B, L, E]`` float32, tokens of the sequence that visited each expert
    recent: np.ndarray  # ``[B, R, L, E]`` float32, running means with RECENT_RATES
    hidden: Any = None  # ``[B, D]`` what the gate of layer ``now`` was given, if that is known
    # what estimators derived from everything but ``path`` and ``hidden``, which alone change while
    # a step runs; by the estimator's name
    memo: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def rows(self, index: np.ndarray | slice) -> "Contexts":
        columns = {name: getattr(self, name)[index] for name in _COLUMNS}
        hidden = None if self.hidden is None else self.hidden[index]
        return replace(self, **columns, hidden=hidden, memo={})


_COLUMNS = [f.name for f in fields(Contexts) if f.name not in ("shape", "hidden", "memo")]


class SequenceState:
    """The memory of one sequence, updated with every token."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        size = (shape.num_layers, shape.num_experts)
        self.previous_token_id = -1
        self.num_tokens = 0
        self.unknown = np.full((shape.num_layers, shape.top_k), shape.num_experts, dtype=np.int64)
        self.previous = self.unknown
        self.counts = np.zeros(size, dtype=np.float32)
        self.recent = np.zeros((len(RECENT_RATES), *size), dtype=np.float32)
        self._rates = np.array(RECENT_RATES, dtype=np.float32)[:, None, None]
        self._layer_rows = np.arange(shape.num_layers)[:, None]
        self._paths: dict[int, np.ndarray] = {}

    def row(self, token_id: int) -> dict[str, Any]:
        """The columns of contexts for the next token, without its path and without copies."""
        return {
            "token_ids": token_id,
            "previous_token_ids": self.previous_token_id,
            "num_tokens": self.num_tokens,
            "previous": self.previous,
            "recalled": self._paths.get(token_id, self.unknown),
            "counts": self.counts,
            "recent": self.recent,
        }

    def append(self, token_id: int, path_LK: np.ndarray) -> None:
        """Adds a finished token; its path holds E where it is not known."""
        visited = np.zeros((self.shape.num_layers, self.shape.num_experts + 1), dtype=np.float32)
        visited[self._layer_rows, path_LK] = 1.0
        visited_LE = visited[:, :-1]
        self.counts += visited_LE
        self.recent += self._rates * (visited_LE - self.recent)
        self.num_tokens += 1
        self.previous = path_LK
        self.previous_token_id = token_id
        if token_id >= 0:
            self._paths[token_id] = path_LK


def contexts_of(routes: Routes, *, max_rows: int = 4096) -> Iterator[Contexts]:
    """The contexts of all tokens, in order, with their whole paths; ``max_rows`` at once."""
    rows: list[dict[str, np.ndarray]] = []
    for sequence in range(routes.num_sequences):
        state, tokens = SequenceState(routes.shape), routes.tokens_of(sequence)
        for token in range(tokens.start, tokens.stop):
            token_id = int(routes.token_ids[token])
            rows.append({name: np.copy(value) for name, value in state.row(token_id).items()})
            state.append(token_id, routes.expert_ids[token])
            if len(rows) == max_rows or token + 1 == routes.num_tokens:
                taken = slice(token + 1 - len(rows), token + 1)
                columns: dict[str, Any] = {
                    name: np.array([row[name] for row in rows]) for name in rows[0]
                }
                path, weights = routes.expert_ids[taken], routes.gate_weights[taken]
                yield Contexts(shape=routes.shape, path=path, path_weights=weights, **columns)
                rows = []


def stack_states(
    states: list[SequenceState], token_ids: np.ndarray, path: np.ndarray, path_weights: np.ndarray
) -> Contexts:
    """One row of contexts for each of several running sequences."""
    rows = [state.row(token) for state, token in zip(states, token_ids.tolist(), strict=True)]
    columns: dict[str, Any] = {
        name: np.asarray(value)[None] if len(rows) == 1 else np.array([row[name] for row in rows])
        for name, value in rows[0].items()
    }
    return Contexts(shape=states[0].shape, path=path, path_weights=path_weights, **columns)


State = Mapping[str, np.ndarray]
"""The learned arrays of an estimator, as its file holds them."""


class Kept(NamedTuple):
    """A learned array of numbers that an estimator keeps in its file."""

    attribute: str  # of the estimator; an axis of size 0 in a new one may have any size
    dtype: str = "<f4"
    is_chance: bool = False  # its numbers lie between 0 and 1


class Estimator(ABC):
    """Learned tables and a pure function of contexts."""

    name: ClassVar[str]  # its name on the command line and in files
    needs_hidden: ClassVar[bool] = False  # whether it reads hidden states, which traces do not hold
    kept: ClassVar[Mapping[str, Kept]] = {}  # what it learned, by the names in its file

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @abstractmethod
    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """``[B, E]`` float32: chances that tokens visit a layer's experts, by layers up to ``now``.

        A row sums to about K.
        """

    def checked_estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """As `estimate`, whose code may be a user's."""
        chance_BE = self.estimate(contexts, now, layer)
        shape, expected = np.shape(chance_BE), (len(contexts), self.shape.num_experts)
        found = f"shape {shape}"
        if shape == expected:
            low, high = np.min(chance_BE), np.max(chance_BE)
            if low >= 0 and high <= 1 + _ROUNDED:  # NaN is neither
                return chance_BE
            found = f"{low:g} to {high:g}" if np.isfinite([low, high]).all() else "NaN or infinity"
        raise ValueError(
            f"{type(self).__name__}.estimate must give probabilities from 0 to 1 of shape "
            f"{expected}, got {found}"
        )

    def guess(
        self, contexts: Contexts, now: int, layers: range, width: int, least: float = 0.0
    ) -> tuple[list[int], list[float]]:
        """The experts of each layer that any of the tokens most probably visits, likeliest first:
        layer times E plus expert, and probabilities. At most ``width`` of each layer, with at least
        ``least``."""
        numbers, chances = list[int](), list[float]()
        for layer in layers:
            chance_E = of_any(self.checked_estimate(contexts, now, layer))
            best = np.argsort(-chance_E, kind="stable")[:width]
            best = best[chance_E[best] >= least]
            numbers += (layer * self.shape.num_experts + best).tolist()
            chances += chance_E[best].tolist()
        return numbers, chances

    def fit(self, routes: Routes) -> None:  # noqa: B027  (optional, as is the next)
        """Learns from recorded sequences; forgets earlier ones."""

    def finish(self, counts_LE: np.ndarray) -> None:  # noqa: B027
        """Learns from the activation counts of a request that just ended."""

    def learned(self) -> State:
        """What running requests taught; empty if only recordings teach."""
        return {}

    def state(self) -> State:
        """All learned arrays, for a file."""
        return {name: getattr(self, kept.attribute) for name, kept in self.kept.items()}

    @classmethod
    def from_state(cls, shape: Shape, state: State) -> Self:
        estimator = cls(shape)
        estimator.restore(state)
        return estimator

    def restore(self, state: State) -> None:
        """Takes the result of ``state``; ValueError if an array is not sound."""
        for name, kept in self.kept.items():
            axes = tuple(size or None for size in getattr(self, kept.attribute).shape)
            array = take_array(state, name, kept.dtype, axes)
            if kept.is_chance and (np.any(array < 0) or np.any(array > 1)):
                raise ValueError(f"array {name!r} must hold numbers from 0 to 1")
            setattr(self, kept.attribute, array)


class Popularity(Estimator):
    """The share of all recorded tokens that visited an expert: the fallback of others."""

    name = "popularity"
    kept: ClassVar = {"share": Kept("share_LE", is_chance=True)}  # [L, E]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        even = shape.top_k / shape.num_experts
        self.share_LE = np.full((shape.num_layers, shape.num_experts), even, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        self.share_LE = popularity_of(routes)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        return np.broadcast_to(self.share_LE[layer], (len(contexts), self.shape.num_experts))


def take_array(state: State, name: str, dtype: str, axes: tuple[int | None, ...]) -> np.ndarray:
    array = state.get(name)
    if array is None:
        raise ValueError(f"array {name!r} is missing")
    fits = len(array.shape) == len(axes) and all(
        expected in (None, size) for expected, size in zip(axes, array.shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not fits:
        raise ValueError(
            f"array {name!r} must be {dtype} of shape {axes}, got {array.dtype} {array.shape}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"array {name!r} holds numbers that are not finite")
    return array


def visits(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Marks visited experts: ``[..., K]`` ids to ``[..., E]`` float32 of 0 and 1."""
    marks = np.zeros((*ids.shape[:-1], num_experts + 1), dtype=np.float32)
    np.put_along_axis(marks, ids, 1.0, axis=-1)
    return marks[..., :-1]


def popularity_of(routes: Routes, prior: float = 1.0) -> np.ndarray:
    """Share of tokens that visit each expert: ``[L, E]`` float32, smoothed towards ``K / E``."""
    shape = routes.shape
    layers = routes.expert_ids.transpose(1, 0, 2)
    # an expert that is chosen twice by a token counts once
    counts = np.stack([visits(ids, shape.num_experts).sum(axis=0) for ids in layers])
    known = (routes.expert_ids < shape.num_experts).any(axis=2).sum(axis=0)[:, None]
    even = shape.top_k / shape.num_experts
    return ((counts.astype(np.float64) + prior * even) / (known + prior)).astype(np.float32)


def log_odds(probability: np.ndarray) -> np.ndarray:
    """``log(p / (1 - p))``, bounded: probabilities from counts are never certain."""
    bounded = np.clip(probability, 1e-4, 1.0 - 1e-4)
    return np.log(bounded / (1.0 - bounded))


def of_any(chance_BE: np.ndarray) -> np.ndarray:
    """The probability that at least one of the tokens visits an expert: ``[E]``."""
    return chance_BE[0] if len(chance_BE) == 1 else 1.0 - np.prod(1.0 - chance_BE, axis=0)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The inverse of ``log_odds``, in float32 without overflow."""
    return (0.5 * np.tanh(0.5 * logits) + 0.5).astype(np.float32)


def pair_counts(first_TK: np.ndarray, then_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """``[E, E]``: how often a token has one expert in the first list and one in the second."""
    width = num_experts + 1
    codes = first_TK[:, :, None] * width + then_TK[:, None, :]
    counts = np.bincount(codes.ravel(), minlength=width * width).reshape(width, width)
    return counts[:num_experts, :num_experts].astype(np.float32)


def visit_counts(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """``[E]``: rows with each expert."""
    return np.bincount(ids_TK.ravel(), minlength=num_experts + 1)[:num_experts].astype(np.float32)
