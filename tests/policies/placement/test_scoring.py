"""Scores against a literal count, token by token."""

import numpy as np
import pytest

from moe_runtime.policies.placement import EPLB, Devices, Placement, RoundRobin, RoutingProfile
from moe_runtime.policies.placement.scoring import gpus_of_tokens, score_placement


def literal_scores(placement: Placement, ids: np.ndarray, devices: Devices) -> dict[str, float]:
    """The definitions in loops over tokens, layers and experts."""
    tokens, layers, _ = ids.shape
    loads = np.zeros((layers, placement.num_gpus))
    where: list[list[list[int]]] = []
    for token in range(tokens):
        where.append([])
        for layer in range(layers):
            row = placement.expert_of_slot[layer].tolist()
            gpus = []
            for expert in ids[token, layer].tolist():
                if not 0 <= expert < placement.num_experts:
                    continue
                slots = [slot for slot, held in enumerate(row) if held == expert]
                gpus.append(slots[token % len(slots)] // placement.slots_per_gpu)
                loads[layer, gpus[-1]] += 1
            where[-1].append(gpus)
    ways = [
        (a, b)
        for token in where
        for layer in range(layers - 1)
        for a in token[layer]
        for b in token[layer + 1]
    ]
    balance = loads.mean(axis=1) / loads.max(axis=1)
    visits = [len(set(gpus)) for token in where for gpus in token if gpus]
    return {
        "balancedness": balance.mean(),
        "worst_balancedness": balance.min(),
        "hops": np.mean([a != b for a, b in ways]),
        "node_hops": np.mean([devices.node_of(a) != devices.node_of(b) for a, b in ways]),
        "devices_per_token": np.mean(visits),
    }


@pytest.mark.parametrize("num_replicas", [0, 8])
def test_scores_are_the_literal_counts(num_replicas, monkeypatch):
    # Few enough that the tokens are counted in several parts.
    monkeypatch.setattr("moe_runtime.policies.placement.scoring._TOKENS_AT_ONCE", 7)
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.5, (61, 3, 2)) - 1, 16)
    devices = Devices(num_nodes=2, gpus_per_node=2)
    profile = RoutingProfile.from_ids(ids, 16)
    placement = EPLB()(profile, devices, num_replicas=num_replicas)
    score = score_placement(placement, ids, devices)
    for name, value in literal_scores(placement, ids, devices).items():
        assert getattr(score, name) == pytest.approx(value), name


def test_rows_of_tokens_that_stay():
    """Two tokens, three layers, four devices of an expert each."""
    ids = np.array([[[0, 3], [0, 1], [2, 0]], [[1, 2], [3, 1], [3, 0]]])
    placement = Placement(expert_of_slot=np.arange(12).reshape(3, 4) % 4, num_experts=4, num_gpus=4)
    score = score_placement(placement, ids, Devices(num_nodes=1, gpus_per_node=4))
    hops, begins, others = 1 + 1, 2 * 3 / 4, 2 * 6
    assert score.staying_rows == pytest.approx((hops + begins + others) / 6)


def test_a_token_without_a_first_choice_stays_where_it_is():
    """From device 1 to 1 by way of a layer without a choice; the other token never has one."""
    ids = np.array([[[1, 0], [-1, 1], [1, 1]], [[-1, -1], [-1, -1], [-1, -1]]])
    placement = Placement(expert_of_slot=np.arange(6).reshape(3, 2) % 2, num_experts=2, num_gpus=2)
    score = score_placement(placement, ids, Devices(num_nodes=1, gpus_per_node=2))
    begins, others = 1 / 2, 2 * 1
    assert score.staying_rows == pytest.approx((begins + others) / 2), "two first choices"


def test_primary_hops_look_at_first_choices():
    ids = np.array([[[0, 3], [1, 0]], [[2, 0], [0, 1]]])
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placement = RoundRobin()(RoutingProfile.from_ids(ids, 4), devices, num_replicas=0)
    # Experts 0 and 1 lie together: the first token stays, the second goes from 2 to 0.
    assert score_placement(placement, ids, devices).primary_hops == 0.5


def test_tokens_of_a_replicated_expert_take_turns():
    placement = Placement(expert_of_slot=np.array([[0, 1, 0, 2]]), num_experts=3, num_gpus=2)
    gpus = gpus_of_tokens(placement, np.zeros((5, 1, 1), dtype=int))
    assert gpus.reshape(-1).tolist() == [0, 1, 0, 1, 0]


def test_max_load_sees_a_burst_that_the_mean_hides():
    ids = np.array([0] * 32 + [1] * 32).reshape(64, 1, 1)
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placement = RoundRobin()(RoutingProfile.from_ids(ids, 2), devices, num_replicas=0)
    score = score_placement(placement, ids, devices, num_windows=4)
    assert score_placement(placement, ids[:1], devices).mean_max_load == 2.0, "one window, not 32"
    assert score.balancedness == 1
    assert score.max_load == score.mean_max_load == 2


def test_bad_input():
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placement = Placement(expert_of_slot=np.array([[0, 1]]), num_experts=2, num_gpus=2)
    with pytest.raises(ValueError, match="tokens, 1, k"):
        score_placement(placement, np.zeros((4, 2, 1), dtype=int), devices)
    four = Devices(num_nodes=1, gpus_per_node=4)
    with pytest.raises(ValueError, match="2 devices, the machine 4"):
        score_placement(placement, np.zeros((4, 1, 1), dtype=int), four)
