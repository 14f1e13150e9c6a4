"""What is read, in which order, and at whose cost: the same rules live and in replay."""

import pytest

from moe_runtime.policies.prefetch import Admission, PrefetchRules
from moe_runtime.types import ExpertKey

K = ExpertKey


def test_idle_time_buys_experts_and_only_so_many_are_saved_up():
    admission = Admission(PrefetchRules(credit=3.0), num_layers=2)
    assert admission.room == 0
    admission.idle(0.5, 2.0)
    assert admission.room == 0
    admission.idle(1.5, 2.0)
    assert admission.room == 1
    admission.spend((K(0, 1), 0.9))
    assert admission.room == 0
    admission.idle(1e6, 2.0)
    assert admission.room == 3
    admission.idle(1.0, 0.0)  # no transfer was measured yet
    assert admission.room == 3


def test_guesses_must_be_likely_at_all():
    admission = Admission(PrefetchRules(min_probability=0.5), num_layers=2)
    made = [(K(0, 1), 0.9), (K(0, 2), 0.5), (K(1, 3), 0.49)]
    assert admission.likely(made) == made[:2]


def test_the_less_waste_is_left_the_surer_a_guess_must_be():
    rules = PrefetchRules(min_probability=0.2, waste=0.1, allowance=4.0, credit=9.0)
    admission = Admission(rules, num_layers=2)
    admission.idle(9.0, 1.0)
    made = [(K(1, 1), 0.9), (K(1, 2), 0.5), (K(1, 3), 0.25)]
    assert admission.most_useful(made, now=0) == made
    for guess in made:
        admission.spend(guess)  # 0.1, 0.5 and 0.75 of an expert are expected to be wasted
    assert admission.least_probability == pytest.approx(1 - 0.8 * (4 - 1.35) / 4)
    admission.take_back(K(1, 2))
    assert (admission.room, admission.least_probability) == (7, pytest.approx(1 - 0.8 * 3.15 / 4))
    admission.used(1, [K(1, 1), K(1, 7)])  # one right, one wrong
    assert admission.least_probability == pytest.approx(1 - 0.8 * (4 + 0.1 - 0.1 - 1.0 + 0.1) / 4)
    assert admission.most_useful(made, now=0) == made[:2]
    admission.take_back(K(1, 3))  # its layer has come: nothing is given back
    assert admission.room == 7
    admission.waited([0], num_missing=100, stall_s=1.0)
    assert admission.least_probability == pytest.approx(0.2)


def test_certainty_that_is_wrong_is_not_believed_for_long():
    admission = Admission(PrefetchRules(waste=0.1, allowance=4.0, credit=99.0), num_layers=2)
    admission.idle(99.0, 1.0)
    for _ in range(4):
        assert admission.room
        admission.spend((K(1, 3), 1.0))
        admission.used(1, [K(1, 4)])
    assert admission.room == 0
    admission.waited([1], num_missing=5, stall_s=1.0)
    assert admission.room == 95


def test_nearer_layers_and_costlier_misses_come_first():
    admission = Admission(PrefetchRules(), num_layers=4)
    near, far, beyond = (K(1, 0), 0.8), (K(2, 0), 0.9), (K(0, 0), 0.9)
    assert admission.most_useful([beyond, far, near], now=0) == [near, far, beyond]
    # layer 2 waits three times as long for a missing expert as layer 1 does
    for _ in range(50):
        admission.waited([1], num_missing=2, stall_s=0.2)
        admission.waited([2], num_missing=1, stall_s=0.3)
        admission.waited([3], num_missing=0, stall_s=9.0)
    assert admission.most_useful([near, far, beyond], now=0) == [far, near, beyond]


def test_slots_are_taken_from_the_own_layer_from_what_is_old_and_less_likely():
    admission = Admission(PrefetchRules(min_gain=0.1), num_layers=2)
    admission.used(1, [K(1, 4)])
    gives_way = admission.gives_way(K(1, 0), 0.7, {K(1, 1): 0.65, K(1, 2): 0.55})
    held = [K(0, 9), K(1, 1), K(1, 2), K(1, 3), K(1, 4)]
    assert [key for key in held if gives_way(key)] == [K(1, 2), K(1, 3)]
    admission.used(1, [K(1, 3)])
    gives_way = admission.gives_way(K(1, 0), 0.7, {})
    assert gives_way(K(1, 4))
    assert not gives_way(K(1, 3))
    # one without a guess may have had one of just less than the least that is told
    admission = Admission(PrefetchRules(min_gain=0.4), num_layers=2)
    chances = [admission.gives_way(K(1, 0), one, {})(K(1, 4)) for one in (0.45, 0.49, 0.51)]
    assert chances == [False, False, True]
