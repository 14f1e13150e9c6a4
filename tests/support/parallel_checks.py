"""What the ranks of a pool do in the tests of dispatch; imported by name in every process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parallel_layer import Answer, Problem, rank_parameters, rank_routing, run_experts

from moe_runtime.parallel import ExpertSlots, HierarchicalTransport, combine, dispatch
from moe_runtime.parallel.dispatch import Group


def make_group(grid: tuple[int, int] | None) -> Group:
    """All ranks: flat, or as a grid of nodes and ranks of a node."""
    world = dist.group.WORLD
    assert world is not None
    if grid is None:
        return world
    num_nodes, num_inside = grid
    rank = dist.get_rank()
    rows = [[node * num_inside + i for i in range(num_inside)] for node in range(num_nodes)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    inside = [dist.new_group(row) for row in rows][rank // num_inside]
    across = [dist.new_group(column) for column in columns][rank % num_inside]
    assert isinstance(inside, dist.ProcessGroup)
    assert isinstance(across, dist.ProcessGroup)
    return HierarchicalTransport(inside, across, timeout_s=30)


def dispatch_and_combine(
    problem: Problem, slots: ExpertSlots, grid: tuple[int, int] | None = None
) -> Answer:
    """One layer, forward and backward, with `dispatch` and `combine`."""
    rank = dist.get_rank()
    x_TD, routing = rank_routing(problem, rank)
    parameters = rank_parameters(problem, slots, rank)
    dispatched = dispatch(x_TD, routing, make_group(grid), slots=slots)
    y_RD = run_experts(dispatched.rows_RD, dispatched.counts_S, parameters)
    y_TD = combine(y_RD, dispatched)
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    return gradients(y_TD, x_TD, routing.weights_TK, parameters)


def gradients(
    y_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    parameters: list[torch.Tensor],
) -> Answer:
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    # Experts that saw no row at all may be outside the graph.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return Answer(y_TD.detach(), x_TD.grad, weights_TK.grad, grads)
