"""Requests in groups: whole, side by side, each in its order; the page shows what was measured."""

import grouped_requests
import numpy as np
import pytest
from grouped_requests import grouped, measure
from synthetic_routes import make_routes

from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.prediction import Routes, Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=5, length=6)


def test_requests_decode_side_by_side_and_the_next_takes_the_place_of_one_that_ends() -> None:
    ends = [0, 2, 6, 9, 13, 18]  # lengths 2, 4, 3, 4, 5
    routes = Routes(
        shape=SHAPE,
        expert_ids=ROUTES.expert_ids[:18],
        gate_weights=ROUTES.gate_weights[:18],
        token_ids=np.arange(18),
        offsets=np.array(ends),
    )
    trace = grouped(routes, 2)
    steps = trace.token_request.reshape(-1, 2).tolist()
    assert steps[:4] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert steps[4:6] == [[2, 3], [3, 4]]
    assert np.diff(trace.step_start).tolist() == [2] * len(steps)
    for request in range(4):
        rows = trace.token_id[trace.token_request == request]
        assert rows.tolist() == list(range(ends[request], ends[request + 1]))
    np.testing.assert_array_equal(trace.expert_ids, routes.expert_ids[trace.token_id])


def test_rates_lie_below_the_optimum() -> None:
    workload = workload_of(grouped(ROUTES, 2))
    rates = measure(workload, workload, 0.5)["hit_rates"]
    assert 0 < rates["lru"] <= rates["optimum"] < 1
    assert rates["activation_aware"] <= rates["optimum"]


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grouped_requests.py", "--check"])
    assert grouped_requests.main() == 0, "run benchmarks/grouped_requests.py --table"
