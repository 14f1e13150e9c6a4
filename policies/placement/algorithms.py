"""EPLB, DeepSeek's expert-parallel load balancer: copies of hot experts, then packs of equal load.

Every layer goes through the same steps at once, so the result is that of the plain loop over layers
and items, in a fraction of the time. (The evolved variant of the ADRS study is faster still than
the loop but may leave a cold expert without any slot; here every expert has one before the first
replica is given away.)

Legend: L layers, E experts, N nodes, G devices, S slots; rows are (layer, node) pairs.
"""

import numpy as np

from moe_runtime.policies.placement.base import Devices, Placement, slots_needed
from moe_runtime.policies.placement.packing import pack
from moe_runtime.policies.placement.profile import RoutingProfile


class EPLB:
    """Places experts and replicas for equal load of all devices.

    Args:
        num_groups: groups of experts that a router limits tokens to (DeepSeek-V3 has 8). Where the
            nodes divide the groups, each group and all replicas of its experts stay on one node.
        packing: see ``moe_runtime.policies.placement.packing.PACKINGS``.
    """

    def __init__(self, *, num_groups: int = 1, packing: str = "greedy") -> None:
        self._num_groups = num_groups
        self._packing = packing

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places by the loads of the whole profile."""
        slots_needed(profile.num_experts, num_replicas, devices.num_gpus)
        return rebalance(
            profile.loads_LE,
            devices,
            num_slots=profile.num_experts + num_replicas,
            num_groups=self._num_groups,
            packing=self._packing,
        )


def rebalance(
    loads_LE: np.ndarray,
    devices: Devices,
    *,
    num_slots: int,
    num_groups: int = 1,
    packing: str = "greedy",
) -> Placement:
    """Gives hot experts replicas and spreads all slots over the devices by load.

    Args:
        loads_LE: ``[L, E]`` load of each expert, for example a moving average of token counts.
        devices: nodes and devices. Where the nodes do not divide the groups, the hierarchy is given
            up and all devices count as one node.
        num_slots: S, a multiple of the devices, at least E.
        num_groups: groups of neighbouring experts, a divisor of E.
        packing: how items are spread; ``"greedy"`` is EPLB's.

    Returns:
        The placement; on each device heavy slots come first.

    Raises:
        ValueError: sizes that do not divide, or fewer slots than experts.
    """
    loads = np.asarray(loads_LE, dtype=np.float64)
    num_layers, num_experts = loads.shape
    _check_sizes(num_experts, num_slots, num_groups, devices)
    num_nodes = devices.num_nodes
    if num_groups % num_nodes or num_experts % num_nodes:
        num_groups = num_nodes = 1

    # Rows of experts, node by node: [L * N, E / N].
    experts = _experts_of_nodes(loads, num_groups, num_nodes, packing)
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

    Every expert has one slot before any has two: an expert without load keeps its slot.

    Args:
        loads_NE: ``[N, E]`` loads of N independent rows.
        num_slots: slots of each row, at least E.

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


def _experts_of_nodes(
    loads_LE: np.ndarray, num_groups: int, num_nodes: int, packing: str
) -> np.ndarray:
    """``[L * N, E / N]`` experts of each node: whole groups, packed by their sums."""
    num_layers, num_experts = loads_LE.shape
    members = np.arange(num_experts).reshape(num_groups, -1)
    group_loads = loads_LE.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups = pack(group_loads, num_nodes, packing=packing)
    return members[groups].reshape(num_layers * num_nodes, -1)


def _check_sizes(num_experts: int, num_slots: int, num_groups: int, devices: Devices) -> None:
    if num_slots % devices.num_gpus:
        raise ValueError(f"{num_slots} slots do not divide among {devices.num_gpus} devices")
    if num_slots < num_experts:
        raise ValueError(f"{num_experts} experts need at least as many slots, got {num_slots}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide among {num_groups} groups")
