"""What ranks do in the tests of replicas, moves, sparse copies and switched parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import gradients, make_group
from parallel_layer import Answer, Problem, rank_parameters, rank_routing, run_experts, stack_of

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.layer import MoELayer
from moe_runtime.parallel import (
    ExpertMove,
    ExpertSlots,
    FlatTransport,
    LayoutGroups,
    Overlap,
    ParallelExperts,
    ParallelLayout,
    Rebalanced,
    Rebalancer,
    StackedPanels,
    Transport,
    expert_parallel,
    keep_in_place,
    measure_link,
    slice_experts,
    time_exchanges,
)
from moe_runtime.parallel.cluster import Link
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.research.hecate import (
    CopyRules,
    SparseExperts,
    SparseMaterialisation,
    loads_of_all,
    reshard_layers,
    sparse_expert_parallel,
)
from moe_runtime.research.parallelism_switching import AdaptiveParallelism, SwitchingExperts


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
    y_TD = expert_parallel(
        x_TD,
        routing,
        StackedPanels(stack_of(parameters), "silu")
        if overlap.panels > 1
        else partial(run_experts, parameters=parameters),
        make_group(grid),
        slots=slots,
        overlap=overlap,
        wire=wire,
    )
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    return gradients(y_TD, x_TD, routing.weights_TK, parameters)


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


def own_slices(problem: Problem) -> tuple[AdaptiveParallelism, StackedExperts, list[torch.Tensor]]:
    """The switch, this rank's slices of experts, and they as parameters."""
    rank = dist.get_rank()
    switch = AdaptiveParallelism(problem.num_experts, world())
    slots = ExpertSlots.contiguous(
        problem.num_experts, dist.get_world_size(), num_slices=switch.num_shares
    )
    whole = stack_of([tensor[slots.experts_of(rank)] for tensor in problem.parameters])
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


def moved(
    transport: Transport, old: ExpertSlots, new: ExpertSlots
) -> tuple[torch.Tensor, int, int]:
    """A tensor whose slots hold their expert's number, moved; transfers; slots that were sent."""
    rank = transport.rank
    experts = torch.tensor(old.experts_of(rank), dtype=torch.float64)
    move = ExpertMove(old, new, transport)
    sent = len(move._exchange.sent_slots)
    return move.apply(experts[:, None].expand(-1, 3).contiguous()), move.num_transfers, sent


class _Clock:
    """Told what each exchange takes, in the order in which they come: no machine is as regular."""

    def __init__(self, seconds: list[float]) -> None:
        self._steps = [step for taken in seconds for step in (0.0, taken)]
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._steps.pop(0)
        return self._now


def timings() -> tuple[list[tuple[int, float]], Link]:
    """What a clock says of 1 KiB and 1 MiB, and the link of both ranks: the second is the slower
    one, one exchange of three comes late, and the first of each size does not count."""
    transport = FlatTransport(world())
    factor = 1 + dist.get_rank()
    seconds = [factor * s for s in (9.0, 1e-3, 5.0, 1e-3, 9.0, 5.0, 2e-3, 2e-3)]
    sizes = (1 << 10, 1 << 20)
    measured = time_exchanges(transport, sizes=sizes, repeats=3, clock=_Clock(seconds))
    return measured, measure_link(transport, sizes=sizes, repeats=3, clock=_Clock(seconds))


def train_switching_layer(
    num_experts: int, degree: int | None, link: Link | None
) -> tuple[list[torch.Tensor], list[int]]:
    """Losses for batches of many sizes with a degree, or the cheapest ones; and the degrees."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ParallelLayout(world_size=size, etp=size // num_experts, ep=num_experts)
    experts = SwitchingExperts(
        num_experts,
        8,
        16,
        LayoutGroups(layout),
        link=link,
        dtype=torch.float64,
        bias=True,
        impl="reference",
    )
    experts.degree = degree
    layer = MoELayer(8, 16, num_experts, 1, experts=experts, dtype=torch.float64, shared_experts=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    where = [parameter.data_ptr() for parameter in experts.parameters()]
    own = set(experts.parameters())
    losses, degrees = [], []
    for step, num_tokens in enumerate((1, 400, 30, 2, 150, 1)):
        random = torch.Generator().manual_seed(step)
        data = torch.randn(size, num_tokens, 8, dtype=torch.float64, generator=random)[rank]
        optimizer.zero_grad()
        loss = (layer(data) - data.flip(0)).square().mean()
        loss.backward()
        for parameter in (p for p in layer.parameters() if p not in own):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.detach())
        degrees.append(experts.last_degree)
    assert where == [parameter.data_ptr() for parameter in experts.parameters()]
    return losses, degrees


def train_sparsely(rules: CopyRules | None, reshard_every: int = 0) -> tuple[list[Any], int, int]:
    """Six steps of AdamW of two layers: every loss and all experts' parameters at the end."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"dtype": torch.float64, "impl": "reference", "bias": True}
    many = [
        ParallelExperts(6, 8, 16, world(), seed=seed, **options)
        if rules is None
        else SparseExperts(6, 8, 16, world(), rules=rules, seed=seed, **options)
        for seed in (1, 2)
    ]
    layers = [
        MoELayer(8, 16, 6, 2, experts=experts, dtype=torch.float64, shared_experts=1)
        for experts in many
    ]
    attention = torch.nn.Linear(8, 8, dtype=torch.float64)
    if isinstance(many[1], SparseExperts):
        many[1].prepare_before(attention)
    model = torch.nn.Sequential(layers[0], attention, layers[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = {parameter for experts in many for parameter in experts.parameters()}
    dense = [parameter for parameter in model.parameters() if parameter not in own]
    losses, num_sent, num_moved = [], 0, 0
    for step in range(6):
        random = torch.Generator().manual_seed(step // 3)
        # The second rank has none in every third step, and the hot experts drift.
        data = torch.randn(size, 7, 8, dtype=torch.float64, generator=random)[rank]
        data = data[: 0 if rank == 1 and step % 3 == 0 else 7]
        optimizer.zero_grad()
        loss = (model(data) - data.flip(0)).square().sum()
        loss.backward()
        for parameter in dense:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
        sparse = [experts for experts in many if isinstance(experts, SparseExperts)]
        num_sent += sum(experts.num_copied for experts in sparse)
        if reshard_every and step % reshard_every == reshard_every - 1:
            num_moved += reshard_layers(sparse, optimizer)
            assert {p for group in optimizer.param_groups for p in group["params"]} == {
                *model.parameters()
            }
    names = [{name: t.clone() for name, t in m.logical_state().items()} for m in many]
    return [losses, *names], num_sent, num_moved


def train_and_move(
    placements: list[list[list[int]]], moves_at: int, rebalance_every: int = 0
) -> tuple[list[torch.Tensor], list[Rebalanced]]:
    """Losses and gradient norms of a layer whose experts move (with replicas) while it trains."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = ParallelExperts(6, 8, 16, world(), dtype=torch.float64, impl="reference", bias=True)
    layer = MoELayer(8, 16, 6, 2, experts=experts, dtype=torch.float64)
    groups = LayoutGroups(ParallelLayout(world_size=size, ep=size))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    data = torch.randn(size, 5, 8, dtype=torch.float64)
    every = rebalance_every or 1
    rebalancer = Rebalancer(experts, every=every, num_replicas=2, least_gain=0.01)
    losses, looks = [], []
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
        placed = [(parameter, experts.slots) for parameter in experts.parameters()]
        norm = groups.gradient_norm(layer.gate.parameters(), [], placed)
        optimizer.step()
        if rebalance_every:
            looks.append(rebalancer.step(optimizer))
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses += [total, torch.tensor(norm, dtype=torch.float64)]
    rebalancer.close()
    return losses, [look for look in looks if look is not None]
