"""What predictors differ in: how probable each expert is, given what is known of a token."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts

State = Mapping[str, np.ndarray]
"""Everything an estimator learned, as plain arrays of numbers: what its file holds."""


class Kept(NamedTuple):
    """An array of numbers that an estimator learned, and keeps in its file."""

    attribute: str  # of the estimator; an axis that is 0 in a new one may have any size
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
        """Probability that each row's token visits each expert of a layer.

        Returns:
            ``[B, E]`` float32 in [0, 1]; a row sums to about K.
        """

    def fit(self, routes: Routes) -> None:  # noqa: B027  (optional, as is the next)
        """Learns from recorded sequences; what was learned before is forgotten."""

    def finish(self, counts_LE: np.ndarray) -> None:  # noqa: B027
        """Learns from the activation counts of a request that just ended, while running."""

    def learned(self) -> State:
        """What requests taught while running; nothing where only recordings teach."""
        return {}

    def state(self) -> State:
        """Everything learned, to be written to a file."""
        return {name: getattr(self, kept.attribute) for name, kept in self.kept.items()}

    @classmethod
    def from_state(cls, shape: Shape, state: State) -> Self:
        """The estimator whose ``state`` this is."""
        estimator = cls(shape)
        estimator.restore(state)
        return estimator

    def restore(self, state: State) -> None:
        """Takes over what ``state`` returned."""
        for name, kept in self.kept.items():
            axes = tuple(size or None for size in getattr(self, kept.attribute).shape)
            array = take_array(state, name, kept.dtype, axes)
            if kept.is_chance and (np.any(array < 0) or np.any(array > 1)):
                raise ValueError(f"array {name!r} must hold numbers from 0 to 1")
            setattr(self, kept.attribute, array)


class Popularity(Estimator):
    """The share of all recorded tokens that visited an expert, whatever the token is.

    The floor that every other predictor has to beat, and what they fall back to.
    """

    name = "popularity"
    kept: ClassVar = {"share": Kept("share_LE", is_chance=True)}  # [L, E]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        even = shape.top_k / shape.num_experts
        self.share_LE = np.full((shape.num_layers, shape.num_experts), even, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        self.share_LE = popularity_of(routes)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The same for every row."""
        return np.broadcast_to(self.share_LE[layer], (len(contexts), self.shape.num_experts))


def take_array(state: State, name: str, dtype: str, axes: tuple[int | None, ...]) -> np.ndarray:
    """One array of a state, verified."""
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
    counts = np.zeros((shape.num_layers, shape.num_experts), dtype=np.float64)
    for layer in range(shape.num_layers):
        counts[layer] = visits(routes.expert_ids[:, layer], shape.num_experts).sum(axis=0)
    known = (routes.expert_ids < shape.num_experts).any(axis=2).sum(axis=0)[:, None]
    even = shape.top_k / shape.num_experts
    return ((counts + prior * even) / (known + prior)).astype(np.float32)


def log_odds(probability: np.ndarray) -> np.ndarray:
    """``log(p / (1 - p))``, bounded: no probability learned from counts is certain."""
    bounded = np.clip(probability, 1e-4, 1.0 - 1e-4)
    return np.log(bounded / (1.0 - bounded))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The inverse of ``log_odds``, in float32 without overflow."""
    return (0.5 * np.tanh(0.5 * logits) + 0.5).astype(np.float32)


def pair_counts(first_TK: np.ndarray, then_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """How often an expert of one list stands with one of another: ``[E, E]``."""
    width = num_experts + 1
    codes = first_TK[:, :, None] * width + then_TK[:, None, :]
    counts = np.bincount(codes.ravel(), minlength=width * width).reshape(width, width)
    return counts[:num_experts, :num_experts].astype(np.float32)


def visit_counts(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """How many rows hold each expert: ``[E]``."""
    return np.bincount(ids_TK.ravel(), minlength=num_experts + 1)[:num_experts].astype(np.float32)
