"""The controller tries what can pay, stops what does not, and says which."""

import random

import numpy as np
import pytest

from moe_runtime.policies.prefetch import Controller, StepCost, num_needed


def step(
    controller: Controller, off: float, on: float, *, stall: float = 0.5, saved: float = 1.0
) -> bool:
    """One step that takes ``off`` or ``on`` seconds; returns whether it ran with prefetch."""
    was_on = controller.is_active
    seconds = on if was_on else off
    controller.step(
        StepCost(
            seconds=seconds,
            stall_s=0.0 if was_on else stall * seconds,
            predict_s=0.01 * seconds * was_on,
            saved_s=saved * seconds * was_on,
        )
    )
    return was_on


def run(controller: Controller, steps: int, **settings: float) -> list[bool]:
    settings = {"off": 1.0, "on": 1.0, **settings}
    return [step(controller, **settings) for _ in range(steps)]


def test_what_pays_goes_on_within_a_few_tokens_and_stays():
    controller = Controller()
    first = run(controller, 40, on=0.7)
    assert first == [False] * Controller.WINDOW + [True] * 34
    assert controller.verdict.startswith("on: a step took 700.00 ms with prefetch and 1000.00 ms")
    assert sum(run(controller, 1000, on=0.7)) > 950


@pytest.mark.parametrize(
    ("right", "misses", "seconds", "pays"), [(3, 8, 8.0, True), (0, 12, 11.5, False)]
)
def test_a_third_of_the_wrong_guesses_evicted_what_is_read_again(right, misses, seconds, pays):
    """Tokens need ten experts, a second for each. In a step with it six are guessed."""
    controller = Controller()
    while controller.verdict == "not tried yet":
        is_on = controller.is_active
        cost = StepCost(
            seconds=seconds if is_on else 10.0,
            stall_s=5.0,
            predict_s=0.01,
            saved_s=1.0,
            needed_s=num_needed(misses, right, 6) if is_on else num_needed(10, 0, 0),
        )
        controller.step(cost)
    assert controller.is_active == pays


def test_nothing_is_tried_where_nothing_is_waited_for():
    controller = Controller()
    assert not any(run(controller, 500, on=0.5, stall=0.01))
    assert controller.num_trials == 0
    assert "too little to save" in controller.verdict
    # nor where steps are so short that predicting takes what waits take
    assert not any(run(controller, 500, off=3e-3, on=2e-3))


def test_what_costs_clearly_is_stopped_after_one_block():
    controller = Controller()
    used = run(controller, 40, on=1.5)
    assert sum(used) == Controller.BLOCK_STEPS
    assert controller.verdict.startswith("off: a step took 1500.00 ms")


def test_trials_that_fail_become_rare():
    controller = Controller()
    used = run(controller, 3000, on=1.005)
    assert 0 < sum(used) < 0.03 * 3000
    assert used[-1] is False


def test_what_pays_no_more_goes_off_within_a_window():
    controller = Controller()
    run(controller, 60, on=0.7)
    assert controller.is_active
    used = run(controller, 20, on=1.0, stall=0.0, saved=0.0)
    assert sum(used) <= Controller.WINDOW
    assert "saved at most 0.00 ms" in controller.verdict
    # and comes back once there is something to wait for again
    assert run(controller, 60, on=0.7)[-1]


@pytest.mark.parametrize("outlier", [30.0, 1e3])
def test_one_slow_step_decides_nothing(outlier):
    controller = Controller()
    while not controller.is_active:
        step(controller, 1.0, 0.7)
    run(controller, 3, on=0.7)
    run(controller, 1, on=outlier, off=outlier)
    assert run(controller, 30, on=0.7)[-1]


@pytest.mark.parametrize(("on", "pays"), [(0.8, True), (1.05, False)])
def test_tokens_that_need_many_experts_decide_nothing(on, pays):
    """Needs vary more between tokens than prefetching changes; first trials are right anyway."""
    for seed in range(30):
        needs, controller = random.Random(seed), Controller()
        while not controller.num_trials or controller.verdict == "not tried yet":
            needed_s, work_s = needs.uniform(0.5, 4.0), on if controller.is_active else 1.0
            cost = StepCost(
                seconds=work_s + needed_s,
                stall_s=needed_s,
                predict_s=0.01,
                saved_s=1.0,
                needed_s=needed_s,
            )
            controller.step(cost)
        assert controller.is_active == pays


@pytest.mark.parametrize("gain", [0.2, -0.2])
def test_a_clear_trial_ends_after_a_block_and_a_doubtful_one_goes_on(gain):
    """Uniform noise of 4 % and 80 % of a step."""
    ends = {}
    for noise in (0.04, 0.8):
        ends[noise] = []
        for seed in range(40):
            noises, controller = random.Random(seed), Controller()
            for number in range(40):
                slower = 1.0 + noises.uniform(-noise, noise) / 2
                step(controller, slower, (1 - gain) * slower)
                if controller.verdict != "not tried yet":
                    ends[noise].append((number + 1, controller.is_active))
                    break
    first, last = Controller.WINDOW + Controller.BLOCK_STEPS, Controller.WINDOW + 12
    assert ends[0.04] == [(first, gain > 0)] * 40
    assert sum(number == last for number, _ in ends[0.8]) > 25
    assert sum(is_on == (gain > 0) for _, is_on in ends[0.8]) > 25


def test_a_later_process_starts_with_the_result_and_compares_it_at_once():
    first = Controller()
    assert first.learned() == {}
    run(first, 40, on=0.7)
    for on, is_on_later in ((0.7, True), (1.3, False)):
        later = Controller()
        later.restore(first.learned())
        used = run(later, 20, on=on)
        trial = [True] * Controller.WINDOW + [False] * Controller.BLOCK_STEPS
        assert used == trial + [is_on_later] * (20 - len(trial))
        assert later.learned()["has_won"].tolist() == [is_on_later]
    last = Controller()
    last.restore(later.learned())
    assert not any(run(last, Controller.STEPS, on=0.7))
    assert run(last, 20, on=0.7)[-1]


@pytest.mark.parametrize("state", [{}, {"has_won": [2]}, {"has_won": [0, 1]}, {"won": [1]}])
def test_a_damaged_result_is_refused(state):
    with pytest.raises(ValueError, match="expected has_won"):
        Controller().restore({name: np.array(value) for name, value in state.items()})
