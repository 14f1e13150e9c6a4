"""Predicted layer times against closed forms, and exchanges against a literal count of rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.lab.simulate.scaling import (
    ASSUMED,
    Imbalance,
    LayerSchedule,
    LayerWorkload,
    SimulatedLayer,
    _phases,
    predict_layer,
    rank_shares,
    read_machine,
    sweep_scaling,
    write_machine,
)
from moe_runtime.parallel.cluster import Cluster, Link, fit_link

FAST = Link(alpha_s=0.0, bytes_per_s=1.0)


def two_ranks(alpha_s: float = 0.0, *, occupies_compute: bool = False) -> Cluster:
    link = Link(alpha_s=alpha_s, bytes_per_s=1.0, occupies_compute=occupies_compute)
    return Cluster(num_ranks=2, ranks_per_node=2, intra=link, inter=link, flops_per_s=1.0)


def exchange_of(travel_s: float, compute_s: float) -> LayerWorkload:
    """Two ranks whose rows all go to the other one: so many seconds each way, and of experts."""
    rows = np.array([[0.0, 1.0], [1.0, 0.0]])
    return LayerWorkload(rows_PP=rows, row_bytes=travel_s, flops_per_row=compute_s)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_chunks_hide_all_but_the_first_and_the_last(degree):
    """Travel x and compute y > x a chunk: x + d y + x."""
    prediction = predict_layer(two_ranks(), exchange_of(8.0, 16.0), LayerSchedule(degree=degree))
    assert prediction.layer_s == pytest.approx(16 + 2 * 8 / degree)
    assert prediction.compute_s == pytest.approx(16)
    assert prediction.exposed_s == pytest.approx(16 / degree)
    assert prediction.communication_s == pytest.approx(16)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_travel_limits_the_layer_where_it_is_longer_or_takes_the_processor(degree):
    schedule = LayerSchedule(degree=degree)
    longer = predict_layer(two_ranks(), exchange_of(8.0, 4.0), schedule)
    assert longer.layer_s == pytest.approx(16)
    busy = predict_layer(two_ranks(occupies_compute=True), exchange_of(8.0, 16.0), schedule)
    assert busy.layer_s == pytest.approx(32)


@pytest.mark.parametrize(("processors", "layer_s"), [(None, 1.0), (4, 1.0), (2, 2.0), (1, 4.0)])
def test_ranks_that_share_processors_take_turns(processors, layer_s):
    """Four ranks with a second of work each and nothing to send, and two machines of four."""
    for num_ranks in (4, 8):
        cluster = Cluster(
            num_ranks=num_ranks,
            ranks_per_node=4,
            processors_per_node=processors,
            intra=FAST,
            inter=FAST,
            flops_per_s=1.0,
        )
        workload = LayerWorkload(rows_PP=np.eye(num_ranks), row_bytes=0.0, flops_per_row=1.0)
        assert predict_layer(cluster, workload, LayerSchedule()).layer_s == pytest.approx(layer_s)


def test_every_message_costs_its_latency():
    """One for the counts, one each way a chunk."""
    for degree in (1, 4):
        prediction = predict_layer(
            two_ranks(alpha_s=100.0), exchange_of(8.0, 0.0), LayerSchedule(degree=degree)
        )
        assert prediction.communication_s == pytest.approx(100 + 2 * degree * 100 + 16)


def test_rows_that_stay_and_shared_experts_are_computed_meanwhile():
    workload = LayerWorkload(rows_PP=np.ones((2, 2)), row_bytes=6.0, flops_per_row=10.0)
    plain = predict_layer(two_ranks(), workload, LayerSchedule())
    local = predict_layer(two_ranks(), workload, LayerSchedule(is_local_first=True))
    assert plain.layer_s == pytest.approx(6 + 20 + 6)
    assert local.layer_s == pytest.approx(10 + 10 + 6)
    workload = replace(exchange_of(8.0, 16.0), shared_s=5.0)
    plain = predict_layer(two_ranks(), workload, LayerSchedule())
    early = predict_layer(two_ranks(), workload, LayerSchedule(is_shared_first=True))
    assert plain.layer_s - early.layer_s == pytest.approx(5)


def test_a_straggler_holds_up_everybody():
    workload = replace(exchange_of(8.0, 16.0), slowdown_P=np.array([1.0, 3.0]))
    prediction = predict_layer(two_ranks(), workload, LayerSchedule())
    assert prediction.compute_s == pytest.approx(48)
    assert prediction.layer_s == pytest.approx(8 + 48 + 8)


def test_one_rank_needs_no_communication():
    cluster = Cluster(num_ranks=1, ranks_per_node=8, intra=FAST, inter=FAST, flops_per_s=1.0)
    workload = LayerWorkload(rows_PP=np.ones((1, 1)), row_bytes=9.0, flops_per_row=3.0)
    prediction = predict_layer(cluster, workload, LayerSchedule(hierarchical=True))
    assert prediction.layer_s == 3
    assert prediction.exposed_s == 0


def literal_exchange(rows: np.ndarray, local: int, hierarchical: bool) -> tuple[list, list]:
    """Rows that each rank sends or receives (the larger) within its machine and beyond it."""
    num_ranks = len(rows)
    near_out, near_in, far_out, far_in = (np.zeros(num_ranks) for _ in range(4))

    def send(source: int, target: int, amount: float) -> None:
        if source == target:
            return
        same = source // local == target // local
        (near_out if same else far_out)[source] += amount
        (near_in if same else far_in)[target] += amount

    for source in range(num_ranks):
        for target in range(num_ranks):
            if hierarchical:
                relay = source // local * local + target % local
                send(source, relay, rows[source, target])
                send(relay, target, rows[source, target])
            else:
                send(source, target, rows[source, target])
    return np.maximum(near_out, near_in).tolist(), np.maximum(far_out, far_in).tolist()


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_bytes_and_messages_of_an_exchange(nodes, local, hierarchical):
    rows = np.random.default_rng(nodes).integers(0, 9, (nodes * local,) * 2).astype(float)
    cluster = Cluster(
        num_ranks=nodes * local,
        ranks_per_node=local,
        intra=Link(alpha_s=1000.0, bytes_per_s=1.0),
        inter=Link(alpha_s=1e6, bytes_per_s=1.0),
        flops_per_s=1.0,
    )
    near, far = literal_exchange(rows, local, hierarchical)
    far_messages = nodes - 1 if hierarchical else (nodes - 1) * local
    for stage in _phases(cluster, rows, 2.0, hierarchical):
        for phase in stage:
            alpha, expected = (
                (1e6 * far_messages, far) if phase.is_inter else (1000.0 * (local - 1), near)
            )
            np.testing.assert_allclose(phase.seconds_P, alpha + 2 * np.array(expected))


def test_exposed_communication_at_64_ranks():
    """At most 30 % of that without overlap, for a Mixtral-like layer on assumed links."""
    points = sweep_scaling(ASSUMED, SimulatedLayer(), Imbalance(), ranks=[64], degrees=[1, 4, 8])
    ratios = {(point.hierarchical, point.degree): point.exposed_ratio for point in points}
    assert ratios[False, 1] == 1
    assert ratios[True, 8] <= 0.3


def test_replicas_and_placement_shorten_the_layer():
    cluster = Cluster(num_ranks=16, ranks_per_node=8, intra=FAST, inter=FAST, flops_per_s=1e9)
    balance = {}
    for algorithm, replicas in (("round-robin", 0), ("greedy", 0), ("eplb", 2)):
        imbalance = Imbalance(zipf=1.0, algorithm=algorithm, replicas_per_rank=replicas)
        shares = rank_shares(cluster, SimulatedLayer(), imbalance)
        assert shares.shape == (16,)
        assert shares.sum() == pytest.approx((1 / np.arange(1, 65)).sum())
        balance[algorithm] = shares.mean() / shares.max()
    assert balance["round-robin"] < balance["greedy"] < balance["eplb"]


class TestLinks:
    def test_fit_weighs_small_messages(self):
        """A tenth of noise on the largest message does not drown the latency."""
        sizes = np.array([1e2, 1e4, 1e6, 1e8])
        times = (3e-5 + sizes / 2e9) * np.array([1, 1, 1, 1.1])
        assert fit_link(sizes, times).alpha_s == pytest.approx(3e-5, rel=0.1)

    def test_latency_below_the_noise_is_zero(self):
        link = fit_link([1e6, 2e6], [0.9e-3, 2e-3])
        assert link.alpha_s == 0
        assert link.bytes_per_s == pytest.approx(1e9, rel=0.2)

    @pytest.mark.parametrize("late", [None, 0, 1, 2, 3])
    def test_fit_finds_the_line_also_where_a_message_came_late(self, late):
        sizes = np.array([1e2, 1e4, 1e6, 1e8])
        times = (3e-5 + sizes / 2e9) * np.where(np.arange(4) == late, 1000, 1)
        link = fit_link(sizes, times)
        assert link.alpha_s == pytest.approx(3e-5)
        assert link.bytes_per_s == pytest.approx(2e9)
        assert link.seconds(2, 4e9) == pytest.approx(6e-5 + 2)

    @given(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
    def test_any_times_make_a_link_that_lies_among_them(self, times):
        """Also those of which a larger message took less: none is negative or takes no time."""
        sizes = np.array([4e3, 6e4, 1e6, 8e6])
        link = fit_link(sizes, times)
        assert math.isfinite(link.bytes_per_s)
        predicted = link.seconds(1, sizes)
        # A line through one of the points at least, which does not fall; a hundredth of the time is
        # the least that bytes take, rounding is far below that.
        assert predicted[0] <= 1.01 * max(times)
        assert predicted[-1] >= min(times) / 1.01


def test_a_machine_survives_its_file(tmp_path):
    path = tmp_path / "machine.toml"
    measured = Cluster(
        num_ranks=1,
        ranks_per_node=4,
        processors_per_node=2,
        flops_per_s=5.5e10,
        launch_s=7e-3,
        copy_bytes_per_s=1.9e9,
        intra=Link(alpha_s=9e-4, bytes_per_s=8.1e8, occupies_compute=True),
        inter=Link(alpha_s=1e-3, bytes_per_s=1e8),
    )
    for machine in (measured, ASSUMED):
        write_machine(machine, path, "measured somewhere\non a Monday")
        assert read_machine(path) == machine
