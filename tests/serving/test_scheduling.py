"""Who runs and who waits, without a model: order, room, and what a step reads of prompts."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from engine_events import request_of

from moe_runtime.serving import prefixes
from moe_runtime.serving.kv_account import KVAccount
from moe_runtime.serving.prefixes import Prefixes
from moe_runtime.serving.scheduling import Scheduler, Sequence

CACHE: Any = object()


def scheduler_of(capacity: int, most_running: int = 8) -> Scheduler:
    return Scheduler(KVAccount(capacity, block_tokens=4), most_running=most_running)


def sequence_of(number: int, length: int, priority: int = 0, **options: Any) -> Sequence:
    request = request_of((1,) * length, 100, priority=priority, **options)
    return Sequence(request, lambda _: None, number)


def start_all(scheduler: Scheduler, *is_held: Any) -> list[int]:
    started = []
    while (sequence := scheduler.next_to_start(lambda _: None, *is_held)) is not None:
        sequence.start(CACHE, 0, len(sequence.tokens))
        started.append(sequence.number)
    return started


def test_nobody_is_overtaken_within_a_priority():
    scheduler = scheduler_of(128)
    for number, (length, priority) in enumerate([(40, 0), (100, 0), (5, 0), (30, 1)]):
        scheduler.add(sequence_of(number, length, priority))
    assert start_all(scheduler) == [3, 0]  # the third would fit, but is behind the second
    scheduler.check()
    for sequence in list(scheduler.running):
        scheduler.remove(sequence)
    assert start_all(scheduler) == [1]
    scheduler.check()


def test_those_behind_one_that_is_held_get_what_it_leaves_them():
    scheduler = scheduler_of(160, most_running=3)
    for number, length in enumerate([40, 40, 20, 5]):
        scheduler.add(sequence_of(number, length))

    def is_held(sequence: Sequence, running: list[Sequence]) -> bool:
        return sequence.number == 1 and 0 in [one.number for one in running]

    assert start_all(scheduler, is_held) == [0, 2]  # a place is left to the second
    scheduler.check()
    scheduler.add(sequence_of(4, 60, priority=1))
    assert start_all(scheduler, is_held) == []  # nobody overtakes the fifth, which lacks room
    scheduler.remove(scheduler.waiting[0])
    scheduler.remove(scheduler.running[0])
    assert start_all(scheduler, is_held) == [1, 3]
    scheduler.check()


def test_clients_take_turns_within_a_priority():
    scheduler = scheduler_of(1024, most_running=1)
    arrivals = ["a"] * 4 + ["b", "a", "c", "b"]
    for number, client in enumerate(arrivals):
        scheduler.add(sequence_of(number, 5, client=client))
    scheduler.add(sequence_of(8, 5, priority=1, client="a"))
    started: list[int] = []
    while scheduler.waiting:
        started += start_all(scheduler)
        if len(started) == 5:
            # a newcomer, who gets nothing for the time when it asked nothing
            for number in (9, 10):
                scheduler.add(sequence_of(number, 5, client="d"))
        scheduler.check()
        scheduler.remove(scheduler.running[0])
    assert started == [8, 0, 4, 6, 1, 7, 9, 2, 10, 3, 5]


def test_the_last_gives_way_until_there_is_room():
    scheduler = scheduler_of(112)
    for number in range(3):
        scheduler.add(sequence_of(number, 15))
    assert start_all(scheduler) == [0, 1, 2]
    first, second, third = scheduler.running
    first.num_computed, second.num_computed, third.num_computed = 70, 16, 15
    assert scheduler.make_room([first, second, third]) == [first, second]
    assert scheduler.num_preemptions == 1
    assert scheduler.waiting == [third]
    assert third.cache is None
    assert third.num_computed == 0
    scheduler.check()


def test_a_step_shares_its_tokens_between_prompts_in_order():
    scheduler = scheduler_of(256)
    for number, length in enumerate([20, 30, 5]):
        scheduler.add(sequence_of(number, length))
    start_all(scheduler)
    first, second, third = scheduler.running
    assert scheduler.prompts(32, 8, exact=False) == [(first, 20), (second, 12)]
    first.num_computed, second.num_computed = 20, 12
    assert scheduler.decoding() == [first]
    assert scheduler.prompts(32, 8, exact=False) == [(second, 18), (third, 5)]


@pytest.mark.parametrize("computed", [0, 3, 16, 29])
def test_exact_pieces_end_where_they_end_whatever_was_found(computed):
    scheduler = scheduler_of(256)
    for number in range(2):
        scheduler.add(sequence_of(number, 30))
    start_all(scheduler)
    first = scheduler.running[0]
    first.num_computed = computed
    ((chosen, num_new),) = scheduler.prompts(16, 8, exact=True)
    assert chosen is first
    assert computed + num_new == min(30, (computed // 16 + 1) * 16)


def test_whoever_goes_alone_waits_until_it_is_first():
    scheduler = scheduler_of(256)
    for number in range(3):
        wanted = 0 if number == 1 else None
        scheduler.add(sequence_of(number, 20, num_prompt_logprobs=wanted))
    start_all(scheduler)
    first, second, third = scheduler.running
    assert scheduler.prompts(64, 8, exact=False) == [(first, 20), (third, 20)]
    first.num_computed = third.num_computed = 20
    assert scheduler.prompts(64, 8, exact=False) == [(second, 8)]


def test_ten_thousand_random_steps_leave_nobody_behind(monkeypatch):
    """Sequences come, grow, are cancelled and end; all that were not cancelled end.

    They begin alike, and long ones wait for each other's beginnings, which nobody keeps.
    """
    monkeypatch.setattr(prefixes, "LEAST_SHARED", 16)
    draw = random.Random(0)
    scheduler = scheduler_of(160, most_running=5)
    passes: Any = SimpleNamespace(states=None)
    known = Prefixes(scheduler.account, passes, exact=False, disk=None)
    held = 0

    def is_held(sequence: Sequence, running: list[Sequence]) -> bool:
        nonlocal held
        held += (found := known.should_wait(sequence, running))
        return found

    ends: dict[int, int] = {}
    arrived = cancelled = finished = 0
    for _ in range(10_000):
        if draw.random() < 0.3 and len(scheduler.waiting) < 10:
            sequence = sequence_of(arrived, draw.randrange(1, 90), draw.randrange(2))
            ends[arrived] = min(160, len(sequence.tokens) + draw.randrange(1, 40))
            arrived += 1
            scheduler.add(sequence)
        everyone = [*scheduler.running, *scheduler.waiting]
        if everyone and draw.random() < 0.02:
            scheduler.remove(draw.choice(everyone))
            cancelled += 1
        start_all(scheduler, is_held)
        assert scheduler.running or not scheduler.waiting, "somebody can always run"
        for sequence in scheduler.make_room(scheduler.decoding()):
            sequence.num_computed += 1
            sequence.tokens.append(1)
            if len(sequence.tokens) >= ends[sequence.number]:
                scheduler.remove(sequence)
                finished += 1
        chosen = scheduler.prompts(24, 8, exact=draw.random() < 0.5)
        assert sum(num_new for _, num_new in chosen) <= 24
        for sequence, num_new in chosen:
            assert num_new > 0
            sequence.num_computed += num_new
            if not sequence.is_reading:
                sequence.tokens.append(1)
        scheduler.check()
    assert arrived == cancelled + finished + len(scheduler.running) + len(scheduler.waiting)
    assert finished > 200
    assert held > 50
    assert scheduler.num_preemptions > 20
