"""What a report measures, against counting by hand and against the replay of the same trace."""

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.report.findings import (
    expert_loads,
    popularity_curves,
    reuse_distances,
    token_overlap,
)
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.prediction import Shape

SHAPE = Shape(num_layers=3, num_experts=12, top_k=2)


@pytest.fixture(scope="module")
def trace():
    return trace_of(make_routes(SHAPE, num_sequences=5, length=40))


def test_loads_are_shares_of_tokens_without_unrecorded_choices(trace):
    loads = expert_loads(trace)
    assert loads.shape == (3, 12)
    for layer, expert in ((0, 0), (1, 5), (2, 11)):
        visits = [expert in ids for ids in trace.expert_ids[:, layer].tolist()]
        assert loads[layer, expert] == pytest.approx(np.mean(visits))
    half = trace_of(make_routes(SHAPE, num_sequences=5, length=40))
    half.expert_ids[:, 1, 1] = half.absent
    assert expert_loads(half)[1].sum() == pytest.approx(1.0)
    assert token_overlap(half)[1] <= 1.0


def test_popularity_rises_from_nothing_to_everything(trace):
    curves = popularity_curves(expert_loads(trace))
    assert curves.shape == (3, 13)
    np.testing.assert_allclose(curves[:, 0], 0.0)
    np.testing.assert_allclose(curves[:, -1], 1.0)
    # most visited first: no step is larger than the one before it
    assert (np.diff(curves, n=2, axis=1) <= 1e-12).all()
    assert popularity_curves(np.zeros((1, 4))).tolist() == [[0.0] * 5]


@pytest.mark.parametrize("steps", [None, [4] * 50])
@pytest.mark.parametrize("slots", [8, 10, 12])
def test_distances_below_the_slots_are_the_hits_of_lru(slots, steps):
    workload = workload_of(trace_of(make_routes(SHAPE, num_sequences=5, length=40), steps))
    distances = reuse_distances(workload)
    assert distances.sum() == workload.num_keys.sum()
    policy = make_policy("lru", num_slots=slots * 3, setting=Setting(shape=SHAPE))
    replay = replay_demand(workload, lambda _: policy, slots * 3)
    assert distances[:, :slots].sum() == replay.num_hits


def test_overlap_is_counted_within_requests(trace):
    shared = visited = 0
    for token in range(1, trace.num_tokens):
        if trace.token_request[token] == trace.token_request[token - 1]:
            now, before = trace.expert_ids[token, 1], trace.expert_ids[token - 1, 1]
            shared += len(set(now.tolist()) & set(before.tolist()))
            visited += len(now)
    assert token_overlap(trace)[1] == pytest.approx(shared / visited)
    one = trace_of(make_routes(SHAPE, num_sequences=1, length=1))
    assert np.isnan(token_overlap(one)).all()
