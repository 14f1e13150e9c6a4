"""What the ranks of a pool do in the tests of dispatch; imported by name in every process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from parallel_layer import Answer, Problem, rank_parameters, rank_routing, run_experts
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.benchmarks.cases.dispatch import CountingTransport
from moe_runtime.layer import MoELayer
from moe_runtime.parallel import (
    ExpertSlots,
    ExpertSpread,
    FlatTransport,
    HierarchicalTransport,
    LayoutGroups,
    Overlap,
    ParallelExperts,
    ParallelLayout,
    combine,
    dispatch,
)
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import Group
from moe_runtime.routing import Capacity, Gate, make_gate


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
    return HierarchicalTransport(inside, across, timeout_s=200)


def reduced_gradients() -> list[list[float] | None]:
    """Of parameters with gradients on all ranks, on the first alone, and on none."""
    groups = LayoutGroups(ParallelLayout(world_size=dist.get_world_size()))
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters[: 2 - groups.rank]:
        parameter.grad = torch.full((2,), 3.0 + groups.rank)
    groups.reduce_dense_gradients(parameters)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


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
    y_TD: torch.Tensor, x_TD: torch.Tensor, weights_TK: torch.Tensor, parameters: list[torch.Tensor]
) -> Answer:
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    # Experts that saw no row at all may be outside the graph.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return Answer(y_TD.detach(), x_TD.grad, weights_TK.grad, grads)


def bytes_on_the_wire(problem: Problem, slots: ExpertSlots, wire: WireName) -> list[int]:
    """Bytes that this rank sends in the forward pass, and in both passes."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    transport = CountingTransport(FlatTransport(group))
    x_TD, routing = rank_routing(problem, rank)
    parameters = rank_parameters(problem, slots, rank)
    dispatched = dispatch(x_TD, routing, transport, slots=slots, wire=wire)
    y_TD = combine(run_experts(dispatched.rows_RD, dispatched.counts_S, parameters), dispatched)
    forward = transport.row_bytes
    y_TD.backward(problem.of_rank(problem.grad_TD, rank))
    return [forward, transport.row_bytes]


def moepp_layer_bytes(
    weight: torch.Tensor, parts: torch.Tensor
) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A MoE++ layer over all ranks: bytes that leave this rank in the forward pass and in both."""
    group = dist.group.WORLD
    assert group is not None
    transport = CountingTransport(FlatTransport(group))
    layer = moepp_layer(weight)
    share = ParallelExperts(
        layer.gate.num_experts, layer.hidden_size, 8, transport, dtype=weight.dtype
    )
    share.take(layer.get_submodule("experts").stacked())
    layer.experts = share
    out_TD = layer(parts[dist.get_rank()].requires_grad_())
    forward = transport.row_bytes
    out_TD.sum().backward()
    assert layer.aux is not None
    return forward, transport.row_bytes, layer.aux.routing.ids_TK, out_TD.detach()


def moepp_layer(weight: torch.Tensor) -> MoELayer:
    """4 experts and the default zero-computation ones, with the same weights on every rank."""
    torch.manual_seed(0)
    layer = MoELayer(weight.shape[1], 8, 4, 2, gate="moepp", dtype=weight.dtype)
    with torch.no_grad():
        layer.gate.get_parameter("weight").copy_(weight)
    return layer


def layer_over_group(
    weight: torch.Tensor, parts: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input gradient of a layer whose experts are spread over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    layout = ParallelLayout(world_size=dist.get_world_size(), ep=dist.get_world_size())
    sliced = ParallelLayout(world_size=dist.get_world_size(), etp=dist.get_world_size())
    group = {
        "group": lambda: world,
        "layout": lambda: layout,
        "groups": lambda: LayoutGroups(layout),
        "slices": lambda: LayoutGroups(sliced),
        "options": lambda: ExpertSpread(groups=world, overlap=Overlap(degree=2, panels=3)),
    }[kind]()
    layer = grouped_layer(weight, group=group)
    x = parts[dist.get_rank()].requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def grouped_layer(weight: torch.Tensor, **where: Any) -> MoELayer:
    """4 experts with biases, 2 for a token, a shared one, and the given gate."""
    torch.manual_seed(9)
    layer = MoELayer(
        weight.shape[1],
        6,
        len(weight),
        2,
        activation="geglu",
        bias=True,
        shared_experts=1,
        dtype=weight.dtype,
        **where,
    )
    with torch.no_grad():
        layer.gate.get_parameter("weight").copy_(weight)
    return layer


def gate_in_ddp(
    gate: str, options: dict[str, Any], parts: torch.Tensor, is_compiled: bool = False
) -> dict[str, Any]:
    """A step of a layer in `DistributedDataParallel` without `no_sync`, one part after another."""
    layer = trained_layer(gate, options, parts.shape[-1])
    compiled: Any = torch.compile(layer, backend="eager") if is_compiled else layer
    wrapper = DistributedDataParallel(compiled)
    for part in parts.chunk(dist.get_world_size())[dist.get_rank()]:
        loss_of(layer, wrapper(part)).backward()
    layer.after_step()
    copy.deepcopy(layer)
    return after_step(layer)


def trained_layer(gate: str, options: dict[str, Any], hidden_size: int) -> MoELayer:
    torch.manual_seed(0)
    top_k = 1 if gate == "rl_r" else 2
    losses = {"global_balance": 1.0}
    return MoELayer(hidden_size, 6, 4, top_k, gate=gate, gate_options=options, loss_weights=losses)


def loss_of(layer: MoELayer, out: torch.Tensor) -> torch.Tensor:
    assert layer.aux is not None
    return out.square().mean() + layer.aux.loss


def after_step(layer: MoELayer) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {**gradients, **dict(layer.named_buffers())}


def wrapped_spread_layer(wrapper: str, group: str) -> str:
    """What is said of a layer with experts over all processes in DDP, or sharded by FSDP2."""
    world = dist.group.WORLD
    assert world is not None
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(alone, dist.ProcessGroup)
    layer = MoELayer(8, 6, 4, 2, group=world if group == "world" else alone)
    wrapped: Any = DistributedDataParallel(layer) if wrapper == "ddp" else fully_shard(layer)
    try:
        for _ in range(2):
            wrapped(torch.randn(5, 8)).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def gshard_gate(weight: torch.Tensor, num_groups: int) -> Gate:
    """GShard's gate with little room for each expert, and nothing left to chance."""
    gate = make_gate(
        "gshard",
        weight.shape[1],
        len(weight),
        2,
        capacity=Capacity(0.8),
        num_groups=num_groups,
        random_second=False,
        dtype=weight.dtype,
    )
    gate.load_state_dict({"weight": weight})
    return gate


def route_own_group(
    weight: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts, weights and loss of this rank's group, and the gate's gradient over all ranks."""
    gate = gshard_gate(weight, num_groups=1)
    routing = gate(groups[dist.get_rank()])
    loss = routing.losses["first_choice_balance"]
    loss.backward()
    assert gate.weight is not None
    assert gate.weight.grad is not None
    dist.all_reduce(gate.weight.grad)
    return routing.ids_TK, routing.weights_TK.detach(), loss.detach(), gate.weight.grad


def global_balance_gradients(
    weight: torch.Tensor, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of this rank's part of a batch, and its gradient of the gate's weight."""
    gate = make_gate(
        "softmax_topk",
        weight.shape[1],
        len(weight),
        2,
        loss_weights={"global_balance": 1.0},
        dtype=weight.dtype,
    )
    gate.load_state_dict({"weight": weight})
    gate.batch_group = dist.group.WORLD
    loss = gate(parts[dist.get_rank()]).losses["global_balance"]
    loss.backward()
    assert gate.weight is not None
    assert gate.weight.grad is not None
    return loss.detach(), gate.weight.grad
