"""Replaying a trace counts what a literal cache counts, and no policy beats the optimum."""

from dataclasses import replace

import numpy as np
import pytest
from literal_replay import literal_replay
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.lab.replay import untimed as replay
from moe_runtime.lab.replay.untimed import DemandReplay, ask_policy, replay_demand
from moe_runtime.lab.traces import Trace
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import (
    POLICIES,
    EvictionPolicy,
    LayerShares,
    Setting,
    compiled,
    make_global_policy,
    make_policy,
)
from moe_runtime.policies.eviction.classic import LRU
from moe_runtime.policies.eviction.compiled import RULES, is_available
from moe_runtime.policies.prediction import Shape, TrackedPredictor, make_estimator
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=4, length=15, seed=5)


def setting_for(events) -> Setting:
    predictor = TrackedPredictor(make_estimator("running-counts", SHAPE))
    return Setting(shape=SHAPE, training=ROUTES, future=events, predictor=predictor)


def replayed(
    trace: Trace, policy: str, capacity: int, *, shared_pool: bool, reset: bool = False
) -> DemandReplay:
    def make(events):
        setting = setting_for(events)
        if shared_pool:
            return make_global_policy(policy, setting=setting)
        return make_policy(policy, num_slots=capacity * SHAPE.num_layers, setting=setting)

    return replay_demand(workload_of(trace), make, capacity, reset_per_sequence=reset)


@pytest.mark.parametrize(
    ("shared_pool", "capacity", "reset"),
    [(False, 2, True), (False, 5, False), (True, 6, False), (True, 13, True)],
)
@pytest.mark.parametrize("policy", ["lru", "lfu", "static", "belady", "belady-bypass"])
def test_hits_are_those_of_a_literal_cache(policy, shared_pool, capacity, reset):
    found = replayed(trace_of(ROUTES), policy, capacity, shared_pool=shared_pool, reset=reset)
    hits, full = literal_replay(
        ROUTES.expert_ids,
        ROUTES.offsets[:-1].tolist(),
        SHAPE.num_experts,
        policy,
        capacity,
        shared_pool=shared_pool,
        reset=reset,
    )
    assert found.num_accesses == ROUTES.expert_ids.size
    assert found.num_hits == hits
    assert round(found.all_resident_rate * found.workload.num_events) == full
    layers = found.hit_rate_by_layer()
    assert layers.mean() == pytest.approx(found.hit_rate)
    assert found.loads_per_event == pytest.approx(2 * (1 - found.hit_rate))


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_reset_of_requests_that_run_at_the_same_time_is_refused(is_mixed):
    """Tokens of four requests in turn, in steps of one or of four: none begins with the cache."""
    rows = np.arange(60).reshape(4, 15).T.ravel()
    recorded = trace_of(ROUTES, [4] * 15 if is_mixed else None)
    columns = ("token_request", "token_id", "token_position", "expert_ids", "gate_weights")
    trace = replace(recorded, **{name: getattr(recorded, name)[rows] for name in columns})
    with pytest.raises(ValueError, match="requests of this trace run at the same time"):
        replayed(trace, "lru", 2, shared_pool=False, reset=True)


@pytest.mark.parametrize("shared_pool", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_beats_the_optimum(policy, shared_pool):
    trace = trace_of(make_routes(SHAPE, num_sequences=4, length=45, seed=1))
    for capacity in (3, 6):
        slots = capacity * (SHAPE.num_layers if shared_pool else 1)
        bound = "belady-bypass" if make_declines(policy) else "belady"
        best = replayed(trace, bound, slots, shared_pool=shared_pool)
        assert replayed(trace, policy, slots, shared_pool=shared_pool).num_hits <= best.num_hits


def make_declines(policy: str) -> bool:
    return POLICIES[policy](setting_for([]))().may_decline


def test_a_step_of_many_tokens_asks_for_each_expert_once():
    trace = trace_of(ROUTES, [5] * 12)
    workload = workload_of(trace)
    assert workload.num_events == 12 * 3
    used = ROUTES.expert_ids[:5, 0].ravel().tolist()
    wanted_most_last = sorted(set(used), key=lambda e: (used.count(e), -used[::-1].index(e)))
    assert workload.keys[0] == [ExpertKey(0, expert) for expert in wanted_most_last]
    assert replayed(trace, "lru", 8, shared_pool=False).hit_rate > 0.5


def test_layers_that_recorded_nothing_are_left_out():
    ids = ROUTES.expert_ids.copy()
    ids[3, 1] = 255
    ids[4, 2, 1] = 255
    routes = replace(ROUTES, expert_ids=ids)
    workload = workload_of(trace_of(routes))
    assert workload.num_events == ROUTES.num_tokens * 3 - 1
    assert (3, 1) not in set(zip(workload.step.tolist(), workload.layer.tolist(), strict=True))
    assert workload.num_keys[13] == 1
    events = list(workload.routing(9, 14))
    assert [begins is not None for begins, _ in events] == [True, False, True, False, False]
    assert events[-1][1].expert_ids.tolist() == [[int(ids[4, 2, 0]), SHAPE.num_experts]]


@pytest.mark.parametrize("policy", sorted(RULES))
@pytest.mark.parametrize("capacity", [2, 5])
def test_an_expert_that_a_token_names_twice_is_asked_for_once(policy, capacity):
    ids = ROUTES.expert_ids.copy()
    ids[4:9, :, 1] = ids[4:9, :, 0]
    once = ids.copy()
    once[4:9, :, 1] = 255
    workload = workload_of(trace_of(replace(ROUTES, expert_ids=ids)))
    assert workload.keys[12] == [ExpertKey(0, int(ids[4, 0, 0]))]
    found = replayed(workload.trace, policy, capacity, shared_pool=False)
    expected = replayed(
        trace_of(replace(ROUTES, expert_ids=once)), policy, capacity, shared_pool=False
    )
    assert found.hits.tolist() == expected.hits.tolist()


def test_gate_weights_belong_to_their_experts_where_a_choice_was_not_recorded():
    ids = ROUTES.expert_ids.copy()
    ids[4, 2, 1] = 255
    trace = trace_of(replace(ROUTES, expert_ids=ids))
    keep = (trace.expert_ids != trace.absent).ravel()
    expected = trace.gate_weights.astype(np.float64).ravel()[keep]
    assert workload_of(trace).mean_gates.tolist() == expected.tolist()


@pytest.mark.skipif(not is_available(), reason="the compiled replay needs a C compiler")
@pytest.mark.parametrize("policy", sorted(RULES))
@pytest.mark.parametrize("reset", [False, True])
def test_the_compiled_replay_counts_what_the_policies_themselves_count(policy, reset):
    """Single tokens and prompts that overflow a cache, in shares and in one pool, tied weights."""
    shape = Shape(num_layers=3, num_experts=9, top_k=3)
    routes = make_routes(shape, num_sequences=2, length=60, seed=11)
    tied = replace(routes, expert_ids=routes.expert_ids[:4], offsets=np.array([0, 4]))
    steps = [7, 1, 1, 30, *[1] * 21]
    for trace in (trace_of(routes), trace_of(routes, steps * 2)):
        workload = workload_of(trace)
        bounds = [*(workload.sequence_starts if reset else [0]), workload.num_events]
        for num_slots, shared_pool in ((3, False), (9, False), (1, True), (14, True)):

            def make(events, slots=num_slots, shared_pool=shared_pool):
                setting = Setting(shape=shape, training=tied, future=events)
                if shared_pool:
                    return make_global_policy(policy, setting=setting)
                return make_policy(policy, num_slots=3 * slots, setting=setting)

            found = replay_demand(workload, make, num_slots, reset_per_sequence=reset)
            asked = ask_policy(workload, make, num_slots, bounds)
            assert found.hits.tolist() == asked.hits.tolist()
            assert (num_slots > 1) <= found.num_hits < found.num_accesses


def test_without_the_compiled_replay_the_policies_are_asked(monkeypatch):
    expected = replayed(trace_of(ROUTES), "sieve", 5, shared_pool=True).hits
    monkeypatch.setattr(replay, "count_hits", lambda *_, **__: None)
    asked = replayed(trace_of(ROUTES), "sieve", 5, shared_pool=True).hits
    assert asked.tolist() == expected.tolist()


@pytest.mark.skipif(not is_available(), reason="the compiled replay needs a C compiler")
def test_a_library_of_another_version_is_left_aside(monkeypatch):
    monkeypatch.setitem(compiled.VERSIONS, "replay", 0)
    compiled.library.cache_clear()
    try:
        assert not is_available()
    finally:
        compiled.library.cache_clear()


class _NewestFirst(LRU[ExpertKey]):
    """Evicts what was inserted last: nearly the opposite of the class that it derives from."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[ExpertKey] = []

    def insert(self, key: ExpertKey) -> None:
        super().insert(key)
        self.held.append(key)

    def remove(self, key: ExpertKey) -> None:
        super().remove(key)
        self.held.remove(key)

    def victim(self, evictable, incoming: ExpertKey) -> ExpertKey | None:
        return next((key for key in reversed(self.held) if evictable(key)), None)


@pytest.mark.parametrize("in_shares", [False, True])
def test_a_subclass_of_a_compiled_policy_is_asked_itself(in_shares):
    def make(_) -> EvictionPolicy[ExpertKey]:
        return LayerShares(_NewestFirst, [4] * SHAPE.num_layers) if in_shares else _NewestFirst()

    workload = workload_of(trace_of(ROUTES))
    held: dict[object, list[ExpertKey]] = {}
    expected = []
    for keys in workload.keys:
        pool = held.setdefault(keys[0].layer if in_shares else None, [])
        missing = [key for key in keys if key not in pool]
        for _ in range(max(0, len(pool) + len(missing) - (4 if in_shares else 12))):
            pool.remove(next(key for key in reversed(pool) if key not in keys))
        pool += missing
        expected.append(len(keys) - len(missing))
    assert replay_demand(workload, make, 12).hits.tolist() == expected
