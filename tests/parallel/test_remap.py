"""Transfers between placements against brute force, and remaps onto other numbers of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.parallel.placement_map import keep_in_place, moves_between, resize
from moe_runtime.policies.placement import EPLB, Devices, Placement, RoutingProfile


def eplb(seed: int, devices: Devices, *, experts: int = 12, layers: int = 3) -> Placement:
    loads = np.random.default_rng(seed).zipf(1.5, (layers, experts)).clip(max=100)
    replicas = (-experts % devices.num_gpus + devices.num_gpus) * (devices.num_gpus > 1)
    return EPLB(num_groups=devices.num_nodes)(
        RoutingProfile.from_loads(loads), devices, num_replicas=replicas
    )


def apply_moves(old: Placement, new: Placement, moves: list) -> np.ndarray:
    """What lies in the new slots once the moves are done: kept content and copied content."""
    content = np.full((new.num_layers, new.num_gpus, new.slots_per_gpu), -2)
    kept_gpus = min(old.num_gpus, new.num_gpus)
    kept_slots = min(old.slots_per_gpu, new.slots_per_gpu)
    rows = old.expert_of_slot.reshape(old.num_layers, old.num_gpus, -1)
    content[:, :kept_gpus, :kept_slots] = rows[:, :kept_gpus, :kept_slots]
    content = content.reshape(new.num_layers, -1)
    for move in moves:
        assert old.expert_of_slot[move.layer, move.source_slot] == move.expert
        content[move.layer, move.target_slot] = move.expert
    return np.where(new.expert_of_slot == -1, -1, content)


def transfers(moves: list) -> int:
    return sum(not move.is_local for move in moves)


def lacking(old: Placement, new: Placement, roles, layer: int) -> int:
    return sum(
        len(new.holds(layer, role) - old.holds(layer, gpu)) for gpu, role in enumerate(roles)
    )


def allowed_roles(devices: Devices) -> list[list[int]]:
    """All ways to exchange roles: nodes as a whole, devices within nodes."""
    each = devices.gpus_per_node
    ways = []
    for nodes in itertools.permutations(range(devices.num_nodes)):
        inner = itertools.product(itertools.permutations(range(each)), repeat=devices.num_nodes)
        for orders in inner:
            ways.append(
                [
                    node * each + gpu
                    for node, order in zip(nodes, orders, strict=True)
                    for gpu in order
                ]
            )
    return ways


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (2, 2), (3, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_fewest_transfers(nodes, gpus, seed):
    devices = Devices(num_nodes=nodes, gpus_per_node=gpus)
    old, new = eplb(seed, devices), eplb(seed + 100, devices)
    ways = allowed_roles(devices)
    layers = range(new.num_layers)
    least = {
        "none": sum(lacking(old, new, range(devices.num_gpus), layer) for layer in layers),
        "devices": min(sum(lacking(old, new, way, layer) for layer in layers) for way in ways),
        "layers": sum(min(lacking(old, new, way, layer) for way in ways) for layer in layers),
    }
    for rename, count in least.items():
        kept = keep_in_place(old, new, devices, rename=rename)
        moves = moves_between(old, kept, devices)
        assert transfers(moves) == count, rename
        np.testing.assert_array_equal(apply_moves(old, kept, moves), kept.expert_of_slot)
        np.testing.assert_array_equal(kept.copies, new.copies)


def test_same_placement_in_another_order_moves_nothing():
    devices = Devices(num_nodes=1, gpus_per_node=4)
    old = eplb(0, devices)
    rows = old.expert_of_slot.reshape(3, 4, -1)
    shuffled = Placement(expert_of_slot=rows[:, :, ::-1].reshape(3, -1), num_experts=12, num_gpus=4)
    kept = keep_in_place(old, shuffled, devices)
    np.testing.assert_array_equal(kept.expert_of_slot, old.expert_of_slot)
    assert moves_between(old, kept, devices) == []


def test_sources_are_near_and_take_turns():
    devices = Devices(num_nodes=2, gpus_per_node=2)
    old = Placement(expert_of_slot=np.array([[0, 1, 0, 2, 0, 3, 4, 5]]), num_experts=6, num_gpus=4)
    new = Placement(expert_of_slot=np.array([[0, 1, 0, 2, 5, 3, 4, 0]]), num_experts=6, num_gpus=4)
    sources = {move.target_slot: move.source_slot for move in moves_between(old, new, devices)}
    # Expert 5 from the neighbour, expert 0 for the last device from its neighbour as well.
    assert sources == {4: 7, 7: 4}


def fewest_moves_by_brute_force(held: list[set[int]], num_experts: int, num_gpus: int) -> int:
    """Over all ways to deal experts to ranks evenly."""
    low, high = num_experts // num_gpus, -(-num_experts // num_gpus)
    best = num_experts
    for ranks in itertools.product(range(num_gpus), repeat=num_experts):
        counts = np.bincount(ranks, minlength=num_gpus)
        if counts.min() < low or counts.max() > high:
            continue
        moved = sum(
            rank >= len(held) or expert not in held[rank] for expert, rank in enumerate(ranks)
        )
        best = min(best, moved)
    return best


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 4), (4, 3), (3, 1), (1, 3)])
def test_resizing_moves_as_little_as_possible(before, after):
    random = np.random.default_rng(before * 10 + after)
    width = -(-6 // before)
    slots = np.stack([random.permutation(width * before) for _ in range(3)])
    old = Placement(expert_of_slot=np.where(slots < 6, slots, -1), num_experts=6, num_gpus=before)
    new = resize(old, after, random.random((3, 6)))
    moves = moves_between(old, new, Devices(num_nodes=1, gpus_per_node=max(before, after)))
    for layer in range(3):
        held = [old.holds(layer, gpu) for gpu in range(before)]
        least = fewest_moves_by_brute_force(held, 6, after)
        assert transfers([move for move in moves if move.layer == layer]) == least
        counts = [len(new.holds(layer, gpu)) for gpu in range(after)]
        assert max(counts) - min(counts) <= 1
    np.testing.assert_array_equal(apply_moves(old, new, moves), new.expert_of_slot)


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 8), min_size=2, max_size=4))
def test_growing_and_shrinking_loses_no_expert(seed, sizes):
    placement = eplb(seed, Devices(num_nodes=1, gpus_per_node=sizes[0]))
    for size in sizes[1:]:
        resized = resize(placement, size)
        moves = moves_between(placement, resized, Devices(num_nodes=1, gpus_per_node=8))
        np.testing.assert_array_equal(
            apply_moves(placement, resized, moves), resized.expert_of_slot
        )
        assert resized.copies.min() >= 1
        assert resized.num_gpus == size
        placement = resized


def test_resizing_evens_out_loads():
    """Rank 0 gives its heaviest or lightest pair such that what stays is near the mean."""
    old = Placement(expert_of_slot=np.arange(8)[None], num_experts=8, num_gpus=2)
    loads = np.array([[40.0, 30, 2, 1, 20, 20, 3, 2]])
    new = resize(old, 4, loads)
    totals = [loads[0, sorted(new.holds(0, gpu))].sum() for gpu in range(4)]
    assert max(totals) <= 45
    assert transfers(moves_between(old, new, Devices(num_nodes=1, gpus_per_node=4))) == 4


def test_bad_input():
    devices = Devices(num_nodes=1, gpus_per_node=2)
    small = Placement(expert_of_slot=np.array([[0, 1]]), num_experts=2, num_gpus=2)
    large = Placement(expert_of_slot=np.array([[0, 1, 2, 3]]), num_experts=4, num_gpus=2)
    wide = Placement(expert_of_slot=np.array([[0, 1, 0, 1]]), num_experts=2, num_gpus=4)
    with pytest.raises(ValueError, match="different models"):
        moves_between(small, large, devices)
    with pytest.raises(ValueError, match="equally many, got 2 and 4"):
        keep_in_place(small, wide, Devices(num_nodes=1, gpus_per_node=4), rename="devices")
    with pytest.raises(ValueError, match="num_gpus must be at least 1"):
        resize(small, 0)
    with pytest.raises(ValueError, match="loads_LE must have shape"):
        resize(small, 2, np.ones((2, 2)))
