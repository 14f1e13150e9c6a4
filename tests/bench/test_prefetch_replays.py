"""The scripts that replay prefetching and looking ahead in virtual time, on small drawn routing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.benchmarks import looking_ahead, prefetch_matrix
from moe_runtime.benchmarks.looking_ahead import Ahead, draft, expected
from moe_runtime.benchmarks.prefetch_matrix import compare, machine_of, optimum
from moe_runtime.inference.drafts import MOST_DRAFTED
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.policies.eviction.reuse import maker_of, new_estimator
from moe_runtime.policies.prediction import Shape, make_estimator
from moe_runtime.policies.prediction.estimator import visits
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=3, num_experts=13, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=3, length=50)
SLOTS = 15


def test_steps_take_at_least_their_bounds_and_auto_is_near_the_better_of_both():
    served = workload_of(trace_of(ROUTES))
    estimators = {name: make_estimator(name, SHAPE) for name in ("running-counts", "combined")}
    for estimator in estimators.values():
        estimator.fit(make_routes(SHAPE, seed=1))
    for link_gb_s in (1, 25):
        machine = machine_of(1_000_000, link_gb_s)
        for found in compare(served, lambda: LRU, machine, SLOTS, estimators).values():
            steps_s = found["off_s"], found["enforce_s"], found["auto_s"]
            assert found["bound_s"] <= found["enforce_s"]
            assert found["optimum_bound_s"] <= min(steps_s)
            assert found["auto_of_best"] == pytest.approx(min(steps_s[:2]) / steps_s[2])
            assert found["auto_of_best"] > 0.9  # of 150 steps, a trial runs some the other way
            assert 0 < found["hits"] < 1


def test_drafts_are_right_as_often_as_asked_and_end_with_their_request():
    drafted_NT = draft(ROUTES, 1.0)
    assert drafted_NT.shape == (MOST_DRAFTED, ROUTES.num_tokens)
    for token in range(45):
        following = ROUTES.token_ids[token + 1 : 50][:MOST_DRAFTED]
        assert drafted_NT[: len(following), token].tolist() == following.tolist()
    assert (draft(ROUTES, 0.0)[0, :49] != ROUTES.token_ids[1:50]).any()
    predictor = make_estimator("combined", SHAPE)
    chances = expected(ROUTES, drafted_NT[:2], predictor)
    assert chances.shape == (2, ROUTES.num_tokens, SHAPE.num_layers, SHAPE.num_experts)


def test_evictions_that_know_where_tokens_go_come_near_the_optimum():
    served = workload_of(trace_of(ROUTES))
    ahead = np.arange(ROUTES.num_tokens) + np.arange(1, MOST_DRAFTED + 1)[:, None]
    routed = visits(ROUTES.expert_ids, SHAPE.num_experts)
    routed = routed[np.minimum(ahead, ROUTES.num_tokens - 1)]
    rates = [
        replay_demand(
            served,
            lambda _, one=estimator: LayerShares(maker_of(one), even_shares(SLOTS, 3)),
            SLOTS,
        ).hit_rate
        for estimator in (
            new_estimator(SHAPE),
            Ahead(new_estimator(SHAPE), routed, 0.0),
            Ahead(new_estimator(SHAPE), routed, 1.0),
        )
    ]
    most = optimum(served, SLOTS).hit_rate
    assert rates[0] == pytest.approx(rates[1], abs=0.01)  # ties of float32 scores
    assert most - rates[2] < 0.3 * (most - rates[0])


def test_what_the_next_step_needs_stays_where_it_is_known(monkeypatch):
    monkeypatch.setattr(looking_ahead, "STEPS", [(1, 3)])
    monkeypatch.setattr(prefetch_matrix, "SHARES", [0.4])
    found = dict[str, float]()
    results: Any = SimpleNamespace(add=lambda name, rows: found.update({name: rows[0]["reads"]}))
    looking_ahead.measure_queue(trace_of(ROUTES), make_routes(SHAPE, seed=1), results)
    least, guessed, known = found.values()
    assert known < least
    assert guessed < 1.2 * least
    rows, decoded = looking_ahead.side_by_side(ROUTES, 1, 3)
    assert (decoded, rows[0].tolist(), rows[1].tolist()) == (1, [25, 50, 51, 52], [26, 53, 54, 55])
    assert rows.shape == (25, 4)
    chances = np.zeros((2, 1, 3))
    chances[1, 0, 2] = 0.99
    assert looking_ahead.needs(chances) == [{ExpertKey(0, 2)}, set()]
