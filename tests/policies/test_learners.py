"""Policies that learn from requests go on where another object of theirs stopped."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction.learned import ActivationMatrices
from moe_runtime.policies.eviction.reuse import ReuseEstimator
from moe_runtime.policies.prediction import (
    EamCollection,
    LayerRouted,
    Shape,
    StepBegins,
    TrackedPredictor,
)
from moe_runtime.policies.prediction.base import Learner, Routes, most_learned_bytes

SHAPE = Shape(num_layers=3, num_experts=12, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=3, length=40)
LEARNERS: dict[str, Callable[[], Any]] = {
    "activation-aware": lambda: ActivationMatrices(SHAPE),
    "eam": lambda: TrackedPredictor(EamCollection(SHAPE)),
    "reuse": lambda: ReuseEstimator(SHAPE),
}


def watch(learner: Any, routes: Routes) -> Any:
    """Tells a learner of requests one after another, each of which ends."""
    workload = workload_of(trace_of(routes))
    for number, (begins, routed) in enumerate(workload.routing(0, workload.num_events)):
        if begins is not None:
            workload.begin(number, begins, [learner])
        learner.observe(routed)
        if hasattr(learner, "scores"):
            learner.scores(routed.layer)  # as when an expert must go
    learner.finish(routes.num_sequences - 1)
    return learner


@pytest.mark.parametrize("name", LEARNERS)
def test_what_was_learned_is_taken_over(name):
    first = watch(LEARNERS[name](), ROUTES)
    assert isinstance(first, Learner)
    assert first.name == name
    kept = {key: array.copy() for key, array in first.learned().items()}
    assert kept
    assert sum(array.nbytes for array in kept.values()) <= most_learned_bytes(SHAPE)
    second = LEARNERS[name]()
    assert not second.learned()
    second.restore(copy.deepcopy(kept))
    again = watch(second, ROUTES.select([0])).learned()
    if name == "reuse":
        once = watch(LEARNERS[name](), ROUTES.select([0])).learned()
        prior = 30 * np.eye(len(kept["gram"]))
        assert np.linalg.norm(again["gram"] - prior) > np.linalg.norm(once["gram"] - prior)
        assert np.linalg.norm(kept["gram"] - prior) > 0
    else:
        np.testing.assert_array_equal(again["matrices"][:3], kept["matrices"])
        assert len(again["matrices"]) == 4


@pytest.mark.parametrize("name", LEARNERS)
def test_damaged_arrays_are_refused(name):
    kept = dict(watch(LEARNERS[name](), ROUTES).learned())
    for key, array in kept.items():
        damaged = [array[None], array.astype(np.float16), array * np.nan]
        if key in ("matrices", "uses", "gates", "gram"):
            damaged.append(-array - 1)
        for wrong in damaged:
            learner = LEARNERS[name]()
            with pytest.raises(ValueError, match=r"array|positive definite"):
                learner.restore({**kept, key: wrong})
            assert not learner.learned()
        with pytest.raises(ValueError, match=key):
            LEARNERS[name]().restore({k: v for k, v in kept.items() if k != key})


@pytest.mark.parametrize("name", ["activation-aware", "eam"])
def test_requests_that_decode_in_turn_are_learned_whole(name):
    """A step of one request is not the end of the others."""
    learner = LEARNERS[name]()
    for token in range(40):
        for request in (0, 1):
            row = [40 * request + token]
            learner.observe(
                StepBegins(sequences=np.array([request]), token_ids=ROUTES.token_ids[row])
            )
            for layer in range(SHAPE.num_layers):
                ids, weights = ROUTES.expert_ids[row, layer], ROUTES.gate_weights[row, layer]
                learner.observe(LayerRouted(layer=layer, expert_ids=ids, gate_weights=weights))
        assert not learner.learned()
    for number in (0, 1):
        learner.finish(number)
        found = learner.learned()["matrices"]
        assert len(found) == number + 1
        np.testing.assert_array_equal(found[number], ROUTES.counts(ROUTES.tokens_of(number)))
    learner.observe(StepBegins(sequences=np.array([7]), token_ids=np.array([1])))
    learner.finish(7)  # nothing is known of it
    assert len(learner.learned()["matrices"]) == 2
