"""Every eviction policy keeps the contract, and LRU with shares does what a plain list says."""

import random

import pytest
from synthetic_routes import make_routes

from moe_runtime.policies.eviction import (
    LRU,
    POLICIES,
    EvictionPolicy,
    LayerShares,
    Setting,
    even_shares,
    make_policy,
)
from moe_runtime.policies.eviction.compiled import rule_of
from moe_runtime.policies.prediction import Shape, TrackedPredictor, make_estimator
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=2, num_experts=20, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=3, length=8)


def setting() -> Setting:
    predictor = TrackedPredictor(make_estimator("running-counts", SHAPE))
    return Setting(shape=SHAPE, training=ROUTES, future=[], predictor=predictor)


def make(name: str) -> EvictionPolicy[ExpertKey]:
    return POLICIES[name](setting())()


@pytest.fixture(params=sorted(POLICIES))
def name(request):
    return request.param


@pytest.fixture
def policy(name):
    return make(name)


def key(expert: int, layer: int = 0) -> ExpertKey:
    return ExpertKey(layer, expert)


def anything(_: object) -> bool:
    return True


class TestContract:
    def test_holds_what_was_inserted_and_not_removed(self, policy):
        policy.insert(key(1))
        policy.insert(key(2))
        with pytest.raises(ValueError, match="already"):
            policy.insert(key(1))
        for method in (policy.touch, policy.remove):
            with pytest.raises(KeyError):
                method(key(3))
        assert policy.victim(lambda _: False, key(9)) is None
        policy.remove(key(1))
        assert (len(policy), key(2) in policy, key(1) in policy) == (1, True, False)

    def test_the_victim_is_held_and_evictable_and_stays(self, policy):
        for expert in range(5):
            policy.insert(key(expert))
        victim = policy.victim(lambda k: k == key(3), key(9))
        assert victim == key(3)
        assert key(3) in policy
        assert key(9) not in policy

    def test_keys_are_those_of_a_set_after_every_step_of_a_stress(self, policy):
        generator = random.Random(7)
        held: set[ExpertKey] = set()
        for _ in range(2000):
            some = key(generator.randrange(20))
            if some not in held:
                if len(held) == 8:
                    leased = set(generator.sample(sorted(held), 3))
                    victim = policy.victim(lambda k, leased=leased: k not in leased, some)
                    if policy.declines(some, victim):
                        assert policy.may_decline
                        policy.decline(some)
                        continue
                    assert victim in held - leased
                    policy.remove(victim)
                    held.remove(victim)
                policy.insert(some)
                held.add(some)
            else:
                policy.touch(some)
            policy.check()
            assert len(policy) == len(held)
            assert all(k in policy for k in held)

    def test_an_event_larger_than_the_cache_takes_the_slots_that_it_does_not_use(self, policy):
        policy.access([key(1), key(2)], 3)
        assert policy.access([key(e) for e in range(2, 7)], 3) == 1
        assert len(policy) == 3
        if not policy.may_decline:  # else it may rather keep others
            assert [key(e) for e in range(7) if key(e) in policy] == [key(2), key(5), key(6)]
        policy.check()

    def test_no_slot_at_all_serves_any_event(self, policy):
        for _ in range(2):
            assert policy.access([key(1), key(2)], 0) == len(policy) == 0


class TestShares:
    def test_even_shares_use_every_slot(self):
        assert even_shares(10, 4) == [3, 3, 2, 2]
        assert even_shares(2, 4) == [1, 1, 0, 0]
        with pytest.raises(ValueError, match="cannot split"):
            even_shares(3, 0)

    def test_a_full_layer_evicts_its_own(self):
        policy = LayerShares(LRU, [2, 2])
        for some in (key(0, 1), key(1, 1), key(0), key(1)):
            policy.insert(some)
        assert policy.victim(anything, key(5)) == key(0)
        assert policy.victim(anything, key(5, 1)) == key(0, 1)

    def test_a_layer_below_its_share_takes_from_the_one_furthest_above(self):
        policy = LayerShares(LRU, [1, 1, 2])
        for some in (key(0), key(1), key(2), key(0, 1)):
            policy.insert(some)
        assert policy.room(2) == 2
        assert policy.victim(anything, key(0, 2)) == key(0)

    def test_leased_experts_of_a_full_layer_are_passed_over(self):
        policy = LayerShares(LRU, [1, 1])
        policy.insert(key(0))
        policy.insert(key(4, 1))
        assert policy.victim(lambda k: k != key(0), key(1)) == key(4, 1)

    def test_shares_below_one_leave_every_layer_usable(self):
        policy = LayerShares(LRU, even_shares(2, 5))
        policy.insert(key(0, 3))
        policy.insert(key(1, 4))
        assert policy.victim(anything, key(2, 4)) == key(1, 4)

    def test_an_unknown_policy_names_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'lru'"):
            make_policy("lur", num_slots=4, setting=setting())


def test_a_subclass_is_replayed_by_its_own_methods():
    class Mine(LRU):
        pass

    assert rule_of(LRU()) is not None
    assert rule_of(Mine()) is None
    assert rule_of(LayerShares(LRU, [1, 1])) == rule_of(LRU())
    assert rule_of(LayerShares(Mine, [1, 1])) is None
