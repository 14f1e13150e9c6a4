"""The store over a fake tier: entries, leases, faults, and no byte ever out of place."""

import contextlib
import gc
import random
import threading
import weakref

import pytest
import torch
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, FakeTier, content, keys, make_store, use

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.types import ExpertKey


def test_a_second_use_is_a_hit():
    store = make_store(FakeTier(), 6)
    use(store, keys(0, 1, 2))
    use(store, keys(0, 2, 1))
    stats = store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (2, 0, 2)
    assert stats.bytes_read == 2 * SLOT_BYTES


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 17])
def test_any_number_of_slots_serves_any_lease(num_slots, streaming):
    store = make_store(FakeTier(), num_slots)
    for layer in (0, 1, 2, 0):
        use(store, keys(layer, 3, 0, 5, 1, 2, 4), streaming=streaming)


def test_residents_come_before_arrivals():
    tier = FakeTier()
    store = make_store(tier, 9)
    use(store, keys(0, 1, 2))
    tier.at_once = False
    with store.lease(keys(0, 0, 1, 2)) as lease:
        groups = iter(lease)
        assert [key for key, _ in next(groups)] == keys(0, 1, 2)
        tier.finish()
        assert [key for key, _ in next(groups)] == keys(0, 0)
        with pytest.raises(StopIteration):
            next(groups)


def test_the_least_recently_used_expert_of_the_layer_goes_first():
    tier = FakeTier()
    store = make_store(tier, 9)  # three for each layer
    use(store, keys(0, 0))
    use(store, keys(0, 1))
    use(store, keys(0, 2))
    for layer in (1, 2):
        use(store, keys(layer, 0, 1, 2))
    use(store, keys(0, 0))
    use(store, keys(0, 3))  # evicts 1
    tier.fetched.clear()
    use(store, keys(0, 0, 2, 3))
    assert tier.fetched == []
    assert store.stats().evictions == 1


def test_a_leased_expert_is_not_evicted():
    store = make_store(FakeTier(), 2)
    with store.lease(keys(0, 0)) as held:
        (group,) = list(held)[:1]
        slot = group[0][1]
        again = store.lease(keys(0, 0))
        with again:
            use(store, keys(0, 1, 2, 3))
            assert (slot == content(ExpertKey(0, 0))).all()


def test_an_expert_on_its_way_is_a_late_hit_and_promoted():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 6)
    store.read_ahead(keys(1, 4))
    threading.Timer(0.05, tier.finish).start()
    use(store, keys(1, 4))
    stats = store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (0, 1, 0)
    assert tier.promoted == keys(1, 4)
    assert stats.stall_s > 0


def test_an_expert_read_ahead_while_a_lease_waits_for_a_slot_is_promoted():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 2)
    tier.broken.update(keys(0, 0))  # so that its slot is free again once it is let go of
    waiting = store.lease(keys(0, 2))
    with store.lease(keys(0, 0, 1)):
        waiting.__enter__()
        tier.finish()
    store.read_ahead(keys(0, 2))
    assert tier.promoted == []
    threading.Timer(0.05, tier.finish).start()
    assert [key for group in waiting for key, _ in group] == keys(0, 2)
    assert tier.promoted == keys(0, 2)
    waiting.__exit__()
    store.check()


def test_an_expert_read_ahead_in_time_is_a_hit():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 6)
    store.read_ahead(keys(1, 4))
    tier.finish()
    use(store, keys(1, 4))
    stats = store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (1, 0, 0)
    assert stats.readahead_bytes == SLOT_BYTES


def test_read_ahead_takes_no_more_than_the_stream_slots_and_never_evicts():
    tier = FakeTier()
    store = make_store(tier, 6, stream_slots=2)
    use(store, keys(0, 0, 1))
    use(store, keys(2, 0))
    tier.fetched.clear()
    store.read_ahead(keys(1, 0, 1, 2, 3))
    assert tier.fetched == keys(1, 0, 1)
    use(store, keys(0, 0, 1))
    assert store.stats().hits == 2


def test_a_wrong_guess_gives_its_slot_back_when_its_layer_comes():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 3, stream_slots=2)
    store.read_ahead(keys(1, 4, 5))
    tier.finish(*keys(1, 4))
    tier.at_once = True
    use(store, keys(1, 0))
    tier.finish()  # the other guess arrives after its layer has passed
    store.check()
    tier.fetched.clear()
    store.read_ahead(keys(2, 0, 1))
    assert tier.fetched == keys(2, 0, 1)


def test_a_guess_for_a_layer_that_did_not_come_makes_room_for_the_next():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 3, stream_slots=2)
    store.read_ahead(keys(1, 4, 5))
    tier.finish()
    tier.fetched.clear()
    store.read_ahead(keys(2, 0, 1))
    assert tier.fetched == keys(2, 0, 1)
    store.check()


def test_a_streamed_prompt_leaves_the_cache_alone():
    tier = FakeTier()
    store = make_store(tier, 9, stream_slots=1)
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 0, 1, 2))
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 3, 4, 5, 0, 1, 2), streaming=True)
    store.reset_stats()
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 0, 1, 2))
    # the one slot that the stream passed through is all it may have cost
    assert store.stats().misses <= 1


def test_a_streamed_prompt_fills_free_room_with_what_was_used_last():
    tier = FakeTier()
    store = make_store(tier, 9)
    use(store, keys(0, 5, 4, 3, 2, 1, 0), streaming=True)
    store.reset_stats()
    use(store, keys(0, 0, 1, 2))
    assert store.stats().hits == 3


def test_what_a_failed_pass_computed_is_let_go_of_with_its_error():
    """A server that fails requests for seconds would keep the tensors of all of them meanwhile."""
    tier = FakeTier()
    store = make_store(tier, 4)
    tier.broken = set(keys(0, 1))
    kept = []

    def compute():
        hidden = torch.ones(4)
        kept.append(weakref.ref(hidden))
        use(store, keys(0, 0, 1, 2))
        return hidden

    gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            compute()
        assert [one() for one in kept] == [None]
    finally:
        gc.enable()


def test_two_threads_share_few_slots():
    store = make_store(FakeTier(), 3)
    failures = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for _ in range(60):
                layer = generator.randrange(NUM_LAYERS)
                chosen = generator.sample(range(NUM_EXPERTS), 2)
                with store.lease(keys(layer, *chosen)) as lease:
                    for group in lease:
                        for key, slot in group:
                            assert (slot == content(key)).all()
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
        assert not thread.is_alive(), "two leases wait for each other"
    assert not failures
    store.check()


@pytest.mark.parametrize("seed", range(4))
def test_books_balance_through_a_random_stress(seed):
    generator = random.Random(seed)
    tier = FakeTier()
    store = make_store(tier, generator.choice([1, 2, 5, 8]), stream_slots=2)
    asked = 0
    for _ in range(120):
        layer = generator.randrange(NUM_LAYERS)
        chosen = generator.sample(range(NUM_EXPERTS), generator.randint(1, NUM_EXPERTS))
        tier.broken = {ExpertKey(layer, 0)} if generator.random() < 0.1 else set()
        ahead = generator.sample(range(NUM_EXPERTS), 2)
        if generator.random() < 0.3:
            store.read_ahead(keys((layer + 1) % NUM_LAYERS, *ahead))
        try:
            use(store, keys(layer, *chosen), streaming=generator.random() < 0.5)
        except CheckpointError:
            assert tier.broken
        asked += len(chosen)
        store.check()
        stats = store.stats()
        assert stats.hits + stats.late_hits + stats.misses == asked
        assert stats.bytes_read == stats.demand_bytes + stats.readahead_bytes


@pytest.mark.parametrize("streaming", [False, True])
def test_a_closed_store_gives_its_memory_up_and_refuses_residents_too(streaming):
    store = make_store(FakeTier(), 6)
    use(store, keys(0, 1, 2))
    memory = weakref.ref(store._slab.bytes)
    stats = store.stats()
    with store.lease(keys(0, 1)) as held:
        (group,) = list(held)[:1]
        store.close()
        assert (group[0][1] == content(ExpertKey(0, 1))).all()  # whoever has it may end
        assert memory() is None  # but for that view
    assert store.use_resident(keys(0, 1), lambda slots: len(slots)) is None
    for wanted in (keys(0, 1), keys(0, 1, 3), keys(1, 0)):
        with pytest.raises(MoERuntimeError, match="were closed; load it again"):
            use(store, wanted, streaming=streaming)
        store.check()
    assert store.stats().expert_slots == stats.expert_slots
    store.close()


def test_a_lease_that_asks_for_more_after_the_store_was_closed_is_refused():
    store = make_store(FakeTier(), 6)
    use(store, keys(0, 1, 2))
    with store.lease(keys(0, 1, 2, 3), streaming=True) as lease:
        groups = iter(lease)
        next(groups)
        store.close()
        with pytest.raises(MoERuntimeError, match="were closed; load it again"):
            next(groups)
    store.check()
