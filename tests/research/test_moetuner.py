"""The two integer programmes against brute force, and what must hold for any input."""

import itertools
import signal
import threading

import numpy as np
import pytest
import scipy.optimize

from moe_runtime.lab.programme import Programme
from moe_runtime.policies.placement import Devices, RoutingProfile
from moe_runtime.research.placement_solvers import (
    TwoStage,
    attract,
    balance_clusters,
    cluster_layers,
    cluster_traffic,
    hop_costs,
    map_clusters,
    peak_traffic,
)

# Solvers stop when they are done: no machine is too slow for what is asked of them here.
PATIENCE_S = 1e6


def all_clusters(num_experts: int, num_clusters: int) -> np.ndarray:
    labels = [q for q in range(num_clusters) for _ in range(num_experts // num_clusters)]
    return np.array(sorted(set(itertools.permutations(labels))))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("num_experts", "num_clusters"), [(6, 2), (6, 3), (8, 4)])
def test_balance_is_the_best_there_is(num_experts, num_clusters, seed):
    loads = np.random.default_rng(seed).integers(1, 60, num_experts).astype(float)
    best = min(
        np.bincount(clusters, weights=loads).max()
        for clusters in all_clusters(num_experts, num_clusters)
    )
    found = balance_clusters(loads, num_clusters, time_limit_s=PATIENCE_S, gap=0.0)
    assert np.bincount(found).tolist() == [num_experts // num_clusters] * num_clusters
    assert np.bincount(found, weights=loads).max() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slack", [0.0, 0.1, 1.0])
def test_attraction_is_the_best_within_the_bound(seed, slack):
    random = np.random.default_rng(seed)
    loads = random.integers(1, 60, 6).astype(float)
    gains = random.integers(0, 100, (6, 3)).astype(float)
    start = balance_clusters(loads, 3, time_limit_s=PATIENCE_S, gap=0.0)
    limit = np.bincount(start, weights=loads).max() * (1 + slack)
    best = max(
        gains[np.arange(6), clusters].sum()
        for clusters in all_clusters(6, 3)
        if np.bincount(clusters, weights=loads).max() <= limit
    )
    found = attract(gains, loads, start=start, max_load=limit, time_limit_s=PATIENCE_S, gap=0.0)
    assert np.bincount(found, weights=loads).max() <= limit * (1 + 1e-6)
    assert gains[np.arange(6), found].sum() == pytest.approx(best)


@pytest.mark.parametrize(("nodes", "gpus", "pairs"), [(1, 3, 2), (3, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_mapping_is_the_best_there_is(nodes, gpus, pairs):
    """The least over all orders of the devices in each layer."""
    devices = Devices(num_nodes=nodes, gpus_per_node=gpus)
    num_gpus = devices.num_gpus
    size = (pairs, num_gpus, num_gpus)
    traffic = np.random.default_rng(pairs).integers(0, 50, size).astype(float)
    costs = hop_costs(devices)
    orders = [np.array(order) for order in itertools.permutations(range(num_gpus))]
    best = min(
        peak_traffic(np.stack(choice), traffic, costs)
        for choice in itertools.product(orders, repeat=pairs + 1)
    )
    found = map_clusters(traffic, costs, time_limit_s=PATIENCE_S)
    assert peak_traffic(found, traffic, costs) == pytest.approx(best, rel=2e-4)


def test_peak_traffic_is_a_literal_count():
    traffic = np.array([[[5.0, 1.0], [2.0, 7.0]]])
    costs = hop_costs(Devices(num_nodes=1, gpus_per_node=2))
    assert peak_traffic(np.array([[0, 1], [0, 1]]), traffic, costs) == 2
    assert peak_traffic(np.array([[0, 1], [1, 0]]), traffic, costs) == 7


def random_profile(seed: int, layers: int = 4, experts: int = 8) -> RoutingProfile:
    random = np.random.default_rng(seed)
    ids = random.integers(0, experts, (300, layers, 2))
    ids[:200, 1:] = (ids[:200, :1] * 3 + 1) % experts
    return RoutingProfile.from_ids(ids, experts)


def test_loads_stay_within_the_slack():
    profile = random_profile(2)
    clusters = cluster_layers(profile, 4, load_slack=0.1, time_limit_s=PATIENCE_S)
    for row, loads in zip(clusters, profile.loads_LE, strict=True):
        least = np.bincount(
            balance_clusters(loads, 4, time_limit_s=PATIENCE_S), weights=loads
        ).max()
        assert np.bincount(row).tolist() == [2, 2, 2, 2]
        assert np.bincount(row, weights=loads).max() <= 1.1 * least * (1 + 1e-6)


def test_more_slack_keeps_more_tokens():
    """Tokens go from heavy experts to heavy ones: together they keep them, but unbalanced."""
    heavy = np.array([90.0, 80, 1, 2, 3, 4, 70, 60])
    transitions = np.zeros((3, 8, 8))
    transitions[:, np.arange(8), np.arange(8)] = heavy
    transitions[:, [0, 1, 6, 7], [1, 0, 7, 6]] = 50
    profile = RoutingProfile(loads_BLE=np.tile(heavy, (1, 4, 1)), transitions_LEE=transitions)

    def kept(slack: float) -> float:
        clusters = cluster_layers(profile, 4, load_slack=slack, time_limit_s=PATIENCE_S)
        traffic = cluster_traffic(clusters, profile.transitions_LEE, 4)
        return float(np.trace(traffic, axis1=1, axis2=2).sum() / traffic.sum())

    assert kept(2.0) > kept(0.0) + 0.1
    assert kept(2.0) == pytest.approx(1.0)


@pytest.mark.parametrize("time_limit_s", [0.5, 1e-6])
def test_placement_holds_every_expert_once(time_limit_s):
    """Also where time runs out: the heuristic's placement stands."""
    devices = Devices(num_nodes=2, gpus_per_node=2)
    placement = TwoStage(time_limit_s=time_limit_s)(random_profile(1), devices, num_replicas=0)
    assert (np.sort(placement.expert_of_slot, axis=1) == np.arange(8)).all()


def test_programme_without_a_solution():
    programme = Programme()
    one = programme.binaries(1)[0]
    programme.equal([(2.0, one)], 1.0)
    assert programme.solve(time_limit_s=1.0) is None


def test_an_interrupt_does_not_wait_for_the_solver(monkeypatch):
    """The solver here ends only after the interrupt has come through."""
    came_through = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def endless(*_: object, **__: object) -> None:
        signal.pthread_kill(main_thread, signal.SIGINT)
        came_through.wait()

    monkeypatch.setattr(scipy.optimize, "milp", endless)
    programme = Programme()
    programme.equal([(1.0, programme.binaries(1)[0])], 1.0)
    with pytest.raises(KeyboardInterrupt):
        programme.solve(time_limit_s=1.0)
    came_through.set()


def test_a_failing_solver_says_so(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(scipy.optimize, "milp", refuse)
    programme = Programme()
    programme.equal([(1.0, programme.binaries(1)[0])], 1.0)
    with pytest.raises(ValueError, match="no such option"):
        programme.solve(time_limit_s=1.0)


def test_bad_input():
    devices = Devices(num_nodes=1, gpus_per_node=4)
    with pytest.raises(ValueError, match="moetuner makes no replicas"):
        TwoStage()(random_profile(0), devices, num_replicas=4)
    with pytest.raises(ValueError, match="load_slack"):
        TwoStage(load_slack=-1.0)
