"""Steps whose experts are more than a layer's share use the cache and feed it."""

import random
from collections import Counter

import numpy as np
import pytest
from fake_tier import FakeTier, content, keys, make_store, open_store, use
from synthetic_routes import make_routes

from moe_runtime.policies.eviction import LIVE_POLICIES, LayerShares, Setting, make_policy
from moe_runtime.policies.prediction import (
    LayerRouted,
    Shape,
    StepBegins,
    TrackedPredictor,
    make_estimator,
)

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


def test_a_prompt_that_visits_every_expert_changes_nothing_that_decoding_holds():
    tier = FakeTier()
    store = filled(tier, num_slots=9, stream_slots=1)
    prompt = [keys(layer, *range(6)) for layer in range(3)]
    for wanted in prompt:
        use(store, wanted, streaming=True)
    kept = [held(store, layer) for layer in range(3)]
    assert sum(map(len, kept)) == 9 - 1  # one slot is passed through
    for wanted in prompt:
        use(store, wanted[::-1], streaming=True)
        assert [held(store, layer) for layer in range(3)] == kept


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
    for _ in range(60):
        layer = generator.randrange(3)
        wanted = keys(layer, *generator.sample(range(6), generator.randint(2, 6)))
        present = {key for key in wanted if key in store._entries}
        tier.fetched.clear()
        with store.lease(wanted, streaming=len(wanted) > store.share(layer)) as lease:
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
    predictors = [TrackedPredictor(make_estimator("running-counts", SHAPE)) for _ in range(2)]
    settings = [Setting(shape=SHAPE, predictor=predictor) for predictor in predictors]
    live, twin = (make_policy(name, num_slots=15, setting=setting) for setting in settings)
    assert isinstance(live, LayerShares)
    store = open_store(live, 15 + 2)  # two more to pass through
    routes = make_routes(SHAPE, num_sequences=4, length=24)
    num_hits = num_expected = num_large = 0
    for number in range(24):
        tokens = routes.offsets[:-1] + number
        begins = StepBegins(sequences=np.arange(4), token_ids=routes.token_ids[tokens])
        store.observe(begins)
        twin.watcher.observe(begins)
        for layer in range(SHAPE.num_layers):
            ids, gates = routes.expert_ids[tokens, layer], routes.gate_weights[tokens, layer]
            event = LayerRouted(layer=layer, expert_ids=ids, gate_weights=gates)
            store.observe(event)
            twin.watcher.observe(event)
            wanted = keys(layer, *by_wants(ids))
            if len(wanted) <= store.share(layer):
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
    assert num_large > 30
