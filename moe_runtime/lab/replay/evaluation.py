"""How good a predictor is: recall, gate mass, calibration and cost on held-out sequences.

The control is the routing itself, sent through the same measurement: its recall must be complete.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.policies.prediction.base import Routes
from moe_runtime.policies.prediction.estimator import Contexts, Estimator, contexts_of, visits

CONTROL = "control"
CALIBRATION_BINS = 10
_TIMED_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Recall of a predictor, for one look-ahead distance.

    Attributes:
        at_k: ``[L]`` share of visited experts among the K likeliest; nan where a layer has no
            layer so far before it.
        at_2k: ``[L]`` the same among the 2K likeliest.
        mass_at_2k: ``[L]`` share of the gate weights that fell on the 2K likeliest.
    """

    distance: int
    at_k: np.ndarray
    at_2k: np.ndarray
    mass_at_2k: np.ndarray

    @property
    def mean_at_k(self) -> float:
        """The mean of ``at_k`` over the layers that have a value."""
        return float(np.nanmean(self.at_k))

    @property
    def mean_at_2k(self) -> float:
        return float(np.nanmean(self.at_2k))

    @property
    def mean_mass_at_2k(self) -> float:
        return float(np.nanmean(self.mass_at_2k))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    name: str
    recalls: tuple[Recall, ...]
    calibration: tuple[tuple[float, float, int], ...]
    calibration_error: float
    call_s: float
    num_tokens: int

    def at(self, distance: int) -> Recall:
        return {recall.distance: recall for recall in self.recalls}[distance]


class Control(Estimator):
    """Knows the answer: a recall below 1 is an error of the measurement."""

    name = CONTROL

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        return visits(contexts.path[:, layer], self.shape.num_experts)


def evaluate(
    estimators: Sequence[Estimator],
    routes: Routes,
    *,
    distances: Sequence[int] = (1, 2, 4),
    max_tokens: int | None = None,
    seed: int = 0,
    hidden_TLD: np.ndarray | None = None,
) -> list[Evaluation]:
    """Measures estimators on sequences that they were not trained on.

    Args:
        hidden_TLD: ``[T, L, D]`` inputs of the gates, for predictors that use them.
    """
    if routes.num_tokens == 0 or any(distance < 1 for distance in distances):
        raise ValueError(f"expected tokens and positive distances, got {distances}")
    wanted = np.ones(routes.num_tokens, dtype=bool)
    if max_tokens is not None and max_tokens < routes.num_tokens:
        wanted[:] = False
        wanted[np.random.default_rng(seed).permutation(routes.num_tokens)[:max_tokens]] = True
    everyone = [Control(routes.shape), *estimators]
    scores = [_Score(estimator, routes, distances) for estimator in everyone]
    row = 0
    for contexts in contexts_of(routes):
        chosen = np.flatnonzero(wanted[row : row + len(contexts)])
        hidden = None if hidden_TLD is None else hidden_TLD[row + chosen].astype(np.float32)
        row += len(contexts)
        if chosen.size:
            some = contexts.rows(chosen)
            for score in scores:
                score.add(some, hidden)
    return [score.close() for score in scores]


class _Score:
    """Sums over tokens for one estimator."""

    def __init__(self, estimator: Estimator, routes: Routes, distances: Iterable[int]) -> None:
        self._estimator = estimator
        self._shape = routes.shape
        self._distances = tuple(distances)
        # found among K, among 2K, visited; gate mass found among 2K, gate mass
        self._sums = np.zeros((len(self._distances), routes.shape.num_layers, 5))
        self._bins = np.zeros((3, CALIBRATION_BINS))
        self._call_s = 0.0
        self._num_tokens = 0

    def add(self, contexts: Contexts, hidden_BLD: np.ndarray | None) -> None:
        self._num_tokens += len(contexts)
        if self._call_s == 0.0:
            self._call_s = _time_one_call(self._estimator, contexts)
        for place, distance in enumerate(self._distances):
            for layer in range(self._shape.num_layers):
                now = max(layer - distance, -1)
                if hidden_BLD is not None:
                    contexts.hidden = hidden_BLD[:, now] if now >= 0 else None
                self._add_layer(
                    place, layer, contexts, self._estimator.checked_estimate(contexts, now, layer)
                )

    def _add_layer(self, place: int, layer: int, contexts: Contexts, chance_BE: np.ndarray) -> None:
        shape = self._shape
        visited_BE = visits(contexts.path[:, layer], shape.num_experts)
        mass_BE = np.zeros((len(contexts), shape.num_experts + 1), dtype=np.float32)
        np.put_along_axis(mass_BE, contexts.path[:, layer], contexts.path_weights[:, layer], axis=1)
        mass_BE = mass_BE[:, :-1]
        ranked = np.argsort(-chance_BE, axis=1, kind="stable")[:, : 2 * shape.top_k]
        found_BW = np.take_along_axis(visited_BE, ranked, axis=1)
        self._sums[place, layer] += (
            found_BW[:, : shape.top_k].sum(),
            found_BW.sum(),
            visited_BE.sum(),
            np.take_along_axis(mass_BE, ranked, axis=1).sum(),
            mass_BE.sum(),
        )
        if place == 0:
            bins = np.minimum((chance_BE * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
            for row, values in enumerate((chance_BE, visited_BE, np.ones_like(chance_BE))):
                self._bins[row] += np.bincount(
                    bins.ravel(), values.ravel(), minlength=CALIBRATION_BINS
                )

    def close(self) -> Evaluation:
        chance, visited, number = self._bins
        filled = number > 0
        gap = np.abs(chance - visited).sum() / max(number.sum(), 1.0)
        rows = zip(
            (chance[filled] / number[filled]).tolist(),
            (visited[filled] / number[filled]).tolist(),
            number[filled].astype(int).tolist(),
            strict=True,
        )
        return Evaluation(
            name=self._estimator.name,
            recalls=tuple(self._recall(place) for place in range(len(self._distances))),
            calibration=tuple(rows),
            calibration_error=float(gap),
            call_s=self._call_s,
            num_tokens=self._num_tokens,
        )

    def _recall(self, place: int) -> Recall:
        found_k, found_2k, visited, found_mass, mass = self._sums[place].T
        return Recall(
            distance=self._distances[place],
            at_k=_share(found_k, visited),
            at_2k=_share(found_2k, visited),
            mass_at_2k=_share(found_mass, mass),
        )


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def _time_one_call(estimator: Estimator, contexts: Contexts) -> float:
    """Median seconds for one token and one layer, as at run time."""
    one = contexts.rows(slice(0, 1))
    num_layers = estimator.shape.num_layers
    seconds = []
    for call in range(_TIMED_CALLS):
        layer = call % num_layers
        start = time.perf_counter()
        estimator.estimate(one, layer - 1, layer)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
