"""Placement policies by name: round robin, balanced ones, EPLB, and those that a caller adds.

Legend: L layers, E experts, N rows that are packed on their own ((layer, node) pairs), I items of a
row, P packs, M = I / P items a pack, G devices, S slots, B windows of history.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moe_runtime.config import nearest
from moe_runtime.policies.placement.base import (
    Devices,
    Placement,
    PlacementPolicy,
    RoutingProfile,
    slots_needed,
)

PACKINGS = ("greedy", "snake", "refined")
"""``greedy`` gives each item, heaviest first, to the lightest pack with room. ``snake`` deals the
sorted items to the packs forwards and backwards in turn, without looking at weights again.
``refined`` is greedy, then swaps items of the heaviest pack while that helps."""

_MAX_SWAPS = 64


class RoundRobin:
    """Consecutive experts on each device, as without a map; replicas repeat the experts."""

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        each = slots_needed(profile.num_experts, num_replicas, devices.num_gpus)
        slots = np.arange(each * devices.num_gpus) % profile.num_experts
        return _placed(np.tile(slots, (profile.num_layers, 1)), profile, devices)


class Greedy:
    """Heaviest expert first, each to the lightest device with a free slot (arXiv 2303.06182)."""

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        _refuse_replicas("greedy", num_replicas)
        slots_needed(profile.num_experts, 0, devices.num_gpus)
        packs = pack(profile.loads_LE, devices.num_gpus)
        return _placed(packs.reshape(profile.num_layers, -1), profile, devices)


class AntiCorrelation:
    """Greedy that keeps experts apart whose loads rise and fall together (arXiv 2303.06182).

    The load of a device, seen by the expert to be placed, is the sum over its experts of their mean
    load plus ``weight`` (the paper's is 0.5) times their correlation with the newcomer over the
    windows of history. Loads are in multiples of a layer's mean load; the paper does not name the
    unit.
    """

    def __init__(self, *, weight: float = 0.5) -> None:
        self._weight = weight

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places by the profile's loads over its windows; one window alone makes it greedy."""
        _refuse_replicas("anti-correlation", num_replicas)
        each = slots_needed(profile.num_experts, 0, devices.num_gpus)
        loads_BLE = profile.loads_BLE
        totals = loads_BLE.sum(axis=2, keepdims=True)
        shares = np.divide(loads_BLE, totals, out=np.zeros_like(loads_BLE), where=totals > 0)
        rows = [
            self._place_layer(shares[:, layer], devices.num_gpus, each)
            for layer in range(profile.num_layers)
        ]
        return _placed(np.stack(rows), profile, devices)

    def _place_layer(self, shares_BE: np.ndarray, num_gpus: int, room: int) -> np.ndarray:
        num_experts = shares_BE.shape[1]
        mean = shares_BE.mean(axis=0) * num_experts
        # Pearson's, 0 for an expert whose load never changes
        centred = shares_BE - shares_BE.mean(axis=0)
        norms = np.sqrt((centred**2).sum(axis=0))
        unit = np.divide(centred, norms, out=np.zeros_like(centred), where=norms > 1e-12)
        correlation = unit.T @ unit
        held: list[list[int]] = [[] for _ in range(num_gpus)]
        for expert in np.argsort(-mean, kind="stable").tolist():
            seen = mean + self._weight * correlation[expert]
            loads = [seen[pack].sum() if len(pack) < room else np.inf for pack in held]
            held[int(np.argmin(loads))].append(expert)
        return np.array(held).reshape(-1)


class EPLB:
    """Copies of hot experts, then packs of equal load: DeepSeek's expert-parallel load balancer.

    Unlike in the evolved variant of the ADRS study, every expert has a slot before any replica.

    Args:
        num_groups: groups of experts that a router limits tokens to (DeepSeek-V3 has 8). Where the
            nodes divide the groups, each group and all replicas of its experts stay on one node.
        packing: see ``PACKINGS``.
    """

    def __init__(self, *, num_groups: int = 1, packing: str = "greedy") -> None:
        self._num_groups = num_groups
        self._packing = packing

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        slots_needed(profile.num_experts, num_replicas, devices.num_gpus)
        return rebalance(
            profile.loads_LE,
            devices,
            num_slots=profile.num_experts + num_replicas,
            num_groups=self._num_groups,
            packing=self._packing,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOptions:
    """Options of the policies; each policy reads those it knows."""

    num_groups: int = 1  # groups of experts that stay on one node (EPLB)
    time_limit_s: float = 30.0  # for searches and solvers; the best placement by then counts
    load_slack: float = 0.1  # how far loads may exceed the best balance for fewer hops
    aligned: bool = True  # rename devices to save hops, where a policy looks at loads only


Algorithms = Mapping[str, Callable[[PlacementOptions], PlacementPolicy]]
"""Name -> a function that makes the policy from its options."""

ALGORITHMS: Algorithms = {
    "round-robin": lambda options: RoundRobin(),
    "greedy": lambda options: Greedy(),
    "anti-correlation": lambda options: AntiCorrelation(),
    "eplb": lambda options: EPLB(num_groups=options.num_groups),
}
_LOADS_ONLY = frozenset({"greedy", "anti-correlation", "eplb"})


def place_experts(
    algorithm: str,
    profile: RoutingProfile,
    devices: Devices,
    *,
    num_replicas: int = 0,
    options: PlacementOptions | None = None,
    algorithms: Algorithms = ALGORITHMS,
) -> Placement:
    """Places experts by the named algorithm, with ``num_replicas`` slots beyond one for each
    expert.

    Raises:
        ValueError: no algorithm has this name (the message suggests the nearest), or sizes that do
            not fit each other or the algorithm.
    """
    check_algorithm(algorithm, algorithms)
    options = options or PlacementOptions()
    placement = algorithms[algorithm](options)(profile, devices, num_replicas=num_replicas)
    if options.aligned and algorithm in _LOADS_ONLY:
        placement = align(placement, profile, devices)
    return placement


def check_algorithm(algorithm: str, algorithms: Algorithms = ALGORITHMS) -> None:
    if algorithm not in algorithms:
        raise ValueError(f"unknown algorithm {algorithm!r}: {nearest(algorithm, algorithms)}")


def rebalance(
    loads_LE: np.ndarray,
    devices: Devices,
    *,
    num_slots: int,
    num_groups: int = 1,
    packing: str = "greedy",
) -> Placement:
    """Gives hot experts replicas and spreads all slots over the devices by load.

    Every layer goes through the same steps at once. On each device heavy slots come first.

    Args:
        loads_LE: ``[L, E]`` load of each expert, for example a moving average of token counts.
        devices: where the nodes do not divide the groups, all devices count as one node.
        num_slots: S, a multiple of the devices, at least E.
        num_groups: groups of neighbouring experts, a divisor of E.

    Raises:
        ValueError: sizes that do not divide, or fewer slots than experts.
    """
    loads = np.asarray(loads_LE, dtype=np.float64)
    num_layers, num_experts = loads.shape
    if num_slots % devices.num_gpus:
        raise ValueError(f"{num_slots} slots do not divide among {devices.num_gpus} devices")
    if num_slots < num_experts:
        raise ValueError(f"{num_experts} experts need at least as many slots, got {num_slots}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide among {num_groups} groups")
    num_nodes = devices.num_nodes
    if num_groups % num_nodes or num_experts % num_nodes:
        num_groups = num_nodes = 1

    # Whole groups are packed onto nodes by their sums: [L * N, E / N] experts of each node.
    group_loads = loads.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups = pack(group_loads, num_nodes, packing=packing)
    members = np.arange(num_experts).reshape(num_groups, -1)
    experts = members[groups].reshape(num_layers * num_nodes, -1)
    row_loads = np.take_along_axis(loads, experts.reshape(num_layers, -1), axis=1)
    row_loads = row_loads.reshape(experts.shape)

    holders, copies = replicate(row_loads, num_slots // num_nodes)
    slot_loads = np.take_along_axis(row_loads / copies, holders, axis=1)
    packs = pack(slot_loads, devices.num_gpus // num_nodes, packing=packing)
    local = np.take_along_axis(holders, packs.reshape(len(packs), -1), axis=1)
    slots = np.take_along_axis(experts, local, axis=1).reshape(num_layers, num_slots)
    return Placement(expert_of_slot=slots, num_experts=num_experts, num_gpus=devices.num_gpus)


def replicate(loads_NE: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives each further slot to the expert with the highest load per copy.

    Args:
        loads_NE: ``[N, E]`` loads of N independent rows.

    Returns:
        ``[N, num_slots]`` expert of each slot (first all experts once, then the replicas in the
        order they were given), and ``[N, E]`` copies of each expert.
    """
    num_rows, num_experts = loads_NE.shape
    rows = np.arange(num_rows)
    holders = np.empty((num_rows, num_slots), dtype=np.int64)
    holders[:, :num_experts] = np.arange(num_experts)
    copies = np.ones((num_rows, num_experts), dtype=np.int64)
    per_copy = loads_NE.astype(np.float64)
    for slot in range(num_experts, num_slots):
        hottest = per_copy.argmax(axis=1)
        holders[:, slot] = hottest
        copies[rows, hottest] += 1
        per_copy[rows, hottest] = loads_NE[rows, hottest] / copies[rows, hottest]
    return holders, copies


def pack(weights_NI: np.ndarray, num_packs: int, *, packing: str = "greedy") -> np.ndarray:
    """Divides each row's items among packs of equal size.

    Args:
        weights_NI: ``[N, I]`` weight of each item.
        num_packs: P, which divides I.

    Returns:
        ``[N, P, M]`` int64 items of each pack, heaviest first (refined: in no particular order).
    """
    weights = np.asarray(weights_NI, dtype=np.float64)
    num_rows, num_items = weights.shape
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    if num_packs < 1 or num_items % num_packs:
        raise ValueError(f"{num_items} items do not divide among {num_packs} packs")
    if num_items == num_packs:
        # One item a pack: any order is as good, and the identity moves nothing.
        return np.tile(np.arange(num_items)[None, :, None], (num_rows, 1, 1))
    order = np.argsort(-weights, axis=1, kind="stable")
    if packing == "snake":
        rounds = order.reshape(num_rows, -1, num_packs).copy()
        rounds[:, 1::2] = rounds[:, 1::2, ::-1]
        return rounds.transpose(0, 2, 1)
    packs = _greedy(weights, order, num_packs)
    return _refine(weights, packs) if packing == "refined" else packs


def _greedy(weights_NI: np.ndarray, order_NI: np.ndarray, num_packs: int) -> np.ndarray:
    """Places one item of every row in each step; equals a loop over rows and items."""
    num_rows, num_items = weights_NI.shape
    room = num_items // num_packs
    flat_first = np.arange(num_rows) * num_packs
    # A step costs a few calls for any number of rows: it works on flat arrays, with indices that
    # are computed before the loop.
    sorted_IN = np.ascontiguousarray(np.take_along_axis(weights_NI, order_NI, axis=1).T)
    heaviness = np.zeros((num_rows, num_packs))
    flat_heaviness = heaviness.reshape(-1)
    filled = np.zeros(num_rows * num_packs, dtype=np.int64)
    places_IN = np.empty((num_items, num_rows), dtype=np.int64)
    for item in range(num_items):
        chosen = heaviness.argmin(axis=1)
        chosen += flat_first
        taken = filled[chosen]
        places_IN[item] = chosen * room + taken
        taken += 1
        filled[chosen] = taken
        # A full pack weighs infinitely much: it is never the lightest again.
        flat_heaviness[chosen] += np.where(taken == room, np.inf, sorted_IN[item])
    packs = np.empty(num_rows * num_items, dtype=np.int64)
    packs[places_IN.T] = order_NI
    return packs.reshape(num_rows, num_packs, room)


def _refine(weights_NI: np.ndarray, packs_NPM: np.ndarray) -> np.ndarray:
    """Swaps one item of the heaviest pack with one of another while the larger of both shrinks."""
    packs = packs_NPM.copy()
    num_rows, num_packs, room = packs.shape
    rows = np.arange(num_rows)
    weights = np.take_along_axis(weights_NI[:, None, :], packs, axis=2)
    totals = weights.sum(axis=2)
    for _ in range(_MAX_SWAPS):
        heavy = totals.argmax(axis=1)
        top = totals[rows, heavy]
        # moved[n, m, p, q]: loss of the heavy pack if it swaps its m-th item for p's q-th.
        moved = weights[rows, heavy][:, :, None, None] - weights[:, None, :, :]
        worse = np.maximum(top[:, None, None, None] - moved, totals[:, None, :, None] + moved)
        worse[rows, :, heavy] = np.inf
        best = worse.reshape(num_rows, -1).argmin(axis=1)
        gains = worse.reshape(num_rows, -1)[rows, best] < top * (1 - 1e-12)
        if not gains.any():
            break
        row, here = rows[gains], heavy[gains]
        mine, other, theirs = np.unravel_index(best[gains], (room, num_packs, room))
        for table in (packs, weights):
            kept = table[row, here, mine].copy()
            table[row, here, mine] = table[row, other, theirs]
            table[row, other, theirs] = kept
        totals[row] = weights[row].sum(axis=2)
    return packs


def align(placement: Placement, profile: RoutingProfile, devices: Devices) -> Placement:
    """Renames the devices of each layer so that tokens hop less; loads of packs stay."""
    slots = placement.expert_of_slot.copy()
    for layer in range(1, placement.num_layers):
        flow = _flow_between(placement, slots, layer, profile.transitions_LEE[layer - 1])
        order = _matching(flow, devices)
        slots[layer] = slots[layer].reshape(devices.num_gpus, -1)[order].reshape(-1)
    return Placement(
        expert_of_slot=slots, num_experts=placement.num_experts, num_gpus=placement.num_gpus
    )


def _flow_between(
    placement: Placement, slots_LS: np.ndarray, layer: int, counts_EE: np.ndarray
) -> np.ndarray:
    """``[G, G]`` tokens from each device of the layer before to each pack of this layer."""
    shares = []
    for row, copies in zip(
        slots_LS[layer - 1 : layer + 1], placement.copies[layer - 1 : layer + 1], strict=True
    ):
        share_EG = np.zeros((placement.num_experts, placement.num_gpus))
        real = row >= 0
        np.add.at(share_EG, (row[real], placement.gpu_of_slot[real]), 1.0)
        shares.append(share_EG / copies[:, None])
    return shares[0].T @ counts_EE @ shares[1]


def _matching(flow_GG: np.ndarray, devices: Devices) -> np.ndarray:
    """``[G]`` pack that goes to each device: the most tokens stay, first on nodes, then devices."""
    from scipy.optimize import linear_sum_assignment

    num_nodes, each = devices.num_nodes, devices.gpus_per_node
    blocks = flow_GG.reshape(num_nodes, each, num_nodes, each)
    # Nodes are matched by their total flow; devices within a pair of nodes by their own.
    _, node_of = linear_sum_assignment(-blocks.sum(axis=(1, 3)))
    order = np.empty(devices.num_gpus, dtype=np.int64)
    for node, pack_node in enumerate(node_of):
        _, inner = linear_sum_assignment(-blocks[node, :, pack_node])
        order[node * each : (node + 1) * each] = pack_node * each + inner
    return order


def _refuse_replicas(name: str, num_replicas: int) -> None:
    if num_replicas:
        raise ValueError(f"{name} makes no replicas, got {num_replicas}; eplb does")


def _placed(slots: np.ndarray, profile: RoutingProfile, devices: Devices) -> Placement:
    return Placement(
        expert_of_slot=slots, num_experts=profile.num_experts, num_gpus=devices.num_gpus
    )
