"""Balancing placements: golden vectors, the plain loop, brute force, and invariants."""

import functools
import itertools
import operator
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.policies.placement import (
    EPLB,
    PACKINGS,
    AntiCorrelation,
    Devices,
    Greedy,
    Placement,
    RoutingProfile,
    rebalance,
)
from moe_runtime.policies.placement.algorithms import pack


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


# The example of DeepSeek's repository: two layers, 12 experts, 16 slots, 4 groups, 2 nodes, 8 GPUs.
GOLDEN_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
GOLDEN_GPUS = [
    [{5, 6}, {5, 7}, {4, 8}, {3, 4}, {9, 10}, {2, 10}, {0, 1}, {1, 11}],
    [{7, 10}, {6, 8}, {6, 11}, {8, 9}, {2, 4}, {1, 5}, {0, 5}, {1, 3}],
]


def gpu_loads(placement: Placement, loads_LE: np.ndarray) -> np.ndarray:
    """Load of each device, added up slot by slot."""
    totals = np.zeros((placement.num_layers, placement.num_gpus))
    for layer, row in enumerate(placement.expert_of_slot.tolist()):
        for slot, expert in enumerate(row):
            share = loads_LE[layer, expert] / row.count(expert)
            totals[layer, slot // placement.slots_per_gpu] += share
    return totals


def balancedness(placement: Placement, loads_LE: np.ndarray) -> float:
    totals = gpu_loads(placement, loads_LE)
    return float((totals.mean(axis=1) / totals.max(axis=1)).mean())


def zipf_loads(num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.6, (num_layers, num_experts)).clip(max=5000)


def test_eplb_gives_the_golden_placement():
    devices = Devices(num_nodes=2, gpus_per_node=4)
    placement = rebalance(GOLDEN_LOADS, devices, num_slots=16, num_groups=4)
    found = [[placement.holds(layer, gpu) for gpu in range(8)] for layer in range(2)]
    assert found == GOLDEN_GPUS
    totals = gpu_loads(placement, GOLDEN_LOADS)
    assert totals.max(axis=1).tolist() == [156, 179.5]
    np.testing.assert_allclose(totals.mean(axis=1) / totals.max(axis=1), [0.828, 0.805], atol=5e-4)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 3),
    gpus=st.integers(1, 4),
    groups=st.integers(1, 6),
    members=st.integers(1, 5),
    spare=st.integers(0, 3),
    layers=st.integers(1, 3),
)
def test_eplb_is_the_plain_loop(seed, nodes, gpus, groups, members, spare, layers):
    num_gpus, num_experts = nodes * gpus, groups * members
    num_slots = num_gpus * (-(-num_experts // num_gpus) + spare)
    # Sevenths are not exact in binary, equal loads are frequent.
    loads = np.random.default_rng(seed).integers(0, 40, (layers, num_experts)) / 7
    devices = Devices(num_nodes=nodes, gpus_per_node=gpus)
    placement = rebalance(loads, devices, num_slots=num_slots, num_groups=groups)
    loop = rebalance_loop(loads.tolist(), devices, num_slots=num_slots, num_groups=groups)
    assert placement.expert_of_slot.tolist() == [list(chain.from_iterable(layer)) for layer in loop]
    assert placement.copies.min() >= 1
    assert (placement.copies.sum(axis=1) == num_slots).all()


def test_packings_are_balanced_in_their_order():
    """Refining cannot be worse than greedy; the snake is, by a few percent at Zipf loads."""
    devices = Devices(num_nodes=1, gpus_per_node=8)
    loads = zipf_loads(200, 64)
    score = {
        packing: balancedness(rebalance(loads, devices, num_slots=72, packing=packing), loads)
        for packing in PACKINGS
    }
    assert score["snake"] < score["greedy"] <= score["refined"]
    assert score["snake"] > 0.9 * score["greedy"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_packs_hold_every_item_once(packing):
    weights = np.random.default_rng(1).random((7, 24))
    packs = pack(weights, 6, packing=packing)
    assert packs.shape == (7, 6, 4)
    for row in packs:
        assert sorted(row.reshape(-1).tolist()) == list(range(24))


def test_order_of_the_snake():
    packs = pack(np.array([[1.0, 6, 5, 2, 4, 3]]), 2, packing="snake")
    assert packs.tolist() == [[[1, 5, 3], [2, 4, 0]]]


def best_makespan(loads: np.ndarray, num_gpus: int) -> float:
    """Brute force over all ways to deal experts into packs of equal size."""
    room = len(loads) // num_gpus
    best = np.inf
    for labels in set(itertools.permutations([g for g in range(num_gpus) for _ in range(room)])):
        totals = np.bincount(labels, weights=loads, minlength=num_gpus)
        best = min(best, totals.max())
    return best


@pytest.mark.parametrize("seed", range(2))
def test_greedy_is_near_the_optimum(seed):
    """Within 4/3, the bound of longest-processing-time-first."""
    loads = np.random.default_rng(seed).integers(0, 50, (1, 6)).astype(float)
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placement = Greedy()(RoutingProfile.from_loads(loads), devices, num_replicas=0)
    worst = gpu_loads(placement, loads).max()
    assert worst <= 4 / 3 * best_makespan(loads[0], 2)


SURGE = np.array([0, 1, 1, 0, 0, 1, 1, 0])
"""Which experts surge together: those that greedy, in descending order of load, puts together."""


def surging_history(surging_group: np.ndarray) -> np.ndarray:
    """Eight experts of nearly equal, descending mean load; in each window one group surges."""
    surging = surging_group[:, None] == SURGE
    loads = 100.0 - np.arange(8) * 0.5 + 60.0 * surging
    return loads[:, None, :]


def test_anti_correlation_separates_experts_that_surge_together():
    profile = RoutingProfile(
        loads_BLE=surging_history(np.arange(64) % 2), transitions_LEE=np.zeros((0, 8, 8))
    )
    devices = Devices(num_nodes=1, gpus_per_node=2)
    apart = AntiCorrelation()(profile, devices, num_replicas=0)
    assert [SURGE[list(apart.holds(0, gpu))].sum() for gpu in range(2)] == [2, 2]

    def worst(placement: Placement, history: np.ndarray) -> float:
        return float(np.mean([gpu_loads(placement, window).max() for window in history]))

    greedy = Greedy()(profile, devices, num_replicas=0)
    future = surging_history(np.random.default_rng(1).integers(0, 2, 64))
    assert worst(apart, future) < 0.85 * worst(greedy, future)


def test_anti_correlation_without_history_is_greedy():
    profile = RoutingProfile.from_loads(zipf_loads(5, 16))
    devices = Devices(num_nodes=1, gpus_per_node=4)
    apart = AntiCorrelation()(profile, devices, num_replicas=0)
    greedy = Greedy()(profile, devices, num_replicas=0)
    assert [apart.holds(2, g) for g in range(4)] == [greedy.holds(2, g) for g in range(4)]


def test_no_load_at_all_is_placed_too():
    profile = RoutingProfile.from_loads(np.zeros((2, 8)))
    devices = Devices(num_nodes=1, gpus_per_node=4)
    for policy in (Greedy(), AntiCorrelation(), EPLB()):
        assert policy(profile, devices, num_replicas=0).copies.min() == 1


class TestBadInput:
    def test_sizes_that_do_not_divide(self):
        devices = Devices(num_nodes=1, gpus_per_node=3)
        profile = RoutingProfile.from_loads(np.ones((1, 8)))
        with pytest.raises(ValueError, match="1 replicas would"):
            EPLB()(profile, devices, num_replicas=0)
        with pytest.raises(ValueError, match="do not divide among 5 groups"):
            rebalance(np.ones((1, 8)), devices, num_slots=9, num_groups=5)
        with pytest.raises(ValueError, match="at least as many slots"):
            rebalance(np.ones((1, 8)), devices, num_slots=6)
        with pytest.raises(ValueError, match="must not be negative"):
            EPLB()(profile, devices, num_replicas=-1)
        assert (EPLB()(profile, devices, num_replicas=16).copies == 3).all()
        with pytest.raises(ValueError, match="with 16, every device holds each of the 8 experts"):
            EPLB()(profile, devices, num_replicas=19)
        with pytest.raises(ValueError, match="num_nodes must be at least 1"):
            Devices(num_nodes=0, gpus_per_node=1)

    def test_replicas_where_none_are_made(self):
        devices = Devices(num_nodes=1, gpus_per_node=2)
        profile = RoutingProfile.from_loads(np.ones((1, 8)))
        with pytest.raises(ValueError, match="eplb does"):
            Greedy()(profile, devices, num_replicas=2)

    def test_unknown_packing(self):
        with pytest.raises(ValueError, match="snake"):
            pack(np.ones((1, 4)), 2, packing="random")

    def test_placement_without_an_expert(self):
        with pytest.raises(ValueError, match="expert 2 of layer 1 has none"):
            Placement(expert_of_slot=np.array([[0, 1, 2], [0, 1, 1]]), num_experts=3, num_gpus=1)
        with pytest.raises(ValueError, match="must hold experts"):
            Placement(expert_of_slot=np.array([[0, 1, 3]]), num_experts=3, num_gpus=1)
        with pytest.raises(ValueError, match="do not divide"):
            Placement(expert_of_slot=np.array([[0, 1, 2]]), num_experts=3, num_gpus=2)

    def test_profiles(self):
        with pytest.raises(ValueError, match="finite"):
            RoutingProfile.from_loads(np.array([[np.nan, 1.0]]))
        with pytest.raises(ValueError, match="tokens, layers, k"):
            RoutingProfile.from_ids(np.zeros((0, 2, 2), dtype=int), 4)
        with pytest.raises(ValueError, match="transitions_LEE must have shape"):
            RoutingProfile(loads_BLE=np.ones((1, 2, 4)), transitions_LEE=np.zeros((1, 4, 5)))


def test_counts_of_a_profile():
    ids = np.array([[[0, 1], [2, 3]], [[1, 9], [2, 0]], [[3, 1], [9, 9]]])
    profile = RoutingProfile.from_ids(ids, 4, num_windows=2)
    assert profile.loads_LE.tolist() == [[1, 3, 0, 1], [1, 0, 2, 1]]
    assert profile.loads_BLE[1].tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    expected = np.zeros((4, 4))
    for i, j in [(0, 2), (0, 3), (1, 2), (1, 3), (1, 2), (1, 0)]:
        expected[i, j] += 1
    np.testing.assert_array_equal(profile.transitions_LEE, [expected])


def test_slots_of_an_expert():
    placement = Placement(expert_of_slot=np.array([[2, 0, -1, 2, 1, 2]]), num_experts=3, num_gpus=2)
    assert placement.copies.tolist() == [[1, 1, 3]]
    assert placement.slots_of_expert.tolist() == [[[1, -1, -1], [4, -1, -1], [0, 3, 5]]]
    assert placement.gpu_of_slot.tolist() == [0, 0, 0, 1, 1, 1]
    assert placement.holds(0, 0) == {0, 2}
