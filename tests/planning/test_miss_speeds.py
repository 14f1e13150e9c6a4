"""Running means of what misses cost, and the plans that they make: no clock, only what is told."""

import pytest

from moe_runtime.inference.device.miss_plans import (
    IDLE_PLANS,
    RESTED_LAYERS,
    TRIED,
    WEIGHT,
    MissPlan,
    MissSpeeds,
    RunningMean,
)


def plan(speeds: MissSpeeds, rows: dict[int, int], copy_s: float, on_disk: tuple = ()) -> MissPlan:
    return speeds.plan(rows, on_disk, copy_s=copy_s, read_s=2.0, has_residents=False)


def test_the_latest_measurements_count_most() -> None:
    mean = RunningMean()
    for seconds in (1.0, 1.0, 2.0):
        mean.add(seconds)
    assert mean.seconds == pytest.approx(1.0 + WEIGHT)
    for _ in range(100):
        mean.add(3.0)
    assert mean.seconds == pytest.approx(3.0, rel=1e-4)


def test_numbers_of_rows_that_were_not_measured_are_like_the_nearest() -> None:
    speeds = MissSpeeds()
    speeds.computed(2, 1.0)
    speeds.computed(8, 3.0)
    assert [speeds.cpu_s(rows) for rows in (1, 2, 4, 8, 16)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_each_side_is_measured_before_anything_is_planned() -> None:
    speeds = MissSpeeds()
    assert plan(speeds, {3: 1, 5: 2}, 0.0) == ((5,), (3,), 0.0, ())
    speeds.computed(1, 1.0)
    assert plan(speeds, {3: 1, 5: 2}, 0.0) == ((5, 3), (), 0.0, ())
    assert plan(speeds, {3: 1}, 0.25).copied == (3,)
    assert plan(speeds, {3: 1}, 4.0).computed == (3,)


def test_a_slow_side_is_tried_again_for_a_small_share_of_the_time() -> None:
    speeds, tried = MissSpeeds(), 0
    speeds.computed(1, 10.0)
    for _ in range(5000):
        found = plan(speeds, {7: 1}, 1.0)
        if found.computed:
            tried += 1
            assert found.seconds == 0.0  # no prediction
            speeds.computed(1, 10.0)
    assert 0 < tried * 10.0 <= 5000 * 1.0 * TRIED * 1.01
    for _ in range(100):
        speeds.computed(1, 0.5)  # it has become quicker
    assert plan(speeds, {7: 1}, 1.0).computed == (7,)


def test_a_quick_cpu_leaves_the_link_its_trial() -> None:
    speeds = MissSpeeds()
    speeds.computed(1, 1.0)
    plans = [plan(speeds, {7: 1}, 10.0) for _ in range(3000)]
    copied = sum(found.copied == (7,) for found in plans)
    assert 0 < copied * 10.0 <= 3000 * 1.0 * TRIED * 1.01


def test_layers_do_without_plans_that_leave_the_cpu_nothing() -> None:
    speeds = MissSpeeds()
    assert not any(speeds.rests() for _ in range(3 * RESTED_LAYERS))
    speeds.computed(1, 10.0)
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


def test_what_comes_from_disk_is_computed_where_it_comes() -> None:
    speeds = MissSpeeds()
    speeds.computed(1, 1.0)
    found = plan(speeds, {1: 1, 2: 1}, 0.9, on_disk=(2,))
    # 1 is copied at once; 2 is in RAM at 2.0, and 0.9 more are less than 1.0
    assert found == ((1, 2), (), pytest.approx(2.9), ())


def test_a_copy_takes_as_long_as_the_host_takes_to_ask_for_it() -> None:
    speeds = MissSpeeds()
    speeds.computed(1, 1.0)
    assert plan(speeds, {7: 1}, 0.5).copied == (7,)
    speeds.queue.add(3.0)
    assert plan(speeds, {7: 1}, 0.5).computed == (7,)
    # two on the CPU take as long as it takes to ask for one
    assert plan(speeds, {7: 1, 8: 1, 9: 1, 6: 1}, 0.5).seconds == 3.0
