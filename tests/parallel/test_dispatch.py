"""`dispatch` and `combine` over processes equal one process that computes everything densely."""

import pytest
import torch
from parallel_checks import (
    bytes_on_the_wire,
    dispatch_and_combine,
    gradients,
    moepp_layer,
    moepp_layer_bytes,
)
from parallel_layer import (
    Problem,
    assert_equal_to_dense,
    make_problem,
    rank_parameters,
    rank_routing,
    run_experts,
)

from moe_runtime.parallel import ExpertSlots, combine, dispatch
from moe_runtime.routing import Routing

CASES = {
    "even": {"tokens": [13, 13], "num_experts": 6, "num_choices": 2},
    "uneven": {"tokens": [1, 29], "num_experts": 5, "num_choices": 3},
    "first rank empty": {"tokens": [0, 17], "num_experts": 4, "num_choices": 2},
    "no tokens at all": {"tokens": [0, 0], "num_experts": 4, "num_choices": 2},
    "one expert": {"tokens": [9, 8], "num_experts": 4, "num_choices": 1, "skew": "one"},
    "all dropped": {"tokens": [9, 8], "num_experts": 4, "num_choices": 2, "dropped": 1.1},
    "fewer experts than ranks": {"tokens": [5, 6], "num_experts": 1, "num_choices": 1},
    "more slots than a message holds": {"tokens": [5, 6], "num_experts": 500, "num_choices": 2},
    "every expert": {"tokens": [3, 4], "num_experts": 4, "num_choices": 4},
}


def case_problem(case: dict, size: int) -> Problem:
    options = dict(case)
    tokens = (options.pop("tokens") * size)[:size]
    return make_problem(tokens, seed=size, **options)


@pytest.mark.parametrize("size", [2, 4])
def test_equals_dense(size, ranks):
    for case in CASES.values():
        problem = case_problem(case, size)
        slots = ExpertSlots.contiguous(problem.num_experts, size)
        answers = ranks(size).run(dispatch_and_combine, problem, slots)
        assert_equal_to_dense(problem, slots, answers)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_single_process(case):
    problem = case_problem(case, 1)
    slots = ExpertSlots.contiguous(problem.num_experts, 1)
    x_TD, routing = rank_routing(problem, 0)
    parameters = rank_parameters(problem, slots, 0)
    dispatched = dispatch(x_TD, routing)
    y_TD = combine(run_experts(dispatched.rows_RD, dispatched.counts_S, parameters), dispatched)
    y_TD.backward(problem.grad_TD)
    answer = gradients(y_TD, x_TD, routing.weights_TK, parameters)
    assert_equal_to_dense(problem, slots, [answer])


@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (4, 1)])
def test_hierarchical_equals_flat(grid, ranks):
    problem = make_problem([7, 0, 12, 3], num_experts=10, num_choices=3, seed=1, skew="zipf")
    slots = ExpertSlots.contiguous(10, 4)
    flat = ranks(4).run(dispatch_and_combine, problem, slots)
    hierarchical = ranks(4).run(dispatch_and_combine, problem, slots, grid)
    for one, other in zip(flat, hierarchical, strict=True):
        for field in ("y_TD", "x_grad", "weights_grad"):
            assert torch.equal(getattr(one, field), getattr(other, field))
        assert all(map(torch.equal, one.parameter_grads, other.parameter_grads))


@pytest.mark.parametrize(
    ("wire", "there", "back"),
    [("exact", 8 * 6, 8 * 6), ("bf16", 2 * 6, 2 * 6), ("fp8", 6 + 4, 2 * 6)],
)
def test_bytes_on_the_wire_are_those_of_the_closed_form(wire, there, back, ranks):
    """Own rows for other ranks there and other ranks' rows back, and gradients the other way."""
    problem = make_problem([9, 0, 5, 14], num_experts=6, num_choices=3, seed=6, skew="zipf")
    slots = ExpertSlots.contiguous(6, 4)
    owner_of = torch.tensor([0, 0, 1, 1, 2, 2, -1])
    owners = [owner_of[problem.of_rank(problem.ids_TK, rank)] for rank in range(4)]
    for rank, found in enumerate(ranks(4).run(bytes_on_the_wire, problem, slots, wire)):
        sent = int(((owners[rank] != rank) & (owners[rank] >= 0)).sum())
        received = sum(int((owners[p] == rank).sum()) for p in range(4) if p != rank)
        forward = sent * there + received * back
        # Gradients of results travel there, gradients of rows back, both as results do.
        assert found == [forward, forward + (sent + received) * back]


@pytest.mark.parametrize("lift", [0.0, 50.0])
def test_experts_without_weights_send_nothing(lift, ranks):
    """MoE++: a choice of a zero-computation expert stays on its rank; with `lift` all are such."""
    torch.manual_seed(2)
    weight, parts = torch.randn(8, 6).double(), torch.randn(2, 9, 6).double().abs()
    weight[4:] += lift
    expected = moepp_layer(weight)(parts.flatten(0, 1))
    found = ranks(2).run(moepp_layer_bytes, weight, parts)
    torch.testing.assert_close(torch.cat([out for *_, out in found]), expected.detach())
    row = 6 * 8
    ids = [of_rank for _, _, of_rank, _ in found]
    sent = [int(((i < 4) & (i // 2 != rank)).sum()) for rank, i in enumerate(ids)]
    assert (sum(sent) == 0) == bool(lift)
    assert sum(sent) < 2 * 9 * 2
    for rank, (forward, both, _, _) in enumerate(found):
        # own rows there, the other rank's results back; gradients the other way
        assert forward == (sent[rank] + sent[1 - rank]) * row
        assert both == 2 * forward


def test_bits_do_not_depend_on_the_placement(ranks):
    """Results are summed on the token's rank in the order of its choices."""
    problem = make_problem([1, 1], num_experts=6, num_choices=4, seed=5, dropped=0.0)
    placements = [[[0, 1, 2], [3, 4, 5]], [[5, 0, 3], [4, 2, 1]], [[0, 1, 2, 3, 4, 5], []]]
    results = [
        ranks(2).run(dispatch_and_combine, problem, ExpertSlots.from_ranks(placement, 6))
        for placement in placements
    ]
    for answers in results[1:]:
        for answer, first in zip(answers, results[0], strict=True):
            assert torch.equal(answer.y_TD, first.y_TD)


def test_rows_lie_in_slot_order():
    ids = torch.tensor([[2, 0], [0, 3], [2, 1]])
    x = torch.arange(3.0)[:, None].expand(3, 4)
    dispatched = dispatch(x, Routing(ids, torch.ones(3, 2), 3))
    assert dispatched.rows_RD[:, 0].tolist() == [0, 1, 2, 0, 2]
    assert dispatched.counts_S.tolist() == [2, 1, 2]


def test_bad_input():
    routing = Routing(torch.zeros((3, 1), dtype=torch.int64), torch.ones(3, 1), 2)
    for num_tokens, slots, message in (
        (2, ExpertSlots.contiguous(2, 1), r"x must be \[3, D\]"),
        (3, ExpertSlots.contiguous(2, 2), "placed on 2 ranks, the group has 1"),
        (3, ExpertSlots.contiguous(5, 1), "belongs to another model"),
    ):
        with pytest.raises(ValueError, match=message):
            dispatch(torch.ones(num_tokens, 4), routing, slots=slots)
    dispatched = dispatch(torch.ones(3, 4), routing)
    with pytest.raises(ValueError, match="expected 3 rows of results"):
        combine(dispatched.rows_RD[:-1], dispatched)
