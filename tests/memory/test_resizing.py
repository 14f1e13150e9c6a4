"""Stores that get slots and give them up while they are used."""

import mmap
import random
from typing import Any

import pytest
import torch
from fake_tier import NUM_EXPERTS, NUM_LAYERS, SLOT_BYTES, FakeTier, content, keys, make_store, use

from moe_runtime.errors import CapacityError
from moe_runtime.memory import store as store_module
from moe_runtime.memory.slab import Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.policies.eviction.shares import AdaptiveShares
from moe_runtime.types import ExpertKey


def resize(store: ExpertStore[Any], num_slots: int) -> int:
    return store.resize(num_slots, shared_slots=num_slots, stream_slots=2)


@pytest.mark.parametrize("adaptive", [False, True])
def test_any_number_of_slots_serves_any_lease_while_it_changes(adaptive: bool) -> None:
    chance = random.Random(1)
    shares = even_shares(6, NUM_LAYERS)
    policy = AdaptiveShares(LRU, shares, smallest=1) if adaptive else LayerShares(LRU, shares)
    store = make_store(FakeTier(), 6, policy=policy)
    for _ in range(60):
        num_slots = chance.randint(1, NUM_LAYERS * NUM_EXPERTS)
        assert resize(store, num_slots) == num_slots == store.num_slots
        store.check()
        assert store.stats().expert_slots == num_slots
        for _ in range(chance.randint(0, 4)):
            layer = chance.randrange(NUM_LAYERS)
            wanted = keys(layer, *chance.sample(range(NUM_EXPERTS), chance.randint(1, 4)))
            use(store, wanted, streaming=chance.random() < 0.3)
            assert sum(policy.slots_by_layer) == num_slots


def test_more_slots_keep_more_experts_and_fewer_keep_those_used_last() -> None:
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


def test_experts_that_are_used_or_read_keep_their_slots() -> None:
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


def test_closed_slots_give_their_pages_back() -> None:
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


def test_memory_that_cannot_be_had_leaves_the_store_as_large_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store(FakeTier(), 4)
    resize(store, 2)

    def refuse(num_bytes: int) -> torch.Tensor:
        raise CapacityError(f"no {num_bytes} bytes")

    monkeypatch.setattr(store_module, "aligned_bytes", refuse)
    assert resize(store, 9) == 4
    store.check()
    use(store, keys(0, 0, 1, 2))
    assert store.stats().slot_bytes == SLOT_BYTES
