"""Which device a layer's pack of experts goes to, where the balance leaves that open.

Legend: L layers, S slots of a layer, E experts, G devices.
"""

import numpy as np

from moe_runtime.policies.placement import Devices, Placement, RoutingProfile


def align(placement: Placement, profile: RoutingProfile, devices: Devices) -> Placement:
    """Renames the devices of each layer so that tokens hop less; loads of packs stay as they are.

    For placements that only balance: which pack of experts lies on which device makes no
    difference to the balance. Nodes change places as a whole, devices within their node.

    Args:
        placement: any placement, with replicas or without.
        profile: where the transitions come from.
        devices: the nodes and devices that the placement was made for.
    """
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
    # Between two nodes, devices are matched as well as possible; nodes by what flows at all.
    _, node_of = linear_sum_assignment(-blocks.sum(axis=(1, 3)))
    order = np.empty(devices.num_gpus, dtype=np.int64)
    for node, pack_node in enumerate(node_of):
        _, inner = linear_sum_assignment(-blocks[node, :, pack_node])
        order[node * each : (node + 1) * each] = pack_node * each + inner
    return order
