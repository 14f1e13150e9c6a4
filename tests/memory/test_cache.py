"""The store over a fake tier: entries, leases, faults, and no byte ever out of place."""

import contextlib
import gc
import mmap
import random
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fake_tier import (
    NUM_EXPERTS,
    NUM_LAYERS,
    SLOT_BYTES,
    FakeTier,
    content,
    keys,
    make_store,
    open_store,
    use,
)
from synthetic_routes import make_routes

from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.memory import source as source_module
from moe_runtime.memory.source import Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import (
    LIVE_POLICIES,
    LRU,
    AdaptiveShares,
    LayerShares,
    Setting,
    even_shares,
    make_policy,
)
from moe_runtime.policies.prediction import (
    LayerRouted,
    Shape,
    StepBegins,
)
from moe_runtime.types import ExpertKey


def test_a_second_use_is_a_hit():
    store = make_store(FakeTier(), 6)
    use(store, keys(0, 1, 2))
    use(store, keys(0, 2, 1))
    stats = store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (2, 0, 2)
    assert stats.bytes_read == 2 * SLOT_BYTES


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


def test_misses_are_regretted_that_more_slots_would_spare():
    draw = random.Random(2)
    uses = [ExpertKey(0, draw.randrange(NUM_EXPERTS)) for _ in range(200)]
    misses, regrets = {}, {}
    for slots, regretted in ((2, 3), (5, 0)):
        store = make_store(FakeTier(), slots)
        store.num_watched = regretted
        for key in uses:
            use(store, [key])
        _, misses[slots], regrets[slots] = store.waits()
    assert regrets == {2: misses[2] - misses[5], 5: 0}
    assert regrets[2] > 20
    store = make_store(FakeTier(), 3)
    store.num_watched = 3
    use(store, keys(0, 0, 1, 2))
    assert resize(store, 2) == 2  # what memory for other models evicted is not the draft's
    use(store, keys(0, 0))
    assert store.waits()[1:] == (4, 0)


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


@pytest.mark.parametrize("seed", range(3))
def test_books_balance_through_a_random_stress(seed):
    generator = random.Random(seed)
    tier = FakeTier()
    store = make_store(tier, generator.choice([1, 2, 5, 8]), stream_slots=2)
    asked = 0
    for _ in range(50):
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


SHAPE = Shape(num_layers=3, num_experts=12, top_k=2)


def filled(tier: FakeTier, *, num_slots: int, stream_slots: int):
    """A store of three layers whose slots are full, and the fetches forgotten."""
    store = make_store(tier, num_slots, stream_slots=stream_slots)
    for layer in range(3):
        use(store, keys(layer, *range(num_slots // 3)))
    tier.fetched.clear()
    return store


def held(store, layer: int) -> set[int]:
    return {key.expert for key in store._entries if key.layer == layer}


def test_the_most_wanted_take_the_slots_that_a_large_step_does_not_use():
    """Layer 1 holds 0, 1, 2, 3; the step uses 1 and 3 of them, and wants 8 and 9 most."""
    tier = FakeTier()
    store = filled(tier, num_slots=12, stream_slots=1)
    use(store, keys(1, 4, 1, 5, 3, 6, 7, 8, 9), streaming=True)
    # of the two slots that are not used one is what the others pass through
    assert held(store, 1) == {1, 3, 9}
    assert [held(store, layer) for layer in (0, 2)] == [{0, 1, 2, 3}] * 2
    assert sorted(tier.fetched) == keys(1, 4, 5, 6, 7, 8, 9)
    use(store, keys(1, 4, 1, 5, 2, 6, 9, 8), streaming=True)
    assert held(store, 1) == {1, 8, 9}
    assert store.stats().hits == 4


def test_residents_are_used_before_anybody_takes_their_slots():
    """No slot is free and all residents are used: they stay until they were."""
    tier = FakeTier()
    store = filled(tier, num_slots=9, stream_slots=2)
    store.reset_stats()
    use(store, keys(1, 5, 4, 3, 2, 1, 0), streaming=True)
    assert (store.stats().hits, store.stats().misses) == (3, 3)
    assert sorted(tier.fetched) == keys(1, 3, 4, 5)


def test_an_expert_read_ahead_that_is_wanted_most_stays():
    tier = FakeTier()
    store = make_store(tier, 9, stream_slots=2)
    use(store, keys(1, 0, 1, 2))
    store.read_ahead(keys(1, 5))
    tier.fetched.clear()
    use(store, keys(1, 2, 3, 4, 5), streaming=True)
    assert held(store, 1) == {2, 4, 5}
    assert sorted(tier.fetched) == keys(1, 3, 4)
    assert (store.stats().hits + store.stats().late_hits, store.stats().misses) == (2, 3 + 2)


@pytest.mark.parametrize("seed", range(3))
def test_every_expert_of_a_large_step_is_read_once_and_right(seed):
    generator = random.Random(seed)
    tier = FakeTier()
    store = make_store(tier, generator.choice([3, 7, 12]), stream_slots=generator.choice([1, 3]))
    for _ in range(25):
        layer = generator.randrange(3)
        wanted = keys(layer, *generator.sample(range(6), generator.randint(2, 6)))
        present = {key for key in wanted if key in store._entries}
        tier.fetched.clear()
        with store.lease(wanted, streaming=len(wanted) > store.slots_of(layer)) as lease:
            used = []
            for group in lease:
                for key, slot in group:
                    assert (slot == content(key)).all()
                    used.append(key)
                store.check()
        assert Counter(used) == Counter(wanted)
        assert Counter(tier.fetched) == Counter(set(wanted) - present)
        store.check()


def by_wants(ids: np.ndarray) -> list[int]:
    counts = Counter(ids.ravel().tolist())
    last = {expert: place for place, expert in enumerate(ids.ravel().tolist())}
    return sorted(counts, key=lambda expert: (counts[expert], last[expert]))


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_what_batches_leave_in_a_store_is_what_a_replay_keeps(name):
    """Four sequences of ten tokens at once want more than the five that a layer may hold."""
    live, twin = (make_policy(name, num_slots=15, setting=Setting(shape=SHAPE)) for _ in range(2))
    assert isinstance(live, LayerShares)
    store = open_store(live, 15 + 2)  # two more to pass through
    routes = make_routes(SHAPE, num_sequences=4, length=14)
    num_hits = num_expected = num_large = 0
    for number in range(14):
        tokens = routes.offsets[:-1] + number
        begins = StepBegins(sequences=np.arange(4), token_ids=routes.token_ids[tokens])
        store.observe(begins)
        twin.observe(begins)
        for layer in range(SHAPE.num_layers):
            ids, gates = routes.expert_ids[tokens, layer], routes.gate_weights[tokens, layer]
            event = LayerRouted(layer=layer, expert_ids=ids, gate_weights=gates)
            store.observe(event)
            twin.observe(event)
            wanted = keys(layer, *by_wants(ids))
            if len(wanted) <= store.slots_of(layer):
                continue  # may hold more than the share, where the replay has no slot to spare
            before = store.stats().hits
            with store.lease(wanted, streaming=True) as lease:
                assert sum(map(len, lease)) == len(wanted)
            store.check()
            found = store.stats().hits - before
            expected = twin.access(wanted, 15)
            # where newcomers may be declined, they are weighed as they arrive, and not against
            # residents that are still to be used
            assert found == expected or live.may_decline
            num_hits, num_expected = num_hits + found, num_expected + expected
            num_large += 1
    assert abs(num_hits - num_expected) <= 0.1 * num_expected
    assert num_large > 15


def resize(store: ExpertStore[Any], num_slots: int) -> int:
    return store.resize(num_slots, shared_slots=num_slots, stream_slots=2)


@pytest.mark.parametrize("adaptive", [False, True])
def test_any_number_of_slots_serves_any_lease_while_it_changes(adaptive):
    chance = random.Random(1)
    shares = even_shares(6, NUM_LAYERS)
    policy = AdaptiveShares(LRU, shares, smallest=1) if adaptive else LayerShares(LRU, shares)
    store = make_store(FakeTier(), 6, policy=policy)
    for _ in range(25):
        num_slots = chance.randint(1, NUM_LAYERS * NUM_EXPERTS)
        assert resize(store, num_slots) == num_slots == store.num_slots
        store.check()
        assert store.stats().expert_slots == num_slots
        for _ in range(chance.randint(0, 4)):
            layer = chance.randrange(NUM_LAYERS)
            wanted = keys(layer, *chance.sample(range(NUM_EXPERTS), chance.randint(1, 4)))
            use(store, wanted, streaming=chance.random() < 0.3)
            assert sum(policy.slots_by_layer) == num_slots


def test_more_slots_keep_more_experts_and_fewer_keep_those_used_last():
    tier = FakeTier()
    store = make_store(tier, 3)
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 0, 1))
    assert resize(store, 9) == 9
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 0))
        use(store, keys(layer, 1))
        use(store, keys(layer, 2))
    assert resize(store, 6) == 6
    tier.fetched.clear()
    for layer in range(NUM_LAYERS):
        use(store, keys(layer, 1, 2))
    assert tier.fetched == []


def test_experts_that_are_used_or_read_keep_their_slots():
    tier = FakeTier()
    store = make_store(tier, 6)
    with store.lease(keys(0, 0, 1)) as lease:
        groups = iter(lease)
        held = next(groups)
        tier.at_once = False
        store.read_ahead(keys(1, 0))
        assert resize(store, 1) == 3
        assert all((slot == content(key)).all() for key, slot in held)
        store.check()
        assert all((slot == content(key)).all() for group in groups for key, slot in group)
    tier.finish()
    assert resize(store, 1) == 1
    tier.at_once = True
    use(store, keys(2, 0, 1, 2))


def test_closed_slots_give_their_pages_back():
    size = 2 * mmap.PAGESIZE
    tier = FakeTier()
    slab = Slab(4, size)
    policy = LayerShares(LRU, even_shares(4, NUM_LAYERS))
    store = ExpertStore(tier, slab, policy, lambda _, slot: slot, stream_slots=1)
    use(store, keys(0, 0, 1, 2, 3))
    use(store, keys(0, 0))
    resize(store, 1)
    filled = [index for index in range(4) if slab.slot(index).any()]
    assert len(filled) == 1
    (held,) = (entry.slot for entry in store._entries.values())
    assert filled == [held]
    assert (slab.slot(held) == content(ExpertKey(0, 0))).all()


def test_memory_that_cannot_be_had_leaves_the_store_as_large_as_it_is(monkeypatch):
    store = make_store(FakeTier(), 4)
    resize(store, 2)

    def refuse(num_bytes: int) -> torch.Tensor:
        raise CapacityError(f"no {num_bytes} bytes")

    monkeypatch.setattr(source_module, "aligned_bytes", refuse)
    assert resize(store, 9) == 4
    store.check()
    use(store, keys(0, 0, 1, 2))
    assert store.stats().slot_bytes == SLOT_BYTES
