"""`ParallelLayout`: one set of ranks, factorised in two ways (MoE Parallel Folding, Megatron-Core).

Attention and experts use the same ranks with different degrees; only pipeline stages coincide.
`LayoutGroups` has the layout's process groups and meshes, and reduces gradients over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_runtime.parallel.communication.transport import FlatTransport, HierarchicalTransport
from moe_runtime.parallel.communication.watch import (
    DEFAULT_TIMEOUT_S,
    CollectiveMonitor,
    backend_limit,
    device_of,
)
from moe_runtime.parallel.slots import ExpertSlots

Side = Literal["dense", "expert"]
DENSE_DIMENSIONS = ("tp", "cp", "dp", "pp")
EXPERT_DIMENSIONS = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism of attention (dense) and experts over the same ranks.

    Neighbouring ranks differ in the first dimension: tensor parallelism, then context or expert
    parallelism, then data parallelism, then pipeline stages.

    Attributes:
        tp: tensor parallelism of attention; its ranks split the tokens between them (sequence
            parallelism) outside of matrix products.
        cp: context parallelism: parts of one sequence.
        pp: pipeline stages, common to both sides.
        etp: slices of the hidden dimension of an expert.
        ep: parts into which the experts of a layer are divided.
        dp: data parallelism of attention; the remaining factor of the ranks by default.
        edp: copies of each expert; the remaining factor by default.

    Raises:
        ValueError: A product does not match the number of ranks; says which one.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1
    dp: int = 0
    edp: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "etp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._fill("dp", ("tp", "cp", "pp"))
        self._fill("edp", ("etp", "ep", "pp"))

    def _fill(self, name: str, others: tuple[str, ...]) -> None:
        given = prod(getattr(self, other) for other in others)
        text = " * ".join(others)
        numbers = " * ".join(str(getattr(self, other)) for other in others)
        if getattr(self, name) == 0:
            if self.world_size % given:
                raise ValueError(
                    f"{text} = {numbers} = {given} does not divide the {self.world_size} ranks"
                )
            object.__setattr__(self, name, self.world_size // given)
        product = given * getattr(self, name)
        if product != self.world_size:
            raise ValueError(
                f"{text} * {name} = {numbers} * {getattr(self, name)} = {product}, but there are "
                f"{self.world_size} ranks; leave {name} out to have it filled in"
            )

    @property
    def loss_parts(self) -> int:
        """Micro-batch parts over which the loss is averaged: `dp * cp`."""
        return self.dp * self.cp

    def degrees(self, side: Side) -> dict[str, int]:
        """Degree of each dimension of a side, the fastest varying first."""
        names = DENSE_DIMENSIONS if side == "dense" else EXPERT_DIMENSIONS
        return {name: getattr(self, name) for name in names}

    def coordinates(self, rank: int, side: Side) -> dict[str, int]:
        """Place of a rank in each dimension of a side."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        places = {}
        for name, degree in self.degrees(side).items():
            places[name] = rank % degree
            rank //= degree
        return places

    def groups(self, side: Side, *dimensions: str) -> list[list[int]]:
        """The groups of ranks that differ only in the given dimensions of a side, ascending."""
        known = self.degrees(side)
        for name in dimensions:
            if name not in known:
                raise ValueError(
                    f"the {side} side has the dimensions {', '.join(known)}, got {name!r}"
                )
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = self.coordinates(rank, side)
            key = tuple(place for name, place in places.items() if name not in dimensions)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        sides = (self.degrees("dense"), self.degrees("expert"))
        return " | ".join(" ".join(f"{n}{d}" for n, d in side.items()) for side in sides)


# Name of the dimension of a mesh that FSDP2 shards over.
FSDP = "fsdp"


class LayoutGroups:
    """The groups of this rank under a layout. Made by all ranks together."""

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reuse: LayoutGroups | None = None,
    ) -> None:
        """Makes the groups of this rank; a collective call of all ranks.

        Args:
            timeout_s: Seconds after which a collective counts as failed.
            reuse: Groups of another layout of the same ranks; both share common groups.

        Raises:
            ValueError: The layout is of another number of ranks.
        """
        if dist.get_world_size() != layout.world_size:
            raise ValueError(
                f"the layout is of {layout.world_size} ranks, but {dist.get_world_size()} run"
            )
        self.layout = layout
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._watches: dict[tuple[int, ...], CollectiveMonitor] = {}
        self.ranks_per_node = 1
        if reuse is not None:
            self._by_ranks.update(reuse._by_ranks)
        # Groups of one rank need no process group; equal sets of ranks share one. All ranks make
        # all groups in the same order, as torch demands.
        for side, dimensions in _GROUPS:
            self.make(side, *dimensions)

    def make(self, side: Side, *dimensions: str) -> dist.ProcessGroup | None:
        """Makes the groups along some dimensions, unless they are there; a collective call."""
        for ranks in self.layout.groups(side, *dimensions):
            self._make(tuple(ranks))
        return self.group(side, *dimensions)

    def make_ends(self) -> None:
        """Makes the groups of the first and the last stage of each pipeline; a collective call."""
        for stages in self.layout.groups("dense", "pp"):
            self._make((stages[0], stages[-1])[: len(stages)])

    def has_machines(self, ranks_per_node: int) -> bool:
        """Whether rows are exchanged between several whole machines of several ranks each."""
        size = len(self.ranks("expert", "etp", "ep"))
        return ranks_per_node > 1 and size % ranks_per_node == 0 and size > ranks_per_node

    def make_nodes(self, ranks_per_node: int) -> None:
        """Lets rows travel within machines of so many consecutive ranks first; a collective call.

        Raises:
            ValueError: the ranks that exchange rows are not those of several whole machines.
        """
        size = len(self.ranks("expert", "etp", "ep"))
        if not self.has_machines(ranks_per_node):
            raise ValueError(
                f"rows travel in two steps between several machines of at least two processes; the "
                f"{size} that divide the experts are not several machines of {ranks_per_node}"
            )
        self.ranks_per_node = ranks_per_node
        for ranks in self.layout.groups("expert", "etp", "ep"):
            for some in self._grid(ranks):
                self._make(some)

    def _grid(self, ranks: list[int]) -> list[tuple[int, ...]]:
        """The ranks of each machine, then those of each number within their machine."""
        nodes = [
            tuple(ranks[first : first + self.ranks_per_node])
            for first in range(0, len(ranks), self.ranks_per_node)
        ]
        return [*nodes, *zip(*nodes, strict=True)]

    @property
    def ends(self) -> dist.ProcessGroup | None:
        """The first and last stage of this rank's pipeline, after `make_ends`; None if it is
        neither."""
        stages = self.ranks("dense", "pp")
        is_end = len(stages) > 1 and self.rank in (stages[0], stages[-1])
        return self._by_ranks[stages[0], stages[-1]] if is_end else None

    def _make(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._by_ranks or len(ranks) == 1:
            return
        group = dist.new_group(list(ranks), timeout=backend_limit(self.timeout_s))
        # Entered also where this rank is not a member: all ranks must know the same groups.
        self._by_ranks[ranks] = None
        if self.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            self._by_ranks[ranks] = group

    def ranks(self, side: Side, *dimensions: str) -> list[int]:
        """The ranks of this rank's group along some dimensions of a side."""
        return next(g for g in self.layout.groups(side, *dimensions) if self.rank in g)

    def group(self, side: Side, *dimensions: str) -> dist.ProcessGroup | None:
        """This rank's process group along some dimensions; None where it is alone."""
        ranks = tuple(self.ranks(side, *dimensions))
        return None if len(ranks) == 1 else self._by_ranks[ranks]

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The ranks that exchange tokens; None where one rank has all experts.

        The rank in the group is `part of the experts * etp + slice`.
        """
        return self.group("expert", "etp", "ep")

    @property
    def experts_transport(self) -> FlatTransport | HierarchicalTransport | None:
        """How tokens are exchanged between the ranks of `experts`; None where one has them all."""
        group = self.experts
        if group is None:
            return None
        if self.ranks_per_node == 1:
            return FlatTransport(group, timeout_s=self.timeout_s)
        grid = self._grid(self.ranks("expert", "etp", "ep"))
        inside, across = (self._by_ranks[ranks] for ranks in grid if self.rank in ranks)
        assert inside is not None, "make_nodes has made the groups of this rank"
        assert across is not None, "make_nodes has made the groups of this rank"
        return HierarchicalTransport(inside, across, timeout_s=self.timeout_s)

    def mesh(self, side: Side, device_type: str = "cpu") -> DeviceMesh:
        """A side as a mesh, slowest dimension first: `(pp, dp, cp, tp)` or `(pp, edp, ep, etp)`. A
        collective call."""
        names = DENSE_DIMENSIONS if side == "dense" else EXPERT_DIMENSIONS
        shape = [self.layout.degrees(side)[name] for name in reversed(names)]
        return DeviceMesh(
            device_type,
            torch.arange(self.layout.world_size).view(shape),
            mesh_dim_names=tuple(reversed(names)),
        )

    def reduce_dense_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums over tensor, context and data parallelism, and averages over the loss's parts.

        For parameters that every rank of a pipeline stage has a copy of. `DTensor`s of a mesh with
        a dimension `tp` have their own part on every rank, which saw the tokens of all `tp` ranks.
        FSDP2 has averaged what it shards (a mesh with a dimension of another name).

        A parameter that has no gradient on any rank keeps none, so that optimizers leave it alone.
        """
        whole, divided, sharded = [], [], []
        for parameter in parameters:
            names = _mesh_names(parameter)
            if not names:
                whole.append(parameter)
            elif names == {"tp"}:
                divided.append(parameter)
            elif "tp" not in names:
                sharded.append(parameter)
        if whole:
            group = self.group("dense", "tp", "cp", "dp")
            self._reduce(whole, group, self.layout.loss_parts, fills=False)
        if divided:
            group = self.group("dense", "cp", "dp")
            self._reduce(divided, group, self.layout.loss_parts, fills=False)
        if sharded and self.layout.tp > 1:
            self._reduce(sharded, self.group("dense", "tp"), 1)

    def sum_end_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums gradients that first and last stage share (a tied embedding).

        Call `reduce_dense_gradients` first.
        """
        self._reduce(parameters, self.ends, 1)

    def reduce_expert_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums over the `edp` copies of an expert, and averages over the `dp * cp` parts of the
        loss.

        An expert has seen the tokens of all ranks that send to it; dividing by `edp` would be
        wrong.
        """
        self._reduce(parameters, self.group("expert", "edp"), self.layout.loss_parts)

    def _reduce(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None,
        num_parts: int,
        *,
        fills: bool = True,
    ) -> None:
        """Sums gradients; with ``fills``, those that no rank has become zeros."""
        gradients: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        numbers: dict[torch.dtype, list[float]] = {}  # of ranks with each gradient
        for parameter in parameters:
            numbers.setdefault(parameter.dtype, []).append(float(parameter.grad is not None))
            if parameter.grad is None:
                # A rank without tokens still has to take part.
                parameter.grad = torch.zeros_like(parameter)
            gradient = _local(parameter.grad)
            gradient /= num_parts
            gradients.setdefault(parameter.dtype, []).append((parameter, gradient))
        for dtype, alike in gradients.items():
            # One exchange for all of them: most are small.
            counts = alike[0][1].new_tensor(numbers[dtype])
            flat = torch.cat([*(gradient.reshape(-1) for _, gradient in alike), counts])
            self.all_reduce(flat, group, "gradients")
            sizes = [*(gradient.numel() for _, gradient in alike), len(alike)]
            *sums, counts = flat.split(sizes)
            for (parameter, gradient), part, count in zip(
                alike, sums, counts.tolist(), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
                if not (fills or count):
                    parameter.grad = None

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup | None, what: str) -> None:
        """Sums a tensor over one of this rank's groups, in place; nothing where it is alone."""
        if group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._watches:
            self._watches[ranks] = CollectiveMonitor(group, self.timeout_s)
        there = values.to(device_of(group, values.device))
        self._watches[ranks].all_reduce(there, what)
        if there is not values:
            values.copy_(there)

    def gradient_norm(
        self,
        dense: Iterable[Tensor],
        experts: Iterable[Tensor],
        replicated: Iterable[tuple[Tensor, ExpertSlots]] = (),
    ) -> float:
        """The 2-norm of the gradient of the whole model, every parameter counted once; equal on all
        ranks.

        To be called after the gradients were reduced.

        Args:
            dense: Parameters that all ranks of a pipeline stage have copies of.
            experts: This rank's expert parameters.
            replicated: More of them, `[S, ...]`, of experts that may have several copies, and where
                they lie. The gradients of the copies must have been summed.
        """
        dense = list(dense)
        total = _square(parameter for parameter in dense if not isinstance(parameter, DTensor))
        for names, dimensions in _SHARDED:
            alike = [parameter for parameter in dense if _mesh_names(parameter) == names]
            if alike:
                # Every rank has its part of each.
                square = _square(alike)
                self.all_reduce(square, self.group("dense", *dimensions), "norms")
                total += square
        square_experts = _square(experts)
        rank = 0 if self.experts is None else dist.get_rank(self.experts)
        for parameter, slots in replicated:
            if parameter.grad is not None:
                gradient = parameter.grad.detach().to(torch.float64)
                square_S = gradient.square().flatten(1).sum(dim=1)
                square_experts += square_S.cpu() @ slots.shares_of(rank)
        self.all_reduce(square_experts, self.experts, "norms")
        total += square_experts
        self.all_reduce(total, self.group("dense", "pp"), "norms")
        return float(total.sqrt())


_GROUPS: tuple[tuple[Side, tuple[str, ...]], ...] = (
    ("dense", ("pp",)),
    ("dense", ("tp", "cp", "dp")),
    ("expert", ("etp", "ep")),
    ("expert", ("etp",)),
    ("expert", ("edp",)),
)


# The ranks that have the parts of parameters, by the dimensions of the parameters' meshes.
_SHARDED: tuple[tuple[set[str], tuple[str, ...]], ...] = (
    ({"tp"}, ("tp",)),
    ({FSDP}, ("cp", "dp")),
    ({FSDP, "tp"}, ("tp", "cp", "dp")),
)


def _mesh_names(parameter: Tensor) -> set[str]:
    """Dimensions of the mesh that a parameter is divided over; none for a whole one."""
    if not isinstance(parameter, DTensor):
        return set()
    return set(parameter.device_mesh.mesh_dim_names or (FSDP,))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _square(parameters: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            local = _local(parameter.grad.detach())
            total += local.to(torch.float64).square().sum().cpu()
    return total
