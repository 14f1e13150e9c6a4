"""The runner in virtual time: when it ends, whose turn it is, what a failure costs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from moe_runtime.benchmarks.suite import BenchSystem, Number, PeerFailedError, Rules, run_in_turn


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scripted(BenchSystem):
    """A system whose n-th repetition takes and gives what a function says."""

    def __init__(self, name: str, clock: Clock, script: Callable[[int], float]) -> None:
        super().__init__(name, {})
        self._clock, self._script = clock, script
        self.order: list[str] = []
        self._number = 0

    def repeat(self) -> Mapping[str, Number]:
        self.order.append(self.name)
        took_s = self._script(self._number)
        self._number += 1
        self._clock.now_s += 10.0
        return {"t": [took_s, took_s, 99.0], "other": self._number}


def rules(clock: Clock, **more: Any) -> Rules:
    return Rules(judged=("t",), clock=clock, **{"least": 3, "most": 20, "max_s": 1e9} | more)


def test_it_ends_when_every_mean_is_narrow():
    clock = Clock()
    steady = Scripted("steady", clock, lambda n: 1.0)
    settling = Scripted("settling", clock, lambda n: 1.5 if n == 0 else 1.0)
    found, ended = run_in_turn([steady, settling], rules(clock, precision=0.1))
    # 1.5 and n - 1 ones: mean 1 + 0.5 / n, standard error 0.5 / n. Half width over mean is
    # t(10) * 0.5 / 11.5 = 9.69 % for n = 11, and t(9) * 0.5 / 10.5 = 10.77 % for n = 10.
    assert ended == "narrow"
    assert found["settling"].values("t") == [1.5, *[1.0] * 10]
    assert len(found["steady"].repetitions) == 11


@pytest.mark.parametrize(("n", "precision", "ends"), [(3, 0.62, True), (3, 0.61, False)])
def test_the_interval_is_students(n, precision, ends):
    """1.5, 1, 1: mean 7/6, standard error 1/6, t(2) = 4.3027: half width 0.7171, 61.5 %."""
    clock = Clock()
    one = Scripted("one", clock, lambda number: 1.5 if number == 0 else 1.0)
    found, ended = run_in_turn([one], rules(clock, precision=precision, most=n))
    assert ended == ("narrow" if ends else "most")
    assert len(found["one"].repetitions) == n


def test_no_round_begins_that_would_end_too_late():
    clock = Clock()
    systems = [Scripted(name, clock, lambda n: 1.0 + n) for name in "ab"]
    # Rounds of 20 s: after three, 60 s; a fourth would end at 80 s.
    found, ended = run_in_turn(systems, rules(clock, max_s=79.0))
    assert (ended, len(found["a"].repetitions), clock.now_s) == ("time", 3, 60.0)


def test_systems_take_turns():
    clock, order = Clock(), []
    systems = [Scripted(name, clock, lambda n: float(n)) for name in "abc"]
    for system in systems:
        system.order = order
    run_in_turn(systems, rules(clock, most=3))
    assert "".join(order) == "abcbcacab"


def test_a_failure_costs_its_system_all_numbers_and_no_other():
    clock = Clock()

    def breaks(number: int) -> float:
        if number == 1:
            raise PeerFailedError("its text differs")
        return 1.0

    broken, sound = Scripted("broken", clock, breaks), Scripted("sound", clock, lambda n: 1.0)
    found, ended = run_in_turn([broken, sound], rules(clock))
    assert (ended, found["broken"].repetitions) == ("narrow", [])
    assert found["broken"].failure == "its text differs"
    assert len(found["sound"].repetitions) == 3
    assert run_in_turn([Scripted("x", clock, lambda n: breaks(1))], rules(clock))[1] == "failed"


def test_an_interruption_keeps_what_was_found():
    clock = Clock()
    one = Scripted("one", clock, lambda n: float(n))
    stops = iter([False, False, True])
    found, ended = run_in_turn([one], rules(clock, is_stopping=lambda: next(stops)))
    assert (ended, found["one"].values("t")) == ("interrupted", [0.0, 1.0])


def test_a_metric_that_a_system_lacks_does_not_go_on_for_ever():
    clock = Clock()
    one = Scripted("one", clock, lambda number: 1.0)
    both = Rules(clock=clock, judged=("t", "missing"), least=3, most=20, max_s=1e9)
    found, ended = run_in_turn([one], both)
    assert (ended, len(found["one"].repetitions)) == ("narrow", 3)
