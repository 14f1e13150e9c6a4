"""Plans for missing experts: the paper's example, and all choices for small layers."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.inference.device.misses import (
    ENOUGH,
    IDLE_PLANS,
    RESTED_LAYERS,
    RETRIED_LAYERS,
    TRIED,
    MissCosts,
    MissPlan,
    MissSpeeds,
    plan_misses,
)

A, B, C = range(3)
# Figure 5 of the paper: the device has a shared expert and two more to compute, a second each.
COSTS = MissCosts(cpu_s=float, copy_s=3.0, launch_s=1.0, residents_s=3.0)


def seconds_of(
    copied: Collection[int], rows: Mapping[int, int], there_s: Mapping[int, float], costs: MissCosts
) -> float:
    """Until the last event, each side taking its experts in the order in which they are there."""
    link = cpu = 0.0
    device = costs.residents_s
    for expert in sorted(rows, key=there_s.__getitem__):
        if expert in copied:
            link = max(link, there_s[expert]) + costs.copy_s
            device = max(device, link) + costs.launch_s
        else:
            cpu = max(cpu, there_s[expert]) + costs.cpu_s(rows[expert])
    return max(device, cpu + costs.return_s if len(copied) < len(rows) else 0.0)


def least_seconds(rows: dict[int, int], on_disk: frozenset[int], costs: MissCosts) -> float:
    """Over every choice of CPU or device for every expert."""
    late = [e for e in sorted(rows, key=lambda e: (-rows[e], e)) if e in on_disk]
    there_s = dict.fromkeys(rows, 0.0) | {e: (n + 1) * costs.read_s for n, e in enumerate(late)}
    sides = itertools.product((False, True), repeat=len(rows))
    return min(seconds_of({*itertools.compress(rows, s)}, rows, there_s, costs) for s in sides)


def test_example_of_the_paper():
    plan = plan_misses({A: 1, B: 1, C: 3}, (), COSTS)
    assert plan == ((C,), (A, B), 4.0, ())
    rows = {A: 1, B: 1, C: 3}
    there_s = dict.fromkeys(rows, 0.0)
    times = [seconds_of(some, rows, there_s, COSTS) for some in ([], [C], [C, A], [C, A, B])]
    assert times == [5, 4, 7, 10]


def draw(random: np.random.Generator, *, most_rows: int, most_late: int) -> tuple[dict, frozenset]:
    count = int(random.integers(1, 9))
    rows = {int(e): int(random.integers(1, most_rows + 1)) for e in random.permutation(16)[:count]}
    late = int(random.integers(0, min(most_late, count) + 1))
    return rows, frozenset(list(rows)[:late])


def draw_costs(random: np.random.Generator) -> MissCosts:
    base, each, copy_s, launch_s, return_s = random.uniform(0.1, 1.0, 5).tolist()
    return MissCosts(
        cpu_s=lambda count: base + each * (count - 1),
        copy_s=copy_s,
        launch_s=launch_s / 10,
        return_s=return_s / 10,
        residents_s=launch_s / 10,
        read_s=float(random.uniform(0.5, 4.0)),
    )


def test_a_token_of_one_sequence_gets_the_best_of_all_choices():
    """Every expert has one row and lies in RAM, so only their number counts."""
    random = np.random.default_rng(0)
    for _ in range(60):
        rows, _ = draw(random, most_rows=1, most_late=0)
        costs = draw_costs(random)
        plan = plan_misses(rows, (), costs)
        assert plan.seconds == pytest.approx(least_seconds(rows, frozenset(), costs))


@pytest.mark.parametrize("most_late", [0, 8])
def test_close_to_the_best_of_all_choices(most_late):
    """Never more than 1.1 times it, nearly always equal; never worse than one side alone."""
    random = np.random.default_rng(1)
    ratios = []
    for _ in range(150):
        rows, on_disk = draw(random, most_rows=8, most_late=most_late)
        costs = draw_costs(random)
        plan = plan_misses(rows, on_disk, costs)
        assert sorted(plan.copied + plan.computed) == sorted(rows)
        late = [e for e in sorted(rows, key=lambda e: (-rows[e], e)) if e in on_disk]
        there_s = dict.fromkeys(rows, 0.0) | {e: (n + 1) * costs.read_s for n, e in enumerate(late)}
        assert plan.seconds == pytest.approx(seconds_of(plan.copied, rows, there_s, costs))
        for side in ([], list(rows)):
            assert plan.seconds <= seconds_of(side, rows, there_s, costs) + 1e-9
        ratios.append(plan.seconds / least_seconds(rows, on_disk, costs))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.1
    assert np.mean(np.isclose(ratios, 1)) > 0.9


def test_an_idle_link_copies_experts_that_the_cpu_computes():
    costs = MissCosts(cpu_s=lambda count: 1.0, copy_s=1.2, launch_s=0.1, read_s=0.2)
    assert plan_misses({A: 1, B: 1}, (), replace(costs, copy_s=0.9)).kept == ()  # it has no time
    # the link is idle: the copy may last into the next layer
    assert plan_misses({A: 1}, (), costs) == ((), (A,), 1.0, (A,))
    costs = replace(costs, copy_s=0.6, launch_s=1.0)
    assert plan_misses({A: 1}, (), costs) == ((), (A,), 1.0, (A,))
    assert plan_misses({A: 1, B: 1}, (), costs) == ((A,), (B,), 1.6, (B,))
    assert plan_misses({A: 1, B: 1}, {B}, costs).kept == ()  # an expert from disk comes late


def test_equal_plans_prefer_copies():
    costs = MissCosts(cpu_s=lambda count: 1.0, copy_s=0.9, launch_s=0.1)
    assert plan_misses({A: 1}, (), costs).copied == (A,)
    assert plan_misses({}, (), costs) == ((), (), 0.0, ())
    with pytest.raises(ValueError, match="at least one row"):
        plan_misses({A: 0}, (), costs)


def plan(speeds: MissSpeeds, rows: dict[int, int], copy_s: float, on_disk: tuple = ()) -> MissPlan:
    return speeds.plan(rows, on_disk, copy_s=copy_s, read_s=2.0, has_residents=False)


def measured(*seconds: float, num_rows: int = 1) -> MissSpeeds:
    """Speeds of a CPU that was measured often enough, a time after the other."""
    speeds = MissSpeeds()
    for each_s in seconds:
        for _ in range(ENOUGH):
            speeds.computed(num_rows, each_s)
    return speeds


def test_numbers_of_rows_that_were_not_measured_are_like_the_nearest():
    speeds = measured(1.0, num_rows=2)
    speeds.computed(16, 1.0)  # too few say nothing
    for _ in range(ENOUGH):
        speeds.computed(8, 3.0)
    assert [speeds.cpu_s(rows) for rows in (1, 2, 4, 8, 16)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_each_side_is_measured_before_anything_is_planned():
    speeds = MissSpeeds()
    for _ in range(ENOUGH):
        assert plan(speeds, {3: 1, 5: 2}, 0.0) == ((5,), (3,), 0.0, ())
        speeds.computed(1, 1.0)
    assert plan(speeds, {3: 1, 5: 2}, 0.0) == ((5, 3), (), 0.0, ())
    assert plan(speeds, {3: 1}, 0.25).copied == (3,)
    assert plan(speeds, {3: 1}, 4.0).computed == (3,)


def test_a_slow_cpu_is_tried_again_ever_more_rarely():
    speeds, tried = measured(10.0), []
    for layer in range(4000):
        found = plan(speeds, {7: 1}, 1.0)
        if found.computed:
            assert found.seconds == 0.0  # no prediction
            tried.append(layer)
            speeds.computed(1, 10.0)
    assert 0 < len(tried) <= ENOUGH * np.log2(4000 / RETRIED_LAYERS)
    assert tried[0] > RETRIED_LAYERS


def test_resting_layers_count_towards_the_next_trial():
    """A first measurement ten times too slow does not lock the CPU out."""
    speeds, layers = measured(10.0), 0
    while speeds.rests() or not plan(speeds, {7: 1}, 2.0).computed:
        layers += 1
        if speeds.rests():
            speeds.rested()
    assert layers <= RETRIED_LAYERS + RESTED_LAYERS
    for _ in range(ENOUGH):
        speeds.computed(1, 1.0)
    assert plan(speeds, {7: 1}, 2.0).computed == (7,)
    assert not speeds.rests()


def test_a_quick_cpu_leaves_the_link_its_trial():
    speeds = measured(1.0)
    plans = [plan(speeds, {7: 1}, 10.0) for _ in range(3000)]
    copied = sum(found.copied == (7,) for found in plans)
    # a step in which the link copies computed experts needs no trial
    assert copied * 10.0 <= 3000 * 1.0 * TRIED * 1.01
    assert all(found.copied or found.kept for found in plans)


def test_layers_rest_if_plans_do_not_use_the_cpu():
    speeds = MissSpeeds()
    assert not any(speeds.rests() for _ in range(3 * RESTED_LAYERS))
    speeds = measured(10.0)
    for _ in range(IDLE_PLANS):
        assert not speeds.rests()
        assert plan(speeds, {7: 1}, 1.0).copied == (7,)
    for _ in range(RESTED_LAYERS):
        assert speeds.rests()
        assert speeds.rests()  # a layer that lacked nothing is no rest
        speeds.rested()
    assert not speeds.rests()  # until one lacks something
    assert plan(speeds, {7: 1}, 20.0).computed == (7,)
    assert not any(speeds.rests() for _ in range(3 * RESTED_LAYERS))


def test_experts_from_disk_are_planned_by_their_arrival():
    speeds = measured(1.0)
    found = plan(speeds, {1: 1, 2: 1}, 0.9, on_disk=(2,))
    # 1 is copied at once; 2 is in RAM at 2.0, and 0.9 more are less than 1.0
    assert found == ((1, 2), (), pytest.approx(2.9), ())


def test_a_copy_takes_as_long_as_the_host_takes_to_ask_for_it():
    speeds = measured(1.0)
    assert plan(speeds, {7: 1}, 0.5).copied == (7,)
    speeds.queue.add(3.0)
    assert plan(speeds, {7: 1}, 0.5).computed == (7,)
    # two on the CPU take as long as it takes to ask for one
    assert plan(speeds, {7: 1, 8: 1, 9: 1, 6: 1}, 0.5).seconds == 3.0
