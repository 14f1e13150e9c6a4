"""Placements that integer programmes and assignment problems find: ExFlow and MoETuner.

ExFlow (arXiv 2401.08383) minimises hops under equal numbers of experts per device. With all other
layers fixed it is one assignment problem a layer, solved exactly; sweeps over the layers go on
until none gains, and the best of several starts wins.

MoETuner (arXiv 2502.06643) has two stages. The first forms clusters of experts layer by layer:
equal sizes, the largest load within a slack of the least possible, and as many tokens as possible
staying in the cluster of the same number. The second puts clusters on devices so that the busiest
device's traffic is least. The paper's constraint lists are not public; these programmes are our
own. A heuristic start bounds each solver call, so a solver that runs out of time changes nothing.

Shape suffixes: L layers, E experts, Q clusters (as many as devices), G devices.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_runtime.lab.programme import Programme, Term
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile, algorithms
from moe_runtime.policies.placement.algorithms import Algorithms, pack
from moe_runtime.policies.placement.base import slots_needed


class Deadline:
    """A moment after which the best result so far counts."""

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
        """A deadline after a share of the remaining time."""
        return Deadline(share * self.left_s, clock=self._clock)


MAX_PRODUCTS = 12_000
"""Largest number of products of two choices that is handed to the solver; beyond it, a tenth of a
minute does not even solve the relaxation, and the local search is all there is."""


def map_clusters(
    traffic_LQQ: np.ndarray, costs_GG: np.ndarray, *, time_limit_s: float
) -> np.ndarray:
    """Assigns the clusters of every layer to devices, one to one: ``[L, Q]`` device of each.

    `time_limit_s` holds for the search, and for the solver where the programme is small enough.
    Never worse than every cluster on the device of its number.
    """
    num_layers, num_gpus = len(traffic_LQQ) + 1, len(costs_GG)
    deadline = Deadline(time_limit_s)

    def peak(gpus_LQ: np.ndarray) -> float:
        return peak_traffic(gpus_LQ, traffic_LQQ, costs_GG)

    starts = (np.tile(np.arange(num_gpus), (num_layers, 1)), _chain(traffic_LQQ, costs_GG))
    found = [_local_search(gpus, traffic_LQQ, costs_GG, deadline) for gpus in starts]
    best = min(found, key=peak)
    if peak(best) > 0 and num_layers > 1 and len(traffic_LQQ) * num_gpus**4 <= MAX_PRODUCTS:
        solved = _solve(traffic_LQQ, costs_GG, peak(best), time_limit_s)
        if solved is not None and peak(solved) < peak(best):
            return solved
    return best


def peak_traffic(gpus_LQ: np.ndarray, traffic_LQQ: np.ndarray, costs_GG: np.ndarray) -> float:
    """Sum over neighbouring layers of the busiest device's traffic in or out, by cost."""
    total = 0.0
    for layer, traffic_QQ in enumerate(traffic_LQQ):
        weighed = traffic_QQ * costs_GG[np.ix_(gpus_LQ[layer], gpus_LQ[layer + 1])]
        total += float(max(weighed.sum(axis=1).max(), weighed.sum(axis=0).max()))
    return total


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
) -> np.ndarray | None:
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
    values = programme.solve(time_limit_s=time_limit_s, gap=1e-4)
    return None if values is None else values[chosen].argmax(axis=2)


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


_LEAST_GAIN = 1e-9
"""Relative gain below which a sweep counts as no gain: sums of floats are not exact."""


class Affinity:
    """Places experts for few hops between devices.

    Args:
        num_starts: random starts; more of them find better placements, each costs the same time.
        time_limit_s: seconds after which the best placement so far counts; then it depends on the
            machine's speed.
    """

    def __init__(
        self,
        *,
        num_starts: int = 8,
        seed: int = 0,
        time_limit_s: float = math.inf,
    ) -> None:
        if num_starts < 1:
            raise ValueError(f"num_starts must be at least 1, got {num_starts}")
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, got {time_limit_s}")
        self._time_limit_s = time_limit_s
        self._num_starts = num_starts
        self._seed = seed

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        if num_replicas:
            raise ValueError(f"affinity makes no replicas, got {num_replicas}; eplb does")
        slots_needed(profile.num_experts, 0, devices.num_gpus)
        costs = hop_costs(devices)
        random = np.random.default_rng(self._seed)
        best, best_cost = None, np.inf
        deadline = Deadline(self._time_limit_s)
        for _ in range(self._num_starts):
            if best is not None and deadline.has_passed:
                break
            start = _start(profile, devices, random, deadline)
            gpus = sweep(start, profile.transitions_LEE, costs, deadline)
            cost = total_cost(gpus, profile.transitions_LEE, costs)
            if best is None or cost < best_cost:
                best, best_cost = gpus, cost
        assert best is not None
        return placement_of(best, devices)


def hop_costs(devices: Devices) -> np.ndarray:
    """``[G, G]`` cost of a token's way: 0 on a device, 1 within a node, 2 beyond."""
    gpus = np.arange(devices.num_gpus)
    nodes = devices.node_of(gpus)
    costs = np.where(nodes[:, None] == nodes[None], 1.0, 2.0)
    costs[gpus, gpus] = 0.0
    return costs


def sweep(
    gpus_LE: np.ndarray,
    transitions_LEE: np.ndarray,
    costs_GG: np.ndarray,
    deadline: Deadline | None = None,
) -> np.ndarray:
    """Improves layer after layer, each to its optimum given its neighbours, until none gains."""
    from scipy.optimize import linear_sum_assignment

    gpus = gpus_LE.copy()
    num_layers, num_experts = gpus.shape
    num_gpus = len(costs_GG)
    room = num_experts // num_gpus
    experts = np.arange(num_experts)
    order = [*range(num_layers), *range(num_layers - 2, -1, -1)]
    improved = True
    while improved:
        improved = False
        for layer in order:
            if deadline is not None and deadline.has_passed:
                return gpus
            cost_EG = layer_costs(gpus, layer, transitions_LEE, costs_GG)
            before = cost_EG[experts, gpus[layer]].sum()
            _, slots = linear_sum_assignment(np.repeat(cost_EG, room, axis=1))
            chosen = slots // room
            if before - cost_EG[experts, chosen].sum() > _LEAST_GAIN * max(1.0, before):
                gpus[layer] = chosen
                improved = True
    return gpus


def layer_costs(
    gpus_LE: np.ndarray, layer: int, transitions_LEE: np.ndarray, costs_GG: np.ndarray
) -> np.ndarray:
    """``[E, G]`` cost of each expert of a layer on each device, the other layers as they are."""
    num_layers, num_experts = gpus_LE.shape
    costs = np.zeros((num_experts, len(costs_GG)))
    if layer > 0:
        costs += transitions_LEE[layer - 1].T @ costs_GG[gpus_LE[layer - 1]]
    if layer < num_layers - 1:
        costs += transitions_LEE[layer] @ costs_GG.T[gpus_LE[layer + 1]]
    return costs


def total_cost(gpus_LE: np.ndarray, transitions_LEE: np.ndarray, costs_GG: np.ndarray) -> float:
    """Cost of all tokens' ways from layer to layer."""
    return float(
        sum(
            (counts * costs_GG[np.ix_(gpus_LE[layer], gpus_LE[layer + 1])]).sum()
            for layer, counts in enumerate(transitions_LEE)
        )
    )


def placement_of(gpus_LE: np.ndarray, devices: Devices) -> Placement:
    """The placement in which each expert lies on its device, in ascending order of ids."""
    slots = np.argsort(gpus_LE, axis=1, kind="stable")
    return Placement(expert_of_slot=slots, num_experts=gpus_LE.shape[1], num_gpus=devices.num_gpus)


def _start(
    profile: RoutingProfile, devices: Devices, random: np.random.Generator, deadline: Deadline
) -> np.ndarray:
    """Random devices; with several nodes, nodes that were swept first and devices within them."""
    num_layers, num_experts = profile.num_layers, profile.num_experts
    shuffled = np.stack([random.permutation(num_experts) for _ in range(num_layers)])
    if devices.num_nodes == 1:
        return shuffled % devices.num_gpus
    between = hop_costs(Devices(num_nodes=1, gpus_per_node=devices.num_nodes))
    nodes = sweep(shuffled % devices.num_nodes, profile.transitions_LEE, between, deadline)
    order = np.argsort(nodes, axis=1, kind="stable")
    gpus = np.empty_like(order)
    each = num_experts // devices.num_gpus
    np.put_along_axis(gpus, order, (np.arange(num_experts) // each)[None], axis=1)
    return gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoStage:
    """Places experts by clusters of balanced load and high affinity.

    Attributes:
        load_slack: how far the largest load of a cluster may exceed the least possible, as a share
            of it; more slack leaves more room for affinity.
        time_limit_s: seconds of searches and solver calls together.
    """

    load_slack: float = 0.1
    time_limit_s: float = 30.0

    def __post_init__(self) -> None:
        if self.load_slack < 0 or self.time_limit_s <= 0:
            raise ValueError(
                "load_slack must not be negative and time_limit_s must be positive, "
                f"got {self.load_slack} and {self.time_limit_s}"
            )

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        if num_replicas:
            raise ValueError(f"moetuner makes no replicas, got {num_replicas}; eplb does")
        slots_needed(profile.num_experts, 0, devices.num_gpus)
        clusters = cluster_layers(
            profile,
            devices.num_gpus,
            load_slack=self.load_slack,
            time_limit_s=0.75 * self.time_limit_s,
        )
        gpus = map_clusters(
            cluster_traffic(clusters, profile.transitions_LEE, devices.num_gpus),
            hop_costs(devices),
            time_limit_s=0.25 * self.time_limit_s,
        )
        return placement_of(np.take_along_axis(gpus, clusters, axis=1), devices)


def cluster_layers(
    profile: RoutingProfile, num_clusters: int, *, load_slack: float, time_limit_s: float
) -> np.ndarray:
    """Stage 1: the cluster of each expert, `[L, E]`.

    Two starts, balanced clusters and ExFlow's clusters brought within the bound, go through all
    layers with swaps. The one that keeps more tokens goes through them again, with the programme.
    """
    deadline = Deadline(time_limit_s)
    limit_s = time_limit_s / (3 * profile.num_layers)
    balanced = np.stack(
        [balance_clusters(loads, num_clusters, time_limit_s=limit_s) for loads in profile.loads_LE]
    )
    limits = [
        (1 + load_slack) * np.bincount(row, weights=loads, minlength=num_clusters).max()
        for row, loads in zip(balanced, profile.loads_LE, strict=True)
    ]
    related = _within_bounds(profile, balanced, limits, num_clusters, deadline.part(0.3))
    swept = [
        _sweep(profile, start, limits, num_clusters, deadline.part(0.3), limit_s=0.0)
        for start in (balanced, related)
    ]
    best = max(
        swept,
        key=lambda clusters: np.trace(
            cluster_traffic(clusters, profile.transitions_LEE, num_clusters), axis1=1, axis2=2
        ).sum(),
    )
    return _sweep(profile, best, limits, num_clusters, deadline, limit_s=limit_s)


def _sweep(
    profile: RoutingProfile,
    clusters_LE: np.ndarray,
    limits: list[float],
    num_clusters: int,
    deadline: Deadline,
    *,
    limit_s: float,
) -> np.ndarray:
    """Improves the layers one by one, forwards, then backwards, until the deadline."""
    clusters = clusters_LE.copy()
    for layer in [*range(profile.num_layers), *range(profile.num_layers - 2, -1, -1)]:
        if deadline.has_passed:
            break
        clusters[layer] = attract(
            _gains(clusters, layer, profile.transitions_LEE, num_clusters),
            profile.loads_LE[layer],
            start=clusters[layer],
            max_load=limits[layer],
            time_limit_s=limit_s,
        )
    return clusters


def _within_bounds(
    profile: RoutingProfile,
    balanced_LE: np.ndarray,
    limits: list[float],
    num_clusters: int,
    deadline: Deadline,
) -> np.ndarray:
    """ExFlow's clusters, as much of them (by load) as the bounds on the loads allow."""
    devices = Devices(num_nodes=1, gpus_per_node=num_clusters)
    search = Affinity(time_limit_s=max(1e-3, 0.5 * deadline.left_s))
    placed = search(profile, devices, num_replicas=0)
    wanted = placed.slots_of_expert[:, :, 0] // placed.slots_per_gpu
    return np.stack(
        [
            balanced_LE[layer]
            if deadline.has_passed
            else attract(
                np.eye(num_clusters)[wanted[layer]] * loads[:, None],
                loads,
                start=balanced_LE[layer],
                max_load=limits[layer],
                time_limit_s=0.0,
            )
            for layer, loads in enumerate(profile.loads_LE)
        ]
    )


def balance_clusters(
    loads_E: np.ndarray, num_clusters: int, *, time_limit_s: float, gap: float = 1e-3
) -> np.ndarray:
    """Clusters of equal size whose largest load is least: `[E]` cluster of each expert.

    Heaviest-first packing with swaps, then the integer programme if that leaves a gap to the mean.
    """
    num_experts = len(loads_E)
    packs = pack(loads_E[None], num_clusters, packing="refined")[0]
    start = np.empty(num_experts, dtype=np.int64)
    start[packs] = np.arange(num_clusters)[:, None]
    largest = np.bincount(start, weights=loads_E, minlength=num_clusters).max()
    least = max(loads_E.max(initial=0.0), loads_E.sum() / num_clusters)
    if largest <= least * (1 + gap):
        return start
    programme = Programme()
    chosen = _partition(programme, num_experts, num_clusters)
    # In units of the mean load: solvers like numbers near one.
    unit = loads_E.sum() / num_clusters
    top = programme.reals(1)[0]
    programme.cost(top, 1.0)
    programme.between(least / unit, [(1.0, top)], largest / unit)
    for column in chosen.T:
        terms = [(load / unit, z) for load, z in zip(loads_E, column, strict=True)]
        programme.at_most([*terms, (-1.0, top)], 0.0)
    values = programme.solve(time_limit_s=time_limit_s, gap=gap)
    if values is None:
        return start
    found = values[chosen].argmax(axis=1)
    better = np.bincount(found, weights=loads_E, minlength=num_clusters).max() < largest
    return found if better else start


def attract(
    gains_EQ: np.ndarray,
    loads_E: np.ndarray,
    *,
    start: np.ndarray,
    max_load: float,
    time_limit_s: float,
    gap: float = 1e-3,
) -> np.ndarray:
    """Clusters of equal size with the largest sum of gains whose loads stay within a bound.

    Args:
        gains_EQ: gain of each expert in each cluster.
        start: `[E]` clusters that keep the bound; the result is never worse.
        time_limit_s: for the solver; 0 leaves it at swaps.
        gap: relative distance from the optimum that is good enough.
    """
    num_experts, num_clusters = gains_EQ.shape
    rows = np.arange(num_experts)
    best = _swap(gains_EQ, loads_E, _rename(gains_EQ, start), max_load)
    value, unit = gains_EQ[rows, best].sum(), gains_EQ.max(initial=0.0)
    is_done = unit <= 0 or gains_EQ.max(axis=1).sum() <= value * (1 + gap)
    if is_done or time_limit_s <= 0:
        return best
    programme = Programme()
    chosen = _partition(programme, num_experts, num_clusters)
    for z, gain in zip(chosen.reshape(-1), gains_EQ.reshape(-1) / unit, strict=True):
        programme.cost(z, -gain)
    for column in chosen.T:
        terms = [(load / max_load, z) for load, z in zip(loads_E, column, strict=True)]
        programme.at_most(terms, 1.0 + 1e-9)
    losses = zip(-gains_EQ.reshape(-1) / unit, chosen.reshape(-1), strict=True)
    programme.at_most(losses, -value / unit)
    values = programme.solve(time_limit_s=time_limit_s, gap=gap)
    if values is None:
        return best
    found = values[chosen].argmax(axis=1)
    return found if gains_EQ[rows, found].sum() > value else best


def cluster_traffic(
    clusters_LE: np.ndarray, transitions_LEE: np.ndarray, num_clusters: int
) -> np.ndarray:
    """``[L - 1, Q, Q]`` tokens between the clusters of neighbouring layers."""
    member = np.eye(num_clusters)[clusters_LE]
    return np.einsum("leq,lef,lfr->lqr", member[:-1], transitions_LEE, member[1:], optimize=True)


def _partition(programme: Programme, num_experts: int, num_clusters: int) -> np.ndarray:
    """Adds ``[E, Q]`` variables: each expert in one cluster, as many experts in each."""
    chosen = programme.binaries(num_experts, num_clusters)
    for row in chosen:
        programme.equal([(1.0, z) for z in row], 1.0)
    for column in chosen.T:
        programme.equal([(1.0, z) for z in column], num_experts // num_clusters)
    return chosen


def _gains(
    clusters_LE: np.ndarray, layer: int, transitions_LEE: np.ndarray, num_clusters: int
) -> np.ndarray:
    """``[E, Q]`` tokens between each expert and each cluster of the layers before and after."""
    member = np.eye(num_clusters)
    gains = np.zeros((clusters_LE.shape[1], num_clusters))
    if layer > 0:
        gains += transitions_LEE[layer - 1].T @ member[clusters_LE[layer - 1]]
    if layer + 1 < len(clusters_LE):
        gains += transitions_LEE[layer] @ member[clusters_LE[layer + 1]]
    return gains


def _rename(gains_EQ: np.ndarray, clusters_E: np.ndarray) -> np.ndarray:
    """Gives the clusters the numbers with which they gain most."""
    from scipy.optimize import linear_sum_assignment

    num_clusters = gains_EQ.shape[1]
    totals = np.eye(num_clusters)[clusters_E].T @ gains_EQ
    _, names = linear_sum_assignment(-totals)
    return names[clusters_E]


def _swap(
    gains_EQ: np.ndarray, loads_E: np.ndarray, clusters_E: np.ndarray, max_load: float
) -> np.ndarray:
    """Swaps the pair of experts that gains most while loads stay within the bound."""
    clusters = clusters_E.copy()
    num_experts, num_clusters = gains_EQ.shape
    rows = np.arange(num_experts)
    allowed = max_load * (1 + 1e-9)
    for _ in range(num_experts * num_clusters):
        totals = np.bincount(clusters, weights=loads_E, minlength=num_clusters)
        moved = gains_EQ[:, clusters] - gains_EQ[rows, clusters][:, None]
        gain = moved + moved.T
        after = totals[clusters][:, None] - loads_E[:, None] + loads_E[None]
        gain[(after > allowed) | (allowed < after.T)] = -np.inf
        first, second = np.unravel_index(gain.argmax(), gain.shape)
        if gain[first, second] <= 1e-9 * max(1.0, gains_EQ.max()):
            break
        clusters[[first, second]] = clusters[[second, first]]
    return clusters


SEARCHING: Algorithms = {
    "exflow": lambda options: Affinity(time_limit_s=options.time_limit_s),
    "moetuner": lambda options: TwoStage(
        load_slack=options.load_slack, time_limit_s=options.time_limit_s
    ),
}
"""The algorithms that search until their time is over, if they do not end before."""
ALGORITHMS: Algorithms = {**algorithms.ALGORITHMS, **SEARCHING}

place_experts = partial(algorithms.place_experts, algorithms=ALGORITHMS)
check_algorithm = partial(algorithms.check_algorithm, algorithms=ALGORITHMS)
