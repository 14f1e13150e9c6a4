"""What sets each eviction policy apart, by hand-worked cases and by traces made for it."""

import random
from collections import Counter

import numpy as np
import pytest

from moe_runtime.policies.eviction import LRU, AdaptiveShares
from moe_runtime.policies.eviction.classic import (
    GDSF,
    LFRU,
    SIEVE,
    SLRU,
    AgingLFU,
    LeastExpectedCost,
)
from moe_runtime.policies.eviction.learned import (
    ActivationMatrices,
    ActiveExperts,
    ExpertBuffering,
    PredictedUse,
    RecentScores,
    Scored,
)
from moe_runtime.policies.prediction import LayerRouted, Shape, StepBegins
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=12, num_experts=32, top_k=2)


def anything(_: object) -> bool:
    return True


def step(*sequences: int) -> StepBegins:
    return StepBegins(sequences=np.array(sequences), token_ids=np.full(len(sequences), -1))


def routed(layer: int, *experts: int, weights: tuple[float, ...] | None = None) -> LayerRouted:
    gates = np.array([weights or [1 / len(experts)] * len(experts)], np.float32)
    return LayerRouted(layer=layer, expert_ids=np.array([experts]), gate_weights=gates)


def test_ageing_forgets_what_was_used_long_ago():
    old, fresh = AgingLFU[str](half_life=2), AgingLFU[str](half_life=1e9)
    for policy in (old, fresh):
        policy.insert("once popular")
        for _ in range(5):
            policy.touch("once popular")
        policy.insert("popular now")
        for _ in range(4):
            policy.touch("popular now")
    assert old.victim(anything, "new") == "once popular"
    assert fresh.victim(anything, "new") == "popular now"


def test_lfru_weighs_uses_by_age():
    policy = LFRU[str]()
    for key in "aaab" + "c" * 3:
        (policy.touch if key in policy else policy.insert)(key)
    # uses over age: a 3/5, b 1/4, c 3/1
    assert policy.victim(anything, "d") == "b"
    policy.remove("b")
    assert policy.victim(anything, "d") == "a"


def test_slru_evicts_newcomers_before_what_was_used_twice():
    policy = SLRU[str]()
    for key in "abcdab":
        (policy.touch if key in policy else policy.insert)(key)
    assert policy.victim(anything, "e") == "c"
    assert policy.victim(lambda key: key in "ab", "e") == "a"


def test_sieve_spares_what_was_used_since_the_hand_came_by():
    policy = SIEVE[str]()
    for key in "abcd":
        policy.insert(key)
    policy.touch("a")
    policy.touch("c")
    evicted = []
    for incoming in "efg":
        victim = policy.victim(anything, incoming)
        assert victim == policy.victim(anything, incoming)
        evicted.append(victim)
        policy.remove(victim)
        policy.insert(incoming)
    # b first; the hand goes on from c (spared) to d, then to the unmarked e
    assert evicted == ["b", "d", "e"]


def test_gdsf_pays_attention_to_cost_and_ages_the_idle():
    policy = GDSF[str](cost=lambda key: 10.0 if key == "dear" else 1.0)
    policy.insert("dear")
    for key in ("a", "b", "c"):
        policy.insert(key)
        assert policy.victim(anything, "new") == key
        policy.remove(key)
    for number in range(12):
        policy.insert(str(number))
        victim = policy.victim(anything, "new")
        policy.remove(victim)
        if victim == "dear":
            break
    assert victim == "dear"  # the clock has passed its rank


@pytest.mark.parametrize("ratio", [1.5, 100.0])
def test_least_expected_cost_pays_no_more_than_lfu(ratio):
    """The synthetic suite of the paper: 20 keys by a power law, 8 slots, unequal costs."""
    generator = np.random.default_rng(0)
    chance = np.arange(1, 21) ** -0.8
    queries = generator.choice(20, size=4000, p=chance / chance.sum())
    costs = generator.choice([1.0, ratio], size=20)
    paid = {}
    for name, cost in (("lec", lambda key: costs[key]), ("lfu", lambda _: 1.0)):
        policy = LeastExpectedCost[int](cost)
        paid[name] = sum(costs[q] for q in queries.tolist() if not policy.access([q], 8))
        policy.check()
    assert paid["lec"] <= paid["lfu"]
    if ratio > 10:
        assert paid["lec"] < 0.8 * paid["lfu"]


def test_mrs_is_a_moving_average_of_the_highest_scores():
    scores = RecentScores(Shape(num_layers=2, num_experts=4, top_k=2), alpha=0.5)
    scores.observe(routed(1, 2, 0, weights=(0.6, 0.4)))
    scores.observe(routed(1, 2, 3, weights=(0.7, 0.3)))
    assert scores.scores(1) == pytest.approx([0.1, 0, 0.5, 0.15])
    assert scores.scores(0) == [0, 0, 0, 0]


def test_activation_matrices_recognise_the_request():
    """The paper's example: of two stored patterns, the running request follows the second."""
    matrices = ActivationMatrices(Shape(num_layers=3, num_experts=2, top_k=1), own_share=0.0)
    for number, path in enumerate(([0, 0, 0], [1, 1, 1])):
        for _ in range(3):
            matrices.observe(step(number))
            for layer, expert in enumerate(path):
                matrices.observe(routed(layer, expert))
        matrices.finish(number)
    matrices.observe(step(7))
    matrices.observe(routed(0, 1))
    matrices.observe(step(7))
    assert matrices.scores(2)[1] > matrices.scores(2)[0]
    policy = Scored(matrices)
    policy.insert(ExpertKey(2, 1))
    policy.insert(ExpertKey(2, 0))
    assert policy.victim(anything, ExpertKey(1, 0)) == ExpertKey(2, 0)


def test_predictions_are_evicted_furthest_first():
    class Oracle:
        def observe(self, event):
            pass

        def finish(self, sequence):
            pass

        def chances(self, now, layer):
            assert now == 0
            return np.array([[0, 0.5, 0, 0], [0, 0, 0.2, 0.9]][layer])

    policy = Scored(PredictedUse(Shape(num_layers=2, num_experts=4, top_k=1), Oracle()))
    policy.watcher.observe(routed(0, 0))
    held = [ExpertKey(1, 2), ExpertKey(0, 1), ExpertKey(1, 3), ExpertKey(1, 0)]
    for key in held:
        policy.insert(key)
    evicted = []
    while len(policy):
        evicted.append(policy.victim(anything, ExpertKey(0, 3)))
        policy.remove(evicted[-1])
    # never predicted; 1 + 2 * 4 layers ahead; 2 + 2 * 1; 1 + 2 / 9
    assert evicted == [ExpertKey(1, 0), ExpertKey(1, 2), ExpertKey(0, 1), ExpertKey(1, 3)]


class TestExpertBuffering:
    """Experts of one device run one after another, in the order of their numbers."""

    @staticmethod
    def batches(seed: int) -> list[list[int]]:
        generator = np.random.default_rng(seed)
        hot = generator.random(16) < 0.5
        batches = []
        for _ in range(400):
            hot ^= generator.random(16) < 0.05
            active = (hot & (generator.random(16) < 0.9)) | (generator.random(16) < 0.05)
            batches.append(np.flatnonzero(active).tolist())
        return batches

    @staticmethod
    def misses(policy, batches, num_slots: int, *, watcher=None) -> int:
        misses = 0
        for batch in batches:
            if not batch:
                continue
            if watcher is not None:
                watcher.observe(routed(0, *batch))
            misses += sum(1 - policy.access([ExpertKey(0, e)], num_slots) for e in batch)
        return misses

    @pytest.mark.parametrize("num_slots", [2, 4, 6, 8])
    def test_last_in_first_out_beats_lru_and_comes_near_the_optimum(self, num_slots):
        for seed in range(2):
            batches = self.batches(seed)
            active = ActiveExperts()
            lifo = self.misses(ExpertBuffering(active), batches, num_slots, watcher=active)
            assert lifo < self.misses(LRU(), batches, num_slots)
            least = fewest_misses([e for batch in batches for e in batch], num_slots)
            assert least <= lifo <= 1.35 * least


def fewest_misses(uses: list[int], num_slots: int) -> int:
    """Belady's rule, written out."""
    held: set[int] = set()
    misses = 0
    for now, key in enumerate(uses):
        if key in held:
            continue
        misses += 1
        if len(held) == num_slots:
            rest = uses[now + 1 :]
            held.remove(max(held, key=lambda k: rest.index(k) if k in rest else len(rest)))
        held.add(key)
    return misses


def test_shares_move_to_the_layer_where_slots_save_misses():
    """Layer 0 runs through ever new experts and gains nothing; layer 1 needs ten slots."""
    policy = AdaptiveShares(LRU, [6, 6], smallest=1)
    generator = random.Random(0)
    hits = Counter()
    for turn in range(6000):
        for layer, expert in ((0, turn % 100), (1, generator.randrange(10))):
            hits[layer, turn >= 4000] += policy.access([ExpertKey(layer, expert)], 12)
        policy.check()
        assert len(policy) <= 12
    assert sum(policy.slots_by_layer) == 12
    assert policy.slots_by_layer[1] >= 10
    assert hits[1, True] > 0.95 * 2000
    assert hits[1, False] < 0.95 * 4000
