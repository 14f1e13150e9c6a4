"""EPLB as a plain loop over layers, items and packs: the specification of ``eplb.rebalance``."""

import functools
import operator
from collections.abc import Sequence

from moe_runtime.policies.placement.base import Devices


def rebalance_loop(
    loads: Sequence[Sequence[float]], devices: Devices, *, num_slots: int, num_groups: int = 1
) -> list[list[list[int]]]:
    """What ``rebalance`` computes with greedy packing, one item at a time.

    Args:
        loads: load of each expert, by layer.
        devices: nodes and devices.
        num_slots: physical slots of a layer.
        num_groups: groups of neighbouring experts.

    Returns:
        The experts of each device, by layer.
    """
    num_nodes = devices.num_nodes
    if num_groups % num_nodes or len(loads[0]) % num_nodes:
        num_groups = num_nodes = 1
    return [_place_layer(row, num_nodes, devices.num_gpus, num_slots, num_groups) for row in loads]


def _place_layer(
    loads: Sequence[float], num_nodes: int, num_gpus: int, num_slots: int, num_groups: int
) -> list[list[int]]:
    size = len(loads) // num_groups
    # Not by `sum`, which compensates rounding from Python 3.12 on, and then breaks ties otherwise.
    sums = [
        functools.reduce(operator.add, loads[group * size : (group + 1) * size])
        for group in range(num_groups)
    ]
    placed = []
    for groups in _pack(sums, num_nodes):
        experts = [group * size + member for group in groups for member in range(size)]
        holders = _replicate([loads[expert] for expert in experts], num_slots // num_nodes)
        per_copy = [loads[experts[holder]] / holders.count(holder) for holder in holders]
        packs = _pack(per_copy, num_gpus // num_nodes)
        placed += [[experts[holders[slot]] for slot in pack] for pack in packs]
    return placed


def _pack(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    room = len(weights) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min(
            (p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__
        )
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def _replicate(loads: Sequence[float], num_slots: int) -> list[int]:
    holders = list(range(len(loads)))
    copies = [1] * len(loads)
    while len(holders) < num_slots:
        hottest = max(range(len(loads)), key=lambda e: loads[e] / copies[e])
        holders.append(hottest)
        copies[hottest] += 1
    return holders
