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
    balance = [own.mean() / own.max() for own in loads if own.any()]
    peaks = literal_peaks(where, placement.num_gpus)
    visits = [len(set(gpus)) for token in where for gpus in token if gpus]
    return {
        "balancedness": np.mean(balance),
        "worst_balancedness": min(balance),
        "max_load": max(peaks),
        "mean_max_load": np.mean(peaks),
        "hops": np.mean([a != b for a, b in ways]),
        "node_hops": np.mean([devices.node_of(a) != devices.node_of(b) for a, b in ways]),
        "devices_per_token": np.mean(visits),
    }


def literal_peaks(where: list[list[list[int]]], num_gpus: int) -> list[float]:
    """Peak loads of each layer in 32 windows, or in one a token; those without a visit have none.

    Windows are as even as they can be, the longer ones first.
    """
    num_windows = min(32, len(where))
    size, longer = divmod(len(where), num_windows)
    found, begin = list[float](), 0
    for window in range(num_windows):
        end = begin + size + (window < longer)
        for layer in range(len(where[0])):
            gpus = [gpu for token in where[begin:end] for gpu in token[layer]]
            if gpus:
                found.append(max(map(gpus.count, gpus)) / len(gpus) * num_gpus)
        begin = end
    return found


@pytest.mark.parametrize("num_tokens", [61, 20, 3])
@pytest.mark.parametrize("num_replicas", [0, 8])
def test_scores_are_the_literal_counts(num_replicas, num_tokens, monkeypatch):
    # Few enough that the tokens are counted in several parts.
    monkeypatch.setattr("moe_runtime.policies.placement.scoring._TOKENS_AT_ONCE", 7)
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.5, (num_tokens, 3, 2)) - 1, 16)
    devices = Devices(num_nodes=2, gpus_per_node=2)
    profile = RoutingProfile.from_ids(ids, 16)
    placement = EPLB()(profile, devices, num_replicas=num_replicas)
    score = score_placement(placement, ids, devices)
    for name, value in literal_scores(placement, ids, devices).items():
        assert getattr(score, name) == pytest.approx(value), name


def test_layers_and_windows_without_visits_count_for_nothing():
    """Two layers, of which nobody visits the second; and half of the tokens visit none."""
    ids = np.full((64, 2, 1), 2)
    ids[::2, 0] = 0
    placement = Placement(expert_of_slot=np.array([[0, 1]] * 2), num_experts=2, num_gpus=2)
    score = score_placement(placement, ids, Devices(num_nodes=1, gpus_per_node=2), num_windows=64)
    assert (score.balancedness, score.worst_balancedness) == (0.5, 0.5)
    assert score.max_load == score.mean_max_load == 2.0


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
    with pytest.raises(ValueError, match="no expert, so there is nothing to score"):
        score_placement(placement, np.full((4, 1, 1), 2), devices)
