"""ExFlow's placement: experts that follow each other lie on the same device (arXiv 2401.08383).

The integer programme minimises hops under equal numbers of experts per device. With all other
layers fixed it is one assignment problem a layer, solved exactly; sweeps over the layers go on
until none gains, and the best of several starts wins.

Shape suffixes: L layers, E experts, G devices, M = E / G experts of a device.
"""

import math

import numpy as np

from moe_runtime.policies.placement import Devices, Placement, RoutingProfile
from moe_runtime.policies.placement.base import slots_needed
from moe_runtime.research.placement_solvers.mapping import Deadline

_LEAST_GAIN = 1e-9
"""Relative gain below which a sweep counts as no gain: sums of floats are not exact."""


class Affinity:
    """Places experts for few hops between devices.

    Args:
        num_starts: random starts; more of them find better placements, each costs the same time.
        node_hop: cost of a hop to another node, in hops between devices of one node.
        time_limit_s: seconds after which the best placement so far counts; then it depends on the
            machine's speed.
    """

    def __init__(
        self,
        *,
        num_starts: int = 8,
        seed: int = 0,
        node_hop: float = 2.0,
        time_limit_s: float = math.inf,
    ) -> None:
        if num_starts < 1:
            raise ValueError(f"num_starts must be at least 1, got {num_starts}")
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, got {time_limit_s}")
        self._time_limit_s = time_limit_s
        self._num_starts = num_starts
        self._seed = seed
        self._node_hop = node_hop

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        if num_replicas:
            raise ValueError(f"affinity makes no replicas, got {num_replicas}; eplb does")
        slots_needed(profile.num_experts, 0, devices.num_gpus)
        costs = hop_costs(devices, node_hop=self._node_hop)
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


def hop_costs(devices: Devices, *, node_hop: float = 2.0) -> np.ndarray:
    """``[G, G]`` cost of a token's way: 0 on a device, 1 within a node, ``node_hop`` beyond."""
    gpus = np.arange(devices.num_gpus)
    nodes = devices.node_of(gpus)
    costs = np.where(nodes[:, None] == nodes[None], 1.0, node_hop)
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
