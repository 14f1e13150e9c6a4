"""Simulated services and training against closed forms, a queue's theory, and random failures."""

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_runtime.errors import CapacityError
from moe_runtime.lab.simulate.scaling import Imbalance
from moe_runtime.lab.simulate.system import (
    Arrivals,
    Failures,
    SimulatedModel,
    SimulatedSteps,
    TrainLayout,
    best_interval_s,
    poisson_arrivals,
    read_arrivals,
    read_model,
    search_layouts,
    simulate_serving,
    simulate_training,
    useful_share,
)
from moe_runtime.parallel.cluster import Cluster, Link

FREE = Link(alpha_s=0.0, bytes_per_s=math.inf)
MODEL = SimulatedModel(
    num_layers=3,
    model_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden=5,
    dense_parameters=300.0,
    kv_bytes_per_token=7.0,
)


def machine(num_ranks: int, **rates: Any) -> Cluster:
    rates = {"flops_per_s": 1e3, "intra": FREE, "inter": FREE, **rates}
    return Cluster(num_ranks=num_ranks, ranks_per_node=num_ranks, **rates)


class ConstantSteps:
    """A step takes a second, whatever it has; nothing needs memory."""

    kv_tokens = math.inf

    def __init__(self, cluster: Cluster, *_: Any, **__: Any) -> None:
        self.cluster = cluster

    def step_s(self, tokens: float, context: float = 0.0) -> float:
        return 1.0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_step_is_its_products(num_ranks):
    """With free links and memory: two operations for every weight that a token passes."""
    times = SimulatedSteps(machine(num_ranks), MODEL)
    flops = 2 * (MODEL.dense_parameters + MODEL.num_layers * MODEL.top_k * 3 * 8 * 5)
    for tokens in (1, 3, 48):
        assert times.step_s(tokens) == pytest.approx(tokens * flops / 1e3)
        assert times.step_s(tokens, is_training=True) == pytest.approx(4 * tokens * flops / 1e3)


def test_a_step_of_one_token_reads_what_it_passes():
    """Weights once: those of the dense part, and of the experts that a token is expected to
    choose; keys and values of the context."""
    memory = 1e2
    times = SimulatedSteps(machine(1, flops_per_s=1e30, memory_bytes_per_s=memory), MODEL)
    touched = 4 * (1 - math.exp(-2 / 4))
    read = 2 * (300 + 3 * touched * 120) + 11 * 7
    assert times.step_s(1, context=11) == pytest.approx(read / memory)


def test_experts_that_memory_lacks_come_from_disk():
    dense, experts = 600, 3 * 4 * 240
    room = (dense + experts / 2) / 0.8
    rates = {"flops_per_s": 1e30, "memory_bytes_per_s": 1e9, "memory_bytes": room}
    times = SimulatedSteps(machine(1, disk_bytes_per_s=10.0, **rates), MODEL)
    assert times.resident_share == pytest.approx(0.5)
    assert times.step_s(1e6) == pytest.approx(experts / 2 / 10, rel=1e-3)
    with pytest.raises(CapacityError, match="give more ranks, or disk_bytes_per_s"):
        SimulatedSteps(machine(1, **rates), MODEL)
    assert SimulatedSteps(machine(2, **rates), MODEL).resident_share == 1


def test_exchanges_and_stragglers():
    """Rows of other ranks go there and back; the slowest rank decides."""
    link = Link(alpha_s=0.0, bytes_per_s=100.0)
    times = SimulatedSteps(machine(2, flops_per_s=1e30, intra=link), MODEL)
    sent = 3 * 2 * (4 * 2 / 2) * 16  # layers, both ways, half of the rows, their bytes
    assert times.step_s(4) == pytest.approx(sent / 100)
    again_and_back = 3 * sent / 100  # rows twice, as a layer is computed again, and gradients
    assert times.step_s(4, is_training=True) == pytest.approx(again_and_back)
    slow = SimulatedSteps(machine(2), MODEL, Imbalance(straggler=3.0))
    assert slow.step_s(8) == pytest.approx(3 * SimulatedSteps(machine(2), MODEL).step_s(8))


def test_more_ranks_than_experts_have_copies():
    for num_ranks in (4, 8):
        times = SimulatedSteps(machine(num_ranks), MODEL)
        assert times.step_s(8) == pytest.approx(SimulatedSteps(machine(1), MODEL).step_s(8))
    # of six slots, those of experts with a copy have half of the work
    uneven = SimulatedSteps(machine(6), replace(MODEL, dense_parameters=1e-9))
    rows = 8 * 6 * 2 / 4
    assert uneven.step_s(8) == pytest.approx(3 * rows * 2 * 120 / 1e3)


def test_a_request_alone_takes_a_step_for_each_token():
    asked = Arrivals(np.array([0.0, 50.0]), np.array([5, 12]), np.array([4, 1]))
    found = simulate_serving(machine(1), MODEL, asked, step_tokens=5, times=ConstantSteps)
    assert found.first_s.tolist() == [1.0, 3.0]
    assert found.between_s.tolist() == [1.0, pytest.approx(math.nan, nan_ok=True)]
    assert found.met(3.0, 1.0) == 1, "one token has nothing between"
    assert found.met(3.0, 0.5) == 0.5
    assert found.tokens_per_s == pytest.approx(5 / 53)


def test_a_queue_of_equal_requests_waits_as_theory_says():
    """Prompts that fill a step each, random arrivals: the mean wait of M/D/1."""
    rate = 0.6
    asked = poisson_arrivals(20_000, rate, 8, 1, seed=3)
    found = simulate_serving(machine(1), MODEL, asked, step_tokens=8, times=ConstantSteps)
    assert found.first_s.mean() == pytest.approx(1 + rate / (2 * (1 - rate)), rel=0.05)


def test_prompts_and_answers_on_ranks_of_their_own():
    """The first token after the prompt, the others after keys and values have travelled."""
    link = Link(alpha_s=2.0, bytes_per_s=7.0)
    cluster = replace(machine(4), intra=link, inter=link)
    asked = Arrivals(np.array([0.0]), np.array([5]), np.array([4]))
    found = simulate_serving(
        cluster, MODEL, asked, step_tokens=5, prefill_ranks=2, times=ConstantSteps
    )
    assert found.first_s.tolist() == [1.0]
    assert found.between_s.tolist() == [pytest.approx((2 + 5 + 3) / 3)]
    with pytest.raises(ValueError, match="4 of 4 ranks leave none"):
        simulate_serving(cluster, MODEL, asked, prefill_ranks=4)


def test_requests_wait_for_room_for_their_keys_and_values():
    class Narrow(ConstantSteps):
        kv_tokens = 10

    asked = Arrivals(np.zeros(3), np.full(3, 4), np.full(3, 2))
    found = simulate_serving(machine(1), MODEL, asked, step_tokens=64, times=Narrow)
    assert found.first_s.tolist() == [1.0, 3.0, 5.0]


def test_failures_begin_again_what_was_under_way():
    asked = poisson_arrivals(200, 0.1, 4, 6, seed=1)
    failures = Failures(mean_s=800.0, restart_s=20.0, seed=2)
    calm = simulate_serving(machine(2), MODEL, asked, times=ConstantSteps)
    found = simulate_serving(machine(2), MODEL, asked, failures=failures, times=ConstantSteps)
    span = float(asked.at_s[-1])
    assert found.num_failures == pytest.approx(span / 400, abs=4 * math.sqrt(span / 400))
    assert (found.first_s >= calm.first_s - 1).all()
    assert found.first_s.mean() > calm.first_s.mean()
    assert (found.between_s > 0).all()


def test_failures_while_nothing_runs():
    """Against drawn failures: of requests far apart, those wait that come during a restart."""
    restart_s = 1000.0
    asked = Arrivals(1e5 * np.arange(1.0, 2001.0), np.full(2000, 4), np.full(2000, 1))
    failures = Failures(mean_s=1000.0, restart_s=restart_s, seed=2)
    found = simulate_serving(machine(2), MODEL, asked, failures=failures, times=ConstantSteps)
    assert (found.first_s >= 1).all()
    random, up, waits = np.random.default_rng(0), 0.0, []
    for at_s in asked.at_s:
        while (fails_s := up + random.exponential(500.0)) < at_s:
            up = fails_s + restart_s
        waits.append(max(0.0, up - at_s))
        up = max(up, at_s)
    spread = 4 * np.std(waits) * math.sqrt(2 / 2000) + 30 * restart_s / 1000 + 0.1
    assert found.first_s.mean() - 1 == pytest.approx(np.mean(waits), abs=spread)


def test_failures_faster_than_requests_are_refused():
    asked = poisson_arrivals(5, 0.001, 4, 6)
    for mean_s in (1e-9, 0.1, 1.0):
        failures = Failures(mean_s=mean_s, restart_s=0.0)
        with pytest.raises(CapacityError, match="no request ended between 100 failures"):
            simulate_serving(machine(2), MODEL, asked, failures=failures, times=ConstantSteps)


def test_keys_and_values_have_room_before_experts_on_disk():
    """A tenth of memory; requests are served together as far as it has room for them."""
    rates = {"flops_per_s": 1e30, "memory_bytes_per_s": 1e9, "disk_bytes_per_s": 1e2}
    cluster = machine(1, memory_bytes=2000, **rates)
    times = SimulatedSteps(cluster, MODEL)
    assert times.kv_tokens == pytest.approx(200 / 7)
    assert times.resident_share == pytest.approx((1800 - 600 - 200) / (3 * 4 * 240))
    asked = Arrivals(np.zeros(4), np.full(4, 4), np.full(4, 3))
    taken = []

    class Counted(SimulatedSteps):
        def step_s(
            self, tokens: float, context: float = 0.0, *, is_training: bool = False
        ) -> float:
            taken.append(tokens)
            return 1.0

    found = simulate_serving(cluster, MODEL, asked, step_tokens=64, times=Counted)
    assert found.first_s.tolist() == [1.0] * 4
    assert taken == [16, 4, 4]
    large = Arrivals(np.zeros(2), np.array([4, 27]), np.full(2, 3))
    with pytest.raises(CapacityError, match=r"keys and values of 28 tokens.*has 30"):
        simulate_serving(cluster, MODEL, large, times=Counted)


@pytest.mark.parametrize("every_s", [20.0, 100.0, 700.0])
def test_what_failures_leave_of_the_time(every_s):
    """Against failures drawn one by one."""
    checkpoint_s, restart_s, mean_s = 5.0, 30.0, 400.0
    random = np.random.default_rng(0)
    now, pieces = 0.0, 0
    while pieces < 3000:
        until = random.exponential(mean_s)
        done = int(until // (every_s + checkpoint_s))
        pieces += done
        now += until + restart_s
    expected = useful_share(every_s, checkpoint_s, restart_s, mean_s)
    assert pieces * every_s / now == pytest.approx(expected, rel=0.05)


def test_the_best_interval_loses_least():
    best = best_interval_s(5.0, 2000.0)
    shares = [useful_share(f * best, 5.0, 30.0, 2000.0) for f in (0.5, 1.0, 2.0)]
    assert shares[1] == max(shares)
    assert useful_share(math.inf, 5.0, 30.0, math.inf) == 1.0
    assert useful_share(1e9, 5.0, 30.0, 1.0) == 0.0


def test_a_training_step_has_its_parts():
    link = Link(alpha_s=0.5, bytes_per_s=50.0)
    cluster = replace(machine(2, memory_bytes_per_s=1e3, flops_per_s=1e30), inter=link, intra=link)
    layout = TrainLayout(expert_ranks=2, tokens=4)
    found = simulate_training(cluster, MODEL, layout=replace(layout, micro_batches=3))
    times = SimulatedSteps(cluster, MODEL)
    assert found.layers_s == pytest.approx(3 * times.step_s(4, is_training=True))
    assert found.reduce_s == pytest.approx(2 * 0.5 + 2 * 300 * 2 / 2 / 50)
    assert found.optimizer_s == pytest.approx((300 / 2 + 3 * 2 * 120) * 2 * 14 / 1e3)
    assert found.tokens_per_s == pytest.approx(4 * 3 * 2 / found.step_s)
    whole, parts = 12 * (150 + 720) + 4 * (300 + 720), 16 * (150 + 720)
    for memory, rounds in ((whole + 1, 2), (whole - 1, 3), (parts + 1, 3), (parts - 1, None)):
        narrow = replace(cluster, memory_bytes=memory / 0.9, disk_bytes_per_s=1e6)
        if rounds is None:
            with pytest.raises(CapacityError, match="weights, gradients and optimizer"):
                simulate_training(narrow, MODEL, layout=layout)
        else:
            found = simulate_training(narrow, MODEL, layout=layout)
            assert found.reduce_s == pytest.approx(rounds * (0.5 + 300 * 2 / 2 / 50))
    failing = simulate_training(cluster, MODEL, layout=layout, failures=Failures(1e5, 100.0))
    assert 0 < failing.useful_share < 1


def test_stages_and_copies_of_experts_have_their_parts():
    """Four ranks: two stages, whose two ranks have a copy of each expert."""
    link = Link(alpha_s=0.5, bytes_per_s=50.0)
    cluster = replace(machine(4, flops_per_s=1e30), inter=link, intra=link, memory_bytes_per_s=1e3)
    model = replace(MODEL, num_layers=4)
    layout = TrainLayout(stages=2, expert_ranks=1, tokens=4, micro_batches=3)
    found = simulate_training(cluster, model, layout=layout)
    stage = replace(model, num_layers=2, dense_parameters=150)
    alone = SimulatedSteps(replace(cluster, num_ranks=1), stage)
    handed_s = 2 * (0.5 + 4 * 8 * 2 / 50)
    of_one = alone.step_s(4, is_training=True) + handed_s
    assert found.layers_s == pytest.approx((3 + 2 - 1) * of_one)
    experts = 2 * 4 * 120
    assert found.reduce_s == pytest.approx(2 * 2 * 0.5 + 2 * (150 + experts) * 2 / 2 / 50)
    assert found.optimizer_s == pytest.approx((150 / 2 + experts / 2) * 2 * 14 / 1e3)
    assert found.tokens_per_s == pytest.approx(4 * 3 * 2 / found.step_s)
    # the first stage keeps the inputs of a second micro-batch
    needed = 12 * (75 + 480) + 4 * (75 + 960) + 2 * 4 * 8 * 2
    for more, fits in ((1, True), (-1, False)):
        narrow = replace(cluster, memory_bytes=(needed + more) / 0.9, disk_bytes_per_s=1e6)
        if fits:
            simulate_training(narrow, model, layout=layout)
        else:
            with pytest.raises(CapacityError):
                simulate_training(narrow, model, layout=layout)


@pytest.mark.parametrize("memory_bytes", [math.inf, 16000.0, 6000.0, 100.0])
def test_the_search_finds_what_trying_every_layout_finds(memory_bytes):
    link = Link(alpha_s=1e-3, bytes_per_s=1e4)
    cluster = Cluster(
        num_ranks=8, ranks_per_node=4, intra=FREE, inter=link, flops_per_s=1e6,
        memory_bytes=memory_bytes, disk_bytes_per_s=1e6,
    )  # fmt: skip
    model = replace(MODEL, num_layers=4)
    tried = []
    for stages, expert_ranks, tokens in itertools.product(*([1, 2, 4],) * 2, [1, 2, 4, 8, 16, 32]):
        micro_batches, rest = divmod(8 * 2 * stages, tokens)
        layout = TrainLayout(
            stages=stages, expert_ranks=expert_ranks, tokens=tokens, micro_batches=micro_batches
        )
        if stages * expert_ranks <= 8 and not rest:
            with contextlib.suppress(CapacityError):
                tried.append(simulate_training(cluster, model, layout=layout))
    if not tried:
        with pytest.raises(CapacityError, match="8 ranks"):
            search_layouts(cluster, model, tokens=8, micro_batches=2)
        return
    found = search_layouts(cluster, model, tokens=8, micro_batches=2)
    assert {one.layout for one in found} == {one.layout for one in tried}
    assert found[0].tokens_per_s == max(one.tokens_per_s for one in tried)


def test_files(tmp_path):
    file = tmp_path / "a.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    file.write_text(head + "2023-11-16 18:17:04.9799600,7,2\n2023-11-16 18:17:03.9799600,5,0\n")
    found = read_arrivals(file)
    assert found.at_s.tolist() == pytest.approx([0.0, 1.0], abs=1e-5)
    assert (found.prompt.tolist(), found.new.tolist()) == ([5, 7], [1, 2])
    assert found.faster(2).at_s[1] == pytest.approx(0.5, abs=1e-5)
    assert Arrivals(np.array([0.0, 1.0, 3.0]), *np.ones((2, 3))).rate == pytest.approx(2 / 3)
    assert Arrivals(np.zeros(3), *np.ones((2, 3))).rate == math.inf
    for text, said in (
        ("a,b\n1,2\n", "expected the columns TIMESTAMP"),
        (head + "now,1,2\n", "line 2: expected a time and two counts"),
        (head + "2023-11-16 18:17:03,1,2\n", "fewer than two requests"),
        (head + "2023-11-16 18:17:03," + 30 * "9" + ",2\n", "line 2: expected a time and two"),
        (200_000 * "a" + ",b\n", "after line 0: field larger"),
        (head + "0001-01-01 00:00:00,1,2\n", "fewer than two requests"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_arrivals(file)
    sizes = tmp_path / "m.toml"
    text = "num_layers = 3\nmodel_dim = 8\nnum_experts = 4\ntop_k = 2\nexpert_hidden = 5\n"
    text += "dense_parameters = 300\nkv_bytes_per_token = 7\n"
    sizes.write_text(text)
    assert read_model(sizes) == MODEL
    for wrong, said in (
        (text.replace("top_k", "topk"), "did you mean 'top_k'"),
        (text.replace("= 2", "= 'two'"), "expected a number"),
        (text.replace("= 2", "= 9"), "top_k 9 exceeds the 4 experts"),
        (text.replace("= 8", "= 0"), "model_dim must be positive"),
        (text.replace("top_k = 2\n", ""), "lacks top_k"),
    ):
        sizes.write_text(wrong)
        with pytest.raises(ValueError, match=said):
            read_model(sizes)
