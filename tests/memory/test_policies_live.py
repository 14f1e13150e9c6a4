"""Every eviction policy serves a store, and what it keeps is what a replay keeps."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_tier import open_store
from synthetic_routes import make_routes

from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LIVE_POLICIES, Setting, make_policy
from moe_runtime.policies.prediction import (
    LayerRouted,
    Shape,
    StepBegins,
)
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=3, num_experts=12, top_k=2)


def decode(store: ExpertStore[torch.Tensor], routes, number: int) -> list[int]:
    """Runs one token through all layers; returns the hits of each.

    All experts of a lease arrive before the first is used: a policy that decides after the use
    settles them group by group, so the order of arrivals would show in what it keeps.
    """
    token_ids = routes.token_ids[number : number + 1]
    store.observe(StepBegins(sequences=np.zeros(1, np.int64), token_ids=token_ids))
    hits = []
    for layer in range(SHAPE.num_layers):
        ids, gates = routes.expert_ids[number, layer], routes.gate_weights[number, layer]
        store.observe(LayerRouted(layer=layer, expert_ids=ids[None], gate_weights=gates[None]))
        before = store.stats().hits
        with store.lease([ExpertKey(layer, int(e)) for e in ids]) as lease:
            store._fetcher.join()
            for group in lease:
                for key, slot in group:
                    assert (slot == key.layer * 16 + key.expert).all()
        store.check()
        hits.append(store.stats().hits - before)
    return hits


@pytest.mark.parametrize("name", ["lru", "lfu", "mrs", "lec", "reuse"])
def test_what_a_store_keeps_is_what_a_replay_keeps(name):
    """Hit for hit, once the slots are full: the same object decides in both."""
    routes = make_routes(SHAPE, num_sequences=2, length=60)
    live = make_policy(name, num_slots=15 + 2, setting=Setting(shape=SHAPE), reserve=2)
    twin = make_policy(name, num_slots=15, setting=Setting(shape=SHAPE))
    num_slots = 17 if live.may_decline else 15
    if not live.may_decline:
        live = make_policy(name, num_slots=15, setting=Setting(shape=SHAPE))
    store = open_store(live, num_slots)
    differing = 0
    for number in range(routes.num_tokens):
        found = decode(store, routes, number)
        token_ids = routes.token_ids[number : number + 1]
        begins = StepBegins(sequences=np.zeros(1, np.int64), token_ids=token_ids)
        twin.observe(begins)
        for layer in range(SHAPE.num_layers):
            ids, gates = routes.expert_ids[number, layer], routes.gate_weights[number, layer]
            event = LayerRouted(layer=layer, expert_ids=ids[None], gate_weights=gates[None])
            twin.observe(event)
            hits = twin.access([ExpertKey(layer, int(e)) for e in ids], 15)
            differing += hits != found[layer]
    # A store touches what it holds before it makes room, and settles group by group: where two
    # experts of one token are worth the same, another one may go.
    assert differing <= 0.03 * routes.num_tokens * SHAPE.num_layers


# Every policy, with either kind of shares in turn; all of both in `make test-long`.
@pytest.mark.parametrize(
    ("name", "adaptive"),
    [
        pytest.param(
            name,
            adaptive,
            id=f"{name}-{'adaptive' if adaptive else 'even'}",
            marks=[pytest.mark.long] * ((place + adaptive) % 2),
        )
        for place, name in enumerate(LIVE_POLICIES)
        for adaptive in (False, True)
    ],
)
def test_resident_experts_used_at_once_leave_what_a_lease_leaves(name, adaptive):
    """The same hits, the same residents, and the same victim whenever one is asked for."""
    routes = make_routes(SHAPE, num_sequences=2, length=15)
    generator = random.Random(0)
    stores = []
    for _ in range(2):
        setting = Setting(shape=SHAPE)
        policy = make_policy(name, num_slots=24, setting=setting, adaptive=adaptive, reserve=2)
        stores.append(open_store(policy, 24))
    shortened = 0
    for number in range(routes.num_tokens):
        found = [decode(store, routes, number) for store in stores]
        assert found[0] == found[1]
        layer = generator.randrange(SHAPE.num_layers)
        again = [ExpertKey(layer, int(e)) for e in routes.expert_ids[number, layer]]
        for store in stores:  # until what passed through is gone or kept
            store.read_ahead([])
        before = stores[0].stats().hits
        used = stores[0].use_resident(again, lambda slots: [int(slot[0]) for slot in slots])
        stores[0].check()
        if used is None:
            assert stores[0].stats().hits == before
            continue
        shortened += 1
        assert used == [key.layer * 16 + key.expert for key in again]
        with stores[1].lease(again) as lease:
            assert sum(map(len, lease)) == len(again)
        assert stores[0].stats() == replace(stores[1].stats(), stall_s=stores[0].stats().stall_s)
        assert stores[0]._entries.keys() == stores[1]._entries.keys()
        uses = [getattr(store._policy, "_num_uses", 0) for store in stores]
        assert uses[0] == uses[1]
    assert shortened > 5


def test_experts_that_are_not_all_there_are_left_to_a_lease():
    policy = make_policy("lru", num_slots=6, setting=Setting(shape=SHAPE))
    store = open_store(policy, 6)
    wanted = [ExpertKey(0, 1), ExpertKey(0, 2)]
    for present in (wanted[:1], wanted[1:]):
        assert store.use_resident(wanted, list) is None
        with store.lease(present) as lease:
            assert sum(map(len, lease)) == 1
    misses = store.stats().misses
    assert store.use_resident(wanted, lambda _: None) is None  # who is given them has no use
    assert store.stats().hits == 0
    assert len(store.use_resident(wanted, list)) == 2
    assert (store.stats().hits, store.stats().misses) == (2, misses)
    store.check()
