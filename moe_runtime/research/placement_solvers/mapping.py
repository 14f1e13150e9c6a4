"""Clusters of experts onto devices so that the busiest device's traffic is least (stage 2).

Shape suffixes: L layers, Q clusters of a layer = G devices.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.programme import Programme, Term


class Deadline:
    """A moment after which the best that was found counts."""

    def __init__(
        self, seconds: float = math.inf, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._clock())

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0

    def part(self, share: float) -> "Deadline":
        """A deadline after a share of what is left."""
        return Deadline(share * self.left_s, clock=self._clock)


MAX_PRODUCTS = 12_000
"""Largest number of products of two choices that is handed to the solver; beyond it, a tenth of a
minute does not even solve the relaxation, and the local search is all there is."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Mapping:
    """Where the clusters lie.

    Attributes:
        gpus_LQ: device of each cluster.
        peak_traffic: sum over neighbouring layers of the busiest device's traffic, in cost units.
        is_optimal: the solver proved that no mapping is better.
    """

    gpus_LQ: np.ndarray
    peak_traffic: float
    is_optimal: bool


def map_clusters(traffic_LQQ: np.ndarray, costs_GG: np.ndarray, *, time_limit_s: float) -> Mapping:
    """Assigns the clusters of every layer to devices, one to one.

    `time_limit_s` holds for the search, and for the solver where the programme is small enough.
    Never worse than every cluster on the device of its number.
    """
    num_layers, num_gpus = len(traffic_LQQ) + 1, len(costs_GG)
    deadline = Deadline(time_limit_s)
    start = np.tile(np.arange(num_gpus), (num_layers, 1))
    best = min(
        (
            _local_search(gpus, traffic_LQQ, costs_GG, deadline)
            for gpus in (start, _chain(traffic_LQQ, costs_GG))
        ),
        key=lambda gpus: peak_traffic(gpus, traffic_LQQ, costs_GG),
    )
    peak = peak_traffic(best, traffic_LQQ, costs_GG)
    if peak == 0 or num_layers == 1:
        return Mapping(gpus_LQ=best, peak_traffic=peak, is_optimal=True)
    if len(traffic_LQQ) * num_gpus**4 > MAX_PRODUCTS:
        return Mapping(gpus_LQ=best, peak_traffic=peak, is_optimal=False)
    found, is_optimal = _solve(traffic_LQQ, costs_GG, peak, time_limit_s)
    if found is not None and peak_traffic(found, traffic_LQQ, costs_GG) < peak:
        best, peak = found, peak_traffic(found, traffic_LQQ, costs_GG)
    return Mapping(gpus_LQ=best, peak_traffic=peak, is_optimal=is_optimal)


def peak_traffic(gpus_LQ: np.ndarray, traffic_LQQ: np.ndarray, costs_GG: np.ndarray) -> float:
    """Sum over neighbouring layers of what the busiest device sends or receives, by cost."""
    return sum(
        _peak(gpus_LQ[layer], gpus_LQ[layer + 1], traffic, costs_GG)
        for layer, traffic in enumerate(traffic_LQQ)
    )


def _peak(
    here_Q: np.ndarray, there_Q: np.ndarray, traffic_QQ: np.ndarray, costs_GG: np.ndarray
) -> float:
    weighed = traffic_QQ * costs_GG[np.ix_(here_Q, there_Q)]
    return float(max(weighed.sum(axis=1).max(), weighed.sum(axis=0).max()))


def _chain(traffic_LQQ: np.ndarray, costs_GG: np.ndarray) -> np.ndarray:
    """Layer after layer, each an assignment problem for the least sum of costs."""
    from scipy.optimize import linear_sum_assignment

    gpus = [np.arange(len(costs_GG))]
    for traffic in traffic_LQQ:
        _, chosen = linear_sum_assignment(traffic.T @ costs_GG[gpus[-1]])
        gpus.append(chosen)
    return np.stack(gpus)


def _local_search(
    gpus_LQ: np.ndarray, traffic_LQQ: np.ndarray, costs_GG: np.ndarray, deadline: Deadline
) -> np.ndarray:
    """Swaps two clusters of a layer while the sum of peaks falls, until the deadline."""
    gpus = gpus_LQ.copy()
    num_layers, num_clusters = gpus.shape

    def around(layer: int) -> float:
        first, last = max(0, layer - 1), min(num_layers, layer + 2)
        return peak_traffic(gpus[first:last], traffic_LQQ[first : last - 1], costs_GG)

    improved = True
    while improved:
        improved = False
        for layer in range(num_layers):
            if deadline.has_passed:
                return gpus
            before = around(layer)
            for one in range(num_clusters):
                for other in range(one + 1, num_clusters):
                    gpus[layer, [one, other]] = gpus[layer, [other, one]]
                    after = around(layer)
                    if after < before * (1 - 1e-12):
                        before, improved = after, True
                    else:
                        gpus[layer, [one, other]] = gpus[layer, [other, one]]
    return gpus


def _solve(
    traffic_LQQ: np.ndarray, costs_GG: np.ndarray, bound: float, time_limit_s: float
) -> tuple[np.ndarray | None, bool]:
    """The integer programme: binary choices, products of neighbouring ones, one peak a layer."""
    num_layers, num_gpus = len(traffic_LQQ) + 1, len(costs_GG)
    unit = max(bound, 1e-300)
    programme = Programme()
    chosen = programme.binaries(num_layers, num_gpus, num_gpus)
    peaks = programme.reals(num_layers - 1)
    for layer in chosen:
        for line in (*layer, *layer.T):
            programme.equal([(1.0, p) for p in line], 1.0)
    # Devices of equal costs may be renamed: the first layer stays where it is if all are equal.
    if len(np.unique(costs_GG[~np.eye(num_gpus, dtype=bool)])) == 1:
        for cluster in range(num_gpus):
            programme.equal([(1.0, chosen[0, cluster, cluster])], 1.0)
    for layer, traffic in enumerate(traffic_LQQ):
        products = programme.reals(num_gpus, num_gpus, num_gpus, num_gpus)
        _tie(programme, products, chosen[layer], chosen[layer + 1])
        weights = traffic[:, None, :, None] * costs_GG[None, :, None, :] / unit
        # Axis 1 is the device that sends, axis 3 the one that receives.
        for device in (1, 3):
            for gpu in range(num_gpus):
                part = np.take(products, gpu, axis=device).reshape(-1)
                weight = np.take(np.broadcast_to(weights, products.shape), gpu, axis=device)
                terms: list[Term] = list(zip(weight.reshape(-1), part, strict=True))
                programme.at_most([*terms, (-1.0, peaks[layer])], 0.0)
        programme.cost(peaks[layer], 1.0)
    programme.at_most([(1.0, peak) for peak in peaks], 1.0 + 1e-9)
    solution = programme.solve(time_limit_s=time_limit_s, gap=1e-4)
    if solution is None:
        return None, False
    return solution.values[chosen].argmax(axis=2), solution.is_optimal


def _tie(
    programme: Programme, products: np.ndarray, here_QG: np.ndarray, there_QG: np.ndarray
) -> None:
    """Requires that ``products[q, g, r, h]`` is ``here[q, g] * there[r, h]``."""
    num_gpus = len(here_QG)
    for one in range(num_gpus):
        for gpu in range(num_gpus):
            for other in range(num_gpus):
                row = [(1.0, y) for y in products[one, gpu, other]]
                programme.equal([*row, (-1.0, here_QG[one, gpu])], 0.0)
                column = [(1.0, y) for y in products[other, :, one, gpu]]
                programme.equal([*column, (-1.0, there_QG[one, gpu])], 0.0)
