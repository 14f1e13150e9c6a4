"""Gates and losses whose tokens are spread over processes."""

import torch
from parallel_checks import (
    global_balance_gradients,
    gshard_gate,
    reduced_gradients,
    route_own_group,
)

from moe_runtime.routing import make_gate


def test_global_balance_of_all_ranks_is_load_balance_of_one_process(ranks):
    torch.manual_seed(0)
    weight, parts = torch.randn(5, 6).double(), torch.randn(2, 9, 6).double()
    found = ranks(2).run(global_balance_gradients, weight, parts)
    gate = make_gate("softmax_topk", 6, 5, 2, dtype=torch.float64)
    gate.load_state_dict({"weight": weight})
    loss = gate(parts.flatten(0, 1)).losses["load_balance"]
    loss.backward()
    torch.testing.assert_close(sum(value for value, _ in found) / 2, loss.detach())
    torch.testing.assert_close(sum(gradient for _, gradient in found) / 2, gate.weight.grad)


def test_a_parameter_without_gradient_on_any_rank_keeps_none(ranks):
    """AdamW of one process would leave it alone; with zeros, moments and decay move it."""
    assert ranks(2).run(reduced_gradients) == [[[3.5, 3.5], [1.5, 1.5], None]] * 2


def test_groups_on_processes_are_groups_of_one_process(ranks):
    """GShard: every group is routed on its own, so where it is routed says nothing."""
    torch.manual_seed(0)
    weight, groups = torch.randn(5, 6).double(), torch.randn(2, 11, 6).double()
    found = ranks(2).run(route_own_group, weight, groups)
    gate = gshard_gate(weight, num_groups=2)
    routing = gate(groups.flatten(0, 1))
    loss = routing.losses["first_choice_balance"]
    loss.backward()
    assert torch.equal(torch.cat([ids for ids, *_ in found]), routing.ids_TK)
    assert not routing.is_dispatched_TK.all(), "some choices are dropped"
    torch.testing.assert_close(torch.cat([w for _, w, *_ in found]), routing.weights_TK.detach())
    torch.testing.assert_close(sum(value for _, _, value, _ in found) / 2, loss.detach())
    torch.testing.assert_close(found[0][3] / 2, gate.weight.grad)
