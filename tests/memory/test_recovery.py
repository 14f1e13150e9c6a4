"""What an exception, or who never came back, leaves behind: nothing that lasts."""

import os
import threading

import pytest
import torch
from fake_tier import FakeTier, keys, make_store, use

from moe_runtime.errors import CheckpointError
from moe_runtime.memory.changes import Changes
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey


@pytest.mark.parametrize("kind", [CheckpointError, MemoryError, KeyboardInterrupt])
def test_a_failed_submit_leaves_nothing_behind(monkeypatch, kind):
    tier = FakeTier()
    store = make_store(tier, 4)
    use(store, keys(0, 5))
    fetch = tier.fetch

    def fail(key, slot, read) -> None:
        if key.expert == 1:
            raise kind("as asked")
        fetch(key, slot, read)

    for layer, start in enumerate(
        (
            lambda: store.read_ahead(keys(0, 1)),
            lambda: use(store, keys(1, 0, 1, 2)),
            lambda: use(store, keys(2, 1, 0), streaming=True),
        )
    ):
        monkeypatch.setattr(tier, "fetch", fail)
        with pytest.raises(kind, match="as asked"):
            start()
        store.check()
        monkeypatch.setattr(tier, "fetch", fetch)
        use(store, keys(layer, 0, 1, 2))


def test_a_lease_in_a_generator_that_is_dropped_gives_everything_back():
    store = make_store(FakeTier(), 3)

    def slots():
        with store.lease(keys(0, 0, 1, 2)) as lease:
            for group in lease:
                yield from group

    walk = slots()
    next(walk)
    assert sum(entry.pins for entry in store._entries.values()) > 0
    del walk
    store.check()
    use(store, keys(0, 3, 4, 5))


def test_a_lease_that_was_never_left_gives_everything_back():
    """As when an exception strikes between entering and the block."""
    tier = FakeTier()
    store = make_store(tier, 3)
    lease = store.lease(keys(0, 0, 1, 2))
    lease.__enter__()
    del lease
    use(store, keys(0, 3, 4, 5))


def test_a_wait_for_slots_that_a_lost_lease_holds_comes_to_an_end():
    """Nobody is woken when the garbage collector finds a lease: who waits looks now and then."""
    store = make_store(FakeTier(), 2)
    lost = [store.lease(keys(0, 0, 1))]
    lost[0].__enter__()
    waiting = threading.Thread(target=use, args=(store, keys(0, 2, 3)))
    waiting.start()
    lost.clear()
    waiting.join(120)
    assert not waiting.is_alive()
    store.check()


def test_a_lock_that_an_exception_left_held_is_found_and_given_up():
    store = make_store(FakeTier(), 3)
    use(store, keys(0, 0))
    _take_and_leave(store)
    with pytest.raises(AssertionError, match="left held"):
        store.check()
    store.let_go()
    store.check()
    _take_and_leave(store)
    use(store, keys(0, 0, 1))  # the next operation of the thread finds it too
    other = threading.Thread(target=use, args=(store, keys(0, 0, 1)))
    other.start()
    other.join(120)
    assert not other.is_alive()


def _take_and_leave(store: ExpertStore[torch.Tensor]) -> None:
    store._changed.__enter__()


def test_pins_of_nobody_are_seen():
    store = make_store(FakeTier(), 3)
    use(store, keys(0, 0))
    store._entries[ExpertKey(0, 0)].pins += 1
    with pytest.raises(AssertionError):
        store.check()


def test_a_read_that_nobody_will_end_is_seen():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 3)
    store.read_ahead(keys(0, 0))
    store.check()
    tier.under_way.clear()
    with pytest.raises(AssertionError):
        store.check()


def test_locks_that_come_and_go_leave_no_handler_of_forks(monkeypatch):
    handlers = []
    monkeypatch.setattr(os, "register_at_fork", lambda **added: handlers.append(added))
    for _ in range(3):
        Changes()
    assert not handlers
