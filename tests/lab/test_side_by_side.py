"""Requests side by side: whole, each in its order; the next takes the place of one that ends."""

import dataclasses

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.lab.traces.routes import side_by_side
from moe_runtime.policies.prediction import Routes, Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)
ENDS = [0, 2, 6, 9, 13, 18]  # lengths 2, 4, 3, 4, 5


def test_the_next_request_takes_the_place_of_one_that_ends():
    drawn = make_routes(SHAPE, num_sequences=5, length=6)
    routes = Routes(
        shape=SHAPE,
        expert_ids=drawn.expert_ids[:18],
        gate_weights=drawn.gate_weights[:18],
        token_ids=np.arange(18),
        offsets=np.array(ENDS),
    )
    recorded = trace_of(routes)
    # As a server leaves it: tokens of all requests between one another.
    rows = np.random.default_rng(0).permutation(18)
    columns = ("token_request", "token_id", "token_position", "expert_ids", "gate_weights")
    mixed = dataclasses.replace(recorded, **{one: getattr(recorded, one)[rows] for one in columns})
    trace = side_by_side(mixed, count=2)
    steps = trace.token_request.reshape(-1, 2).tolist()
    assert steps[:4] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert steps[4:6] == [[2, 3], [3, 4]]
    assert np.diff(trace.step_start).tolist() == [2] * len(steps) == [2] * trace.num_steps
    for request in range(4):
        ids = trace.token_id[trace.token_request == request]
        assert ids.tolist() == list(range(ENDS[request], ENDS[request + 1]))
    np.testing.assert_array_equal(trace.expert_ids, routes.expert_ids[trace.token_id])
    with pytest.raises(ValueError, match=r"at least 6 requests .* got a trace of 5 requests"):
        side_by_side(mixed, count=6)
