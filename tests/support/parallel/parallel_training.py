"""A small model trained under a layout, and the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from parallel_layer import assert_same, masked_experts, run_experts, stack_of
from torch import Tensor

from moe_runtime.parallel import (
    ExpertSlots,
    LayoutGroups,
    Overlap,
    ParallelLayout,
    expert_parallel,
    slice_experts,
)
from moe_runtime.routing import Routing

DIM, HIDDEN, NUM_EXPERTS, TOP_K = 4, 8, 5, 2
MOMENTUM, PART_TOKENS = 0.9, 6.0


def learning_rate(num_layers: int) -> float:
    """Small enough that no number of stages diverges, which would let rounding grow."""
    return 0.005 if num_layers <= 4 else 1e-6


@dataclass
class Layer:
    """Parameters of one stage; the experts' in the order of `StackedExperts.tensors`."""

    dense: Tensor
    router: Tensor
    experts: list[Tensor]

    @property
    def parameters(self) -> list[Tensor]:
        return [self.dense, self.router, *self.experts]


def make_layers(num_layers: int) -> list[Layer]:
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return [
        Layer(
            normal(DIM, DIM) / 2,
            normal(DIM, NUM_EXPERTS),
            [
                normal(NUM_EXPERTS, 2 * HIDDEN, DIM) / 2,
                normal(NUM_EXPERTS, DIM, HIDDEN) / 2,
                normal(NUM_EXPERTS, 2 * HIDDEN) / 2,
                normal(NUM_EXPERTS, DIM) / 2,
            ],
        )
        for _ in range(num_layers)
    ]


def make_tokens(world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of each rank's share, of uneven sizes; the second share is empty."""
    random = torch.Generator().manual_seed(3)
    sizes = [(3, 0, 5, 2)[share % 4] for share in range(world_size)]
    inputs = torch.randn(sum(sizes), DIM, generator=random, dtype=torch.float64)
    targets = torch.randn(sum(sizes), DIM, generator=random, dtype=torch.float64)
    return list(inputs.split(sizes)), list(targets.split(sizes))


def route(h_TD: Tensor, router: Tensor) -> Routing:
    top = (h_TD @ router).topk(TOP_K, dim=1)
    return Routing(top.indices, top.values.softmax(dim=1), NUM_EXPERTS)


def reference_layer(x_TD: Tensor, layer: Layer) -> Tensor:
    h_TD = x_TD @ layer.dense
    routing = route(h_TD, layer.router)
    return h_TD + masked_experts(h_TD, routing.ids_TK, routing.weights_TK, layer.experts)


def train_reference(
    num_layers: int, num_shares: int, loss_parts: int, num_steps: int
) -> tuple[list[Layer], list[float]]:
    """One process, autograd through everything; the parameters at the end and gradient norms."""
    layers = make_layers(num_layers)
    inputs, targets = make_tokens(num_shares)
    x_TD, target_TD = torch.cat(inputs), torch.cat(targets)
    parameters = [tensor.requires_grad_() for layer in layers for tensor in layer.parameters]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate(num_layers), momentum=MOMENTUM)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        y_TD = x_TD
        for layer in layers:
            y_TD = reference_layer(y_TD, layer)
        ((y_TD - target_TD).square().sum() / PART_TOKENS / loss_parts).backward()
        squares = [p.grad.square().sum() for p in parameters if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
    return layers, norms


class RankModel:
    """One rank's stage under a layout."""

    def __init__(self, groups: LayoutGroups, overlap: Overlap) -> None:
        layout = groups.layout
        self.groups, self.overlap = groups, overlap
        dense, expert = (layout.coordinates(groups.rank, side) for side in ("dense", "expert"))
        self.stage = dense["pp"]
        self.share = groups.rank % (layout.world_size // layout.pp)
        place = expert["ep"] * layout.etp + expert["etp"]
        self.slots = ExpertSlots.contiguous(
            NUM_EXPERTS, layout.etp * layout.ep, num_slices=layout.etp
        )
        self.held = [max(e, 0) for e in self.slots.experts_of(place)]
        self.slice = expert["etp"]
        full = make_layers(layout.pp)[self.stage]
        self.layer = Layer(full.dense, full.router, self.shard(full.experts))
        for tensor in self.layer.parameters:
            tensor.requires_grad_()

    def shard(self, tensors: list[Tensor]) -> list[Tensor]:
        experts = stack_of([tensor.detach()[self.held].clone() for tensor in tensors])
        sliced = slice_experts(experts, self.slice, self.groups.layout.etp).tensors()
        return [tensor for tensor in sliced if tensor is not None]

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = x_TD @ self.layer.dense
        tensors = list(self.layer.experts)
        if self.slice > 0:
            # The bias belongs to slice 0; here it is a constant of zeros.
            tensors[3] = tensors[3].detach()
        return expert_parallel(
            h_TD,
            route(h_TD, self.layer.router),
            partial(run_experts, parameters=tensors),
            self.groups.experts,
            slots=self.slots,
            overlap=self.overlap,
            shared=lambda rows_TD: rows_TD,
        )

    def step(self, optimizer: torch.optim.Optimizer, x_TD: Tensor, target_TD: Tensor) -> float:
        """One step; the gradient norm. The ranks of a stage pass activations down the pipeline."""
        optimizer.zero_grad()
        layout, rank = self.groups.layout, self.groups.rank
        stride = layout.world_size // layout.pp
        h_TD = x_TD.clone()
        if self.stage > 0:
            dist.recv(h_TD, rank - stride)
        h_TD.requires_grad_()
        y_TD = self.forward(h_TD)
        if self.stage < layout.pp - 1:
            dist.send(y_TD.detach(), rank + stride)
            grad_TD = torch.empty_like(y_TD)
            dist.recv(grad_TD, rank + stride)
            y_TD.backward(grad_TD)
        else:
            ((y_TD - target_TD).square().sum() / PART_TOKENS).backward()
        if self.stage > 0:
            assert h_TD.grad is not None
            dist.send(h_TD.grad, rank - stride)
        dense, experts = self.layer.parameters[:2], self.layer.experts
        self.groups.reduce_dense_gradients(dense)
        self.groups.reduce_expert_gradients(experts)
        norm = self.groups.gradient_norm(dense, experts)
        optimizer.step()
        return norm


def train_layouts(layouts: list[ParallelLayout], num_steps: int, overlap: Overlap) -> int:
    """Trains under every layout and compares with one process; runs on every rank of a pool."""
    groups: LayoutGroups | None = None
    references: dict[tuple[int, int, int], tuple[list[Layer], list[float]]] = {}
    for layout in layouts:
        groups = LayoutGroups(layout, timeout_s=200, reuse=groups)
        model = RankModel(groups, overlap)
        num_shares = layout.world_size // layout.pp
        inputs, targets = make_tokens(num_shares)
        rate = learning_rate(layout.pp)
        optimizer = torch.optim.SGD(model.layer.parameters, lr=rate, momentum=MOMENTUM)
        norms = [
            model.step(optimizer, inputs[model.share], targets[model.share])
            for _ in range(num_steps)
        ]
        key = (layout.pp, num_shares, layout.loss_parts)
        if key not in references:
            references[key] = train_reference(*key, num_steps)
        layers, expected_norms = references[key]
        expected = layers[model.stage]
        what = f"layout {layout}, rank {groups.rank}"
        assert_same(torch.tensor(norms), torch.tensor(expected_norms), f"norms, {what}")
        wanted = [expected.dense, expected.router, *model.shard(expected.experts)]
        is_held = torch.tensor(
            [e >= 0 for e in model.slots.experts_of(dist.get_rank(groups.experts))]
            if groups.experts is not None
            else [True] * len(model.held)
        )
        for index, (actual, goal) in enumerate(zip(model.layer.parameters, wanted, strict=True)):
            if index >= 2:
                actual, goal = actual[is_held], goal[is_held]
            assert_same(actual.detach(), goal.detach(), f"parameter {index}, {what}")
    return len(layouts)


def meshes(layout: ParallelLayout) -> list[tuple[str, ...] | list[int]]:
    """Names and own groups of both meshes of a layout."""
    groups = LayoutGroups(layout, timeout_s=200)
    found: list[tuple[str, ...] | list[int]] = []
    for side in ("dense", "expert"):
        mesh = groups.mesh(side)
        assert mesh.mesh_dim_names is not None
        found.append(mesh.mesh_dim_names)
        for name in mesh.mesh_dim_names:
            ranks = dist.get_process_group_ranks(mesh.get_group(name))
            assert ranks == groups.ranks(side, name)
            found.append(ranks)
    return found


def refused(layout: ParallelLayout) -> str:
    try:
        LayoutGroups(layout)
    except ValueError as error:
        return str(error)
    return ""
