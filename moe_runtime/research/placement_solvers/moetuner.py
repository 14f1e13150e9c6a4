"""MoETuner's placement: balance and affinity by two integer programmes (arXiv 2502.06643).

Stage 1 forms clusters of experts layer by layer: equal sizes, the largest load within a slack of
the least possible, and as many tokens as possible staying in the cluster of the same number. Stage
2 (`mapping.py`) puts clusters on devices so that the busiest device's traffic is least. The paper's
constraint lists are not public; these programmes are our own. A heuristic start bounds each solver
call, so that a solver that runs out of time changes nothing.

Shape suffixes: L layers, E experts, Q clusters (as many as devices).
"""

from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.programme import Programme
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile
from moe_runtime.policies.placement.algorithms import pack
from moe_runtime.policies.placement.base import slots_needed
from moe_runtime.research.placement_solvers.exflow import Affinity, hop_costs, placement_of
from moe_runtime.research.placement_solvers.mapping import Deadline, map_clusters


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoStage:
    """Places experts by clusters of balanced load and high affinity.

    Attributes:
        load_slack: how far the largest load of a cluster may exceed the least possible, as a share
            of it; more slack leaves more room for affinity.
        time_limit_s: seconds of searches and solver calls together.
        node_hop: cost of a hop to another node, in hops between devices of one node.
    """

    load_slack: float = 0.1
    time_limit_s: float = 30.0
    node_hop: float = 2.0

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
            hop_costs(devices, node_hop=self.node_hop),
            time_limit_s=0.25 * self.time_limit_s,
        ).gpus_LQ
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
    solution = programme.solve(time_limit_s=time_limit_s, gap=gap)
    if solution is None:
        return start
    found = solution.values[chosen].argmax(axis=1)
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
        gains_EQ: what is gained by each expert in each cluster.
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
    programme.at_most(
        [
            (-gain, z)
            for gain, z in zip(gains_EQ.reshape(-1) / unit, chosen.reshape(-1), strict=True)
        ],
        -value / unit,
    )
    solution = programme.solve(time_limit_s=time_limit_s, gap=gap)
    if solution is None:
        return best
    found = solution.values[chosen].argmax(axis=1)
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
