"""What ranks do in the tests of replicas, moves, sparse copies and switched parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from parallel_checks import gradients, make_group
from parallel_layer import Answer, Problem, rank_parameters, rank_routing, run_experts

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.layer import MoELayer
from moe_runtime.parallel import (
    AdaptiveParallelism,
    ExpertSlots,
    FlatTransport,
    Overlap,
    ParallelExperts,
    SlotExchange,
    SparseMaterialisation,
    StackedPanels,
    expert_parallel,
    keep_in_place,
    slice_experts,
    sparse_expert_parallel,
    sum_replica_gradients,
    time_exchanges,
)
from moe_runtime.parallel.sparse import loads_of_all
from moe_runtime.parallel.wire import WireName


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def overlapped(
    problem: Problem,
    slots: ExpertSlots,
    overlap: Overlap,
    wire: WireName = "exact",
    grid: tuple[int, int] | None = None,
) -> Answer:
    """One layer with overlap; parameters as the slots say."""
    rank = dist.get_rank()
    x_TD, routing = rank_routing(problem, rank)
    parameters = rank_parameters(problem, slots, rank)
    gate_up, down, gate_up_bias, down_bias = parameters
    stacked = StackedExperts(
        gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias
    )
    panels = StackedPanels(stacked, "silu")
    y_TD = expert_parallel(
        x_TD,
        routing,
        panels
        if overlap.panels > 1
        else lambda rows_RD, counts_S: run_experts(rows_RD, counts_S, parameters),
        make_group(grid),
        slots=slots,
        overlap=overlap,
        wire=wire,
    )
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    return gradients(y_TD, x_TD, routing.weights_TK, parameters)


def summed_gradients(problem: Problem, slots: ExpertSlots) -> list[list[torch.Tensor]]:
    """Gradients of every slot of all ranks after copies have been summed."""
    rank = dist.get_rank()
    x_TD, routing = rank_routing(problem, rank)
    parameters = rank_parameters(problem, slots, rank)
    y_TD = expert_parallel(
        x_TD,
        routing,
        lambda rows_RD, counts_S: run_experts(rows_RD, counts_S, parameters),
        world(),
        slots=slots,
    )
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    sum_replica_gradients(parameters, slots, world())
    return [parameter.grad for parameter in parameters]  # pyright: ignore[reportReturnType]


def with_copies(
    problem: Problem,
    owners: ExpertSlots,
    copies: list[list[int]],
    rematerialise: bool,
    overlap: Overlap,
    extra: list[list[int]] | None = None,
) -> Answer:
    """One layer of FSSDP, with more copies after the gate: gradients arrive at the owners."""
    rank = dist.get_rank()
    x_TD, routing = rank_routing(problem, rank)
    parameters = rank_parameters(problem, owners, rank)
    plan = SparseMaterialisation(owners, copies, world())
    pending = None
    if extra is not None:
        pending = plan.start(parameters)
        assert loads_of_all(routing, plan.transport) == [
            int((problem.ids_TK == expert).sum()) for expert in range(problem.num_experts)
        ]
        plan = plan.extend(extra, pending)
    copied: list[weakref.ref[torch.Tensor]] = []

    def experts(
        rows_RD: torch.Tensor, counts_X: torch.Tensor, read: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        copied.append(weakref.ref(read[0]))
        return run_experts(rows_RD, counts_X, list(read))

    y_TD = sparse_expert_parallel(
        x_TD,
        routing,
        experts,
        parameters,
        plan,
        copies=pending,
        rematerialise=rematerialise,
        overlap=overlap,
    )
    del pending
    if rematerialise:
        # Nothing keeps the copies between the passes.
        assert all(tensor() is None for tensor in copied)
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    return gradients(y_TD, x_TD, routing.weights_TK, parameters)


def adjoint_gap(wanted: list[list[tuple[int, int]]], num_slots: int) -> tuple[float, int]:
    """`<gather(x), y> - <x, scatter(y)>` over all ranks, and what this rank sent."""
    exchange = SlotExchange(wanted, num_slots, FlatTransport(world()))
    x = torch.randn(num_slots, 3, 2, dtype=torch.float64, requires_grad=True)
    out = exchange.copy(x)
    y = torch.randn_like(out)
    out.backward(y)
    assert x.grad is not None
    gap = (out.detach() * y).sum() - (x.detach() * x.grad).sum()
    dist.all_reduce(gap)
    return float(gap), len(exchange.sent_slots)


def own_slices(problem: Problem) -> tuple[AdaptiveParallelism, StackedExperts, list[torch.Tensor]]:
    """The switch, this rank's slices of experts, and they as parameters."""
    rank = dist.get_rank()
    switch = AdaptiveParallelism(problem.num_experts, world())
    slots = ExpertSlots.contiguous(
        problem.num_experts, dist.get_world_size(), num_slices=switch.num_shares
    )
    own = [problem.parameters[i][slots.experts_of(rank)] for i in range(4)]
    whole = StackedExperts(gate_up=own[0], down=own[1], gate_up_bias=own[2], down_bias=own[3])
    part = slice_experts(whole, rank % switch.num_shares, switch.num_shares)
    return switch, part, [t.requires_grad_() for t in part.tensors() if t is not None]


def adaptive(problem: Problem, degrees: list[int]) -> list[Answer]:
    """The layer with each degree of parallelism, without moving a parameter."""
    rank = dist.get_rank()
    switch, part, parameters = own_slices(problem)
    answers = []
    where = [parameter.data_ptr() for parameter in parameters]
    for degree in degrees:
        x_TD, routing = rank_routing(problem, rank)
        for parameter in parameters:
            parameter.grad = None
        y_TD = switch.run(x_TD, routing, part, degree, activation="silu", impl="reference")
        y_TD.backward(problem.of_rank(problem.grad_TD, rank))
        answers.append(gradients(y_TD, x_TD, routing.weights_TK, parameters))
    assert where == [parameter.data_ptr() for parameter in parameters]
    return answers


def train_switching(problem: Problem, degrees: list[int]) -> tuple[list[float], bool]:
    """Losses of steps of AdamW, each with its degree, and whether no parameter moved."""
    rank = dist.get_rank()
    switch, part, parameters = own_slices(problem)
    where = [parameter.data_ptr() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    losses = []
    for degree in degrees:
        optimizer.zero_grad()
        x_TD, routing = rank_routing(problem, rank)
        y_TD = switch.run(x_TD, routing, part, degree, activation="silu", impl="reference")
        loss = (y_TD - problem.of_rank(problem.grad_TD, rank)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, where == [parameter.data_ptr() for parameter in parameters]


def timings() -> list[tuple[int, float]]:
    return time_exchanges(FlatTransport(world()), sizes=(1 << 10, 1 << 20), repeats=3)


def train_and_move(placements: list[list[list[int]]], moves_at: int) -> list[torch.Tensor]:
    """Losses of a layer whose experts move (with replicas) every few steps of AdamW."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = ParallelExperts(6, 8, 16, world(), dtype=torch.float64, impl="reference", bias=True)
    layer = MoELayer(8, 16, 6, 2, experts=experts, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    data = torch.randn(size, 5, 8, dtype=torch.float64)
    losses = []
    for step in range(9):
        if moves_at and step and step % moves_at == 0:
            new = placements[(step // moves_at - 1) % len(placements)]
            experts.move(keep_in_place(new, experts.slots), optimizer)
        optimizer.zero_grad()
        loss = (layer(data[rank]) - data[rank].flip(0)).square().sum()
        loss.backward()
        experts.sum_replica_gradients()
        for parameter in layer.gate.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
    return losses
