"""Sizes of steps, on machines whose times are a formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from moe_runtime.serving.scheduling import FREE_GROWTH, MAX_COST_RATIO, MIN_TOKENS, StepSizes

MOST = 256
DECODING = 4


@dataclass
class Machine:
    """Time stands still but for what `run` takes."""

    seconds_of: Callable[[int, int], float]
    now_s: float = 0.0
    taken: list[float] = field(default_factory=list)

    def run(self, sizes: StepSizes, num_prompt: int, num_decoding: int = DECODING) -> None:
        with sizes.timed(num_prompt=num_prompt, num_decoding=num_decoding):
            self.taken.append(self.seconds_of(num_prompt, num_decoding))
            self.now_s += self.taken[-1]


def seconds(read_all_s: float, token_s: float) -> Callable[[int, int], float]:
    """Of a mixture with 8 of 64 experts a token: those that somebody wants are read."""

    def of(num_prompt: int, num_decoding: int) -> float:
        rows = num_prompt + num_decoding
        return read_all_s * (1 - (7 / 8) ** rows) + token_s * rows

    return of


def after_a_prompt(machine: Machine, max_slowdown: float, num_tokens: int = 4000) -> list[int]:
    """Sizes of the steps in which a long prompt is read, on a server that has read one alone."""
    sizes = StepSizes(MOST, max_slowdown, clock=lambda: machine.now_s)
    machine.run(sizes, 300, 0)
    for _ in range(5):
        machine.run(sizes, 0)
    machine.taken.clear()
    found = []
    while num_tokens > 0:
        found.append(min(sizes.most_tokens(), num_tokens))
        machine.run(sizes, found[-1])
        num_tokens -= found[-1]
    return found


@pytest.mark.parametrize("max_slowdown", [2.5, 4.0, 6.0])
def test_no_step_takes_longer_than_it_may(max_slowdown):
    machine = Machine(seconds(read_all_s=0.2, token_s=0.02))
    decode_s = machine.seconds_of(0, DECODING)
    found = after_a_prompt(machine, max_slowdown)
    assert max(machine.taken) <= max(
        max_slowdown * decode_s, machine.seconds_of(MIN_TOKENS, DECODING)
    )
    settled = found[len(found) // 2]
    assert settled == MOST or 2 * machine.seconds_of(settled, DECODING) > max_slowdown * decode_s


def test_where_reading_takes_the_time_steps_do_not_read_for_ever():
    machine = Machine(seconds(read_all_s=6.0, token_s=0.02))
    found = after_a_prompt(machine, 1.5)
    cheapest = machine.seconds_of(300, 0) / 300
    costly = max(
        size
        for size in (16, 32, 64, 128)
        if machine.seconds_of(size, DECODING) / size > MAX_COST_RATIO * cheapest
    )
    least = 2 * costly
    largest = max(
        size
        for size in (16, 32, 64, 128, 256)
        if machine.seconds_of(size, DECODING) <= FREE_GROWTH * machine.seconds_of(least, DECODING)
    )
    assert found[-2] == largest >= least


def test_steps_that_are_too_long_in_any_case_read_all_that_takes_little_longer():
    """A disk that binds: 256 tokens need the experts that 64 do."""
    machine = Machine(seconds(read_all_s=6.0, token_s=0.002))
    found = after_a_prompt(machine, 3.0)
    assert found[-2] == MOST
    assert machine.seconds_of(MOST, DECODING) <= FREE_GROWTH * machine.seconds_of(64, DECODING)


def test_without_a_bound_steps_grow_to_the_most():
    found = after_a_prompt(Machine(seconds(read_all_s=0.2, token_s=0.02)), math.inf)
    assert found[:5] == [16, 32, 64, 128, 256]
    assert set(found[5:-1]) == {MOST}


@pytest.mark.parametrize("most_tokens", [1, 7, 16, 40])
def test_the_most_is_never_passed(most_tokens):
    machine = Machine(lambda num_prompt, num_decoding: 1.0)
    sizes = StepSizes(most_tokens, math.inf, clock=lambda: machine.now_s)
    for _ in range(5):
        assert sizes.most_tokens() <= most_tokens
        machine.run(sizes, sizes.most_tokens())
    assert sizes.most_tokens() == most_tokens


def test_a_slow_minute_is_forgotten():
    machine = Machine(seconds(read_all_s=0.3, token_s=0.001))
    usual, machine.seconds_of = machine.seconds_of, lambda n, b: 50.0 + usual(n, b)
    sizes = StepSizes(MOST, 3.0, clock=lambda: machine.now_s)
    for size in (16, 32, 64, 128, 256):
        machine.run(sizes, size)
    machine.seconds_of = usual
    for _ in range(60):
        machine.run(sizes, 0)
        machine.run(sizes, sizes.most_tokens())
    assert sizes.most_tokens() == MOST


def test_a_size_is_tried_by_the_slope_of_smaller_ones_and_anew_where_it_was_slow_once():
    """128 tokens take 2.28 s, less than twice 64's 1.64; 256 take 3.56, by slope and in fact."""
    machine = Machine(lambda num_prompt, num_decoding: 1 + 0.01 * num_prompt)
    assert after_a_prompt(machine, 3.0)[3:-1] == [128] * 30
    usual = machine.seconds_of
    machine.seconds_of = lambda n, b: usual(n, b) * (3 if n == 128 else 1)
    sizes = StepSizes(MOST, 3.0, clock=lambda: machine.now_s)
    machine.run(sizes, 300, 0)
    machine.run(sizes, 0)
    for size in (16, 32, 64, 128):
        assert sizes.most_tokens() == size
        machine.run(sizes, size)
    machine.seconds_of = usual
    assert sizes.most_tokens() == 64
    machine.taken.clear()
    for _ in range(1000):
        machine.run(sizes, sizes.most_tokens())
    assert sizes.most_tokens() == 128
    assert max(machine.taken) <= 3.0


def test_a_step_that_failed_counts_for_nothing():
    sizes = StepSizes(MOST, math.inf)
    with pytest.raises(ZeroDivisionError), sizes.timed(num_prompt=16, num_decoding=1):
        raise ZeroDivisionError
    with sizes.timed(num_prompt=16, num_decoding=1):
        sizes.ignore_step()
    assert sizes.most_tokens() == MIN_TOKENS
    with sizes.timed(num_prompt=0, num_decoding=1):
        pass
    with sizes.timed(num_prompt=16, num_decoding=1):
        pass
    assert sizes.most_tokens() == 2 * MIN_TOKENS
