"""Which slots guesses take, what becomes of them, and that the entries agree."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_reader import SlowReader

from moe_runtime.config import PrefetchMode
from moe_runtime.memory.prefetcher import Guesses, LinkState, Prefetcher
from moe_runtime.memory.reads import Priority, ReadQueue, Transfer
from moe_runtime.memory.source import Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LRU, LayerShares
from moe_runtime.policies.prediction import LayerRouted
from moe_runtime.policies.prefetch import Admission, PrefetchRules
from moe_runtime.types import ExpertKey

K = ExpertKey


def open_store(shares: list[int]) -> tuple[ExpertStore[torch.Tensor], SlowReader, Guesses]:
    reader = SlowReader()
    store = ExpertStore(
        reader,
        Slab(sum(shares), 4096),
        LayerShares(LRU, shares),
        lambda key, slot: slot,
        stream_slots=1,
    )
    return store, reader, Guesses(store)


def use(store: ExpertStore[torch.Tensor], reader: SlowReader, *keys: ExpertKey) -> None:
    """Leases experts, reading what is missing at once."""
    with store.lease(keys) as lease:
        reader.finish_all()
        for group in lease:
            for key, slot in group:
                assert int(slot[0]) == key.layer * 16 + key.expert
    store.check()


def start(
    guesses: Guesses,
    *made: tuple[ExpertKey, float],
    just_used: Iterable[ExpertKey] = (),
    credit: float = 8.0,
    window: int = 8,
) -> int:
    admission = Admission(PrefetchRules(credit=credit, window=window), num_layers=4)
    admission.idle(credit, 1.0)
    for key in just_used:
        admission.used(key.layer, [key])
    return guesses.start(made, dict(made), admission)


def test_a_guess_that_comes_true_is_a_hit_and_is_kept():
    store, reader, guesses = open_store([2, 2])
    assert start(guesses, (K(1, 3), 0.9)) == 1
    assert reader.asked == [(K(1, 3), Priority.READAHEAD)]
    reader.finish_all()
    use(store, reader, K(1, 3))
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.useful_guesses, stats.guesses) == (1, 0, 1, 1)
    use(store, reader, K(1, 3))
    assert store.stats().useful_guesses == 1


def test_a_guess_in_flight_is_a_late_hit_and_becomes_a_demand():
    store, reader, guesses = open_store([2, 2])
    start(guesses, (K(1, 3), 0.9))
    use(store, reader, K(1, 3))
    stats = store.stats()
    assert (stats.hits, stats.late_hits, stats.misses, stats.late_guesses) == (0, 1, 0, 1)
    assert reader.promoted == [K(1, 3)]
    assert len(reader.asked) == 1  # never read twice


def test_what_is_resident_is_not_read_again():
    store, reader, guesses = open_store([2, 2])
    use(store, reader, K(1, 3))
    assert start(guesses, (K(1, 3), 0.9)) == 0
    assert guesses.absent([(K(1, 3), 0.9), (K(1, 4), 0.8)]) == [(K(1, 4), 0.8)]


def test_leased_experts_are_never_evicted_for_a_guess():
    store, reader, guesses = open_store([1, 1])
    with store.lease([K(1, 0)]) as lease:
        reader.finish_all()
        assert len(list(lease)) == 1
    use(store, reader, K(0, 0))
    with store.lease([K(1, 0)]):
        assert start(guesses, (K(1, 3), 1.0)) == 0
    assert start(guesses, (K(1, 3), 1.0), just_used={K(1, 0)}) == 0
    assert start(guesses, (K(1, 3), 1.0)) == 1
    store.check()


def test_experts_about_as_probable_are_not_evicted():
    store, reader, guesses = open_store([0, 2])
    use(store, reader, K(1, 0), K(1, 1))
    made = ((K(1, 5), 0.6), (K(1, 0), 0.55), (K(1, 1), 0.9))
    assert start(guesses, *made) == 0
    assert start(guesses, (K(1, 5), 0.6), (K(1, 0), 0.1), (K(1, 1), 0.9)) == 1
    assert not guesses.absent([(K(1, 1), 1.0)])
    assert guesses.absent([(K(1, 0), 1.0)])


def test_a_wrong_guess_is_the_first_to_go():
    store, reader, guesses = open_store([2, 2])
    use(store, reader, K(0, 0), K(0, 1))
    use(store, reader, K(1, 0))
    start(guesses, (K(1, 9), 0.9))
    reader.finish_all()
    use(store, reader, K(1, 0))  # its layer came and did not want it
    assert store.stats().wasted_guesses == 0
    use(store, reader, K(1, 4))  # a miss takes the slot of the wrong guess, not of an old expert
    assert store.stats().wasted_guesses == 1
    assert not guesses.absent([(K(1, 0), 1.0), (K(0, 0), 1.0), (K(0, 1), 1.0)])


def test_the_window_bounds_guesses_at_work():
    store, reader, guesses = open_store([4, 4])
    made = [(K(1, expert), 0.9) for expert in range(6)]
    assert start(guesses, *made, window=3) == 3
    assert start(guesses, *made, window=3) == 0
    assert len(reader.waiting) == 3
    store.check()


def test_credit_bounds_what_is_read():
    store, reader, guesses = open_store([4, 4])
    made = [(K(1, expert), 0.9) for expert in range(6)]
    assert start(guesses, *made, credit=2.5) == 2
    assert reader.asked == [(K(1, 0), Priority.READAHEAD), (K(1, 1), Priority.READAHEAD)]
    store.check()


@pytest.mark.parametrize(("transfer_s", "predicts"), [(1e9, False), (1e-12, True)])
def test_nothing_is_predicted_while_the_link_has_no_time(transfer_s, predicts):

    class Link:
        may_be_stale = False

        def link(self) -> LinkState:
            return LinkState(transfer_s, 0.0, 0.0, 0, 0, 0)

        def absent(self, made: list[Any], least_probability: float) -> list[Any]:
            return made

    class Counted:
        needs_history, seen, asked = True, 0, 0

        def observe(self, event: object) -> None:
            self.seen += 1

        def predict(self, now: int, horizon: int) -> list[Any]:
            self.asked += 1
            return []

    predictor: Any = Counted()
    made: Any = Link()
    prefetcher = Prefetcher(made, predictor, PrefetchMode.ENFORCE, num_layers=4)
    for token in range(3):
        prefetcher.step(np.zeros(1, np.int64), lambda token=token: np.array([token]))
        for layer in range(4):
            routed = LayerRouted(
                layer=layer,
                expert_ids=np.zeros((1, 1), np.int64),
                gate_weights=np.ones((1, 1), np.float32),
            )
            prefetcher.routed(routed, [K(layer, 0)])
    assert predictor.seen == 15
    assert (predictor.asked > 0) == predicts


def test_time_in_which_demands_are_under_way_is_measured():
    store, reader, guesses = open_store([2, 2])
    start(guesses, (K(1, 3), 0.9))
    assert guesses.link().demand_s == 0
    with store.lease([K(1, 3)]):  # what was a guess is waited for now
        before = guesses.link().demand_s
        assert before > 0
        reader.finish_all()
        after = guesses.link().demand_s
    assert after >= before
    assert guesses.link().demand_s == after
    assert guesses.link().num_missing == guesses.link().came_true == 1


def test_stale_guesses_are_taken_back_unless_begun_or_wanted():
    store, reader, guesses = open_store([2, 4])
    made = [(K(1, expert), 0.9) for expert in range(3)]
    start(guesses, *made)
    reader.begun.add(K(1, 0))
    assert guesses.cancel_except({K(1, 2)}) == [K(1, 1)]
    assert not guesses.absent([made[0], made[2]])
    assert guesses.absent([made[1]]) == [made[1]]
    stats = store.stats()
    assert (stats.guesses, stats.cancelled_guesses, stats.wasted_guesses) == (2, 1, 0)
    store.check()


def test_the_queue_takes_back_only_what_was_not_begun():
    queue = ReadQueue(1)
    go, begun, done = threading.Event(), threading.Event(), threading.Event()

    def block() -> int:
        begun.set()
        go.wait(600)
        return 1

    first = Transfer(Priority.DEMAND, lambda read: None)
    queue.submit([block], first)
    assert begun.wait(600)
    moved = []
    second = Transfer(Priority.READAHEAD, lambda read: None)
    queue.submit([lambda: moved.append(2) or 1], second)
    assert not queue.cancel(first)
    assert queue.cancel(second)
    queue.submit([lambda: 1], Transfer(Priority.READAHEAD, lambda read: done.set()))
    go.set()
    assert done.wait(600)
    queue.close()
    assert moved == []


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_books_balance_whatever_happens(seed):
    rng = np.random.default_rng(seed)
    store, reader, guesses = open_store([3, 2, 3])
    for _ in range(40):
        action = rng.integers(4)
        layer = int(rng.integers(3))
        experts = rng.permutation(8)[: rng.integers(1, 4)].tolist()
        if action == 0:
            use(store, reader, *(K(layer, e) for e in experts[:2]))
        elif action == 1:
            start(guesses, *((K(layer, e), float(rng.random())) for e in experts), window=3)
        elif action == 2:
            guesses.cancel_except({K(layer, e) for e in experts})
        elif reader.waiting:
            reader.finish(next(iter(reader.waiting)))
        store.check()
    reader.finish_all()
    stats = store.stats()
    assert stats.useful_guesses + stats.late_guesses + stats.wasted_guesses <= stats.guesses
    left = sum(entry.guessed for entry in store._entries.values())
    judged = stats.useful_guesses + stats.late_guesses + stats.wasted_guesses
    assert judged + left == stats.guesses
