"""Process groups and meshes of a `ParallelLayout`, and what gradients need of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.parallel.layout import DENSE_DIMENSIONS, EXPERT_DIMENSIONS, ParallelLayout, Side
from moe_runtime.parallel.watch import DEFAULT_TIMEOUT_S


class LayoutGroups:
    """The groups of this rank under a layout. Made by all ranks together.

    Attributes:
        layout: the layout.
        rank: this process's rank in the world.
        timeout_s: seconds after which a collective counts as failed.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reuse: LayoutGroups | None = None,
    ) -> None:
        """Makes the groups.

        Args:
            layout: The layout.
            timeout_s: Seconds after which a collective counts as failed.
            reuse: Groups of another layout of the same ranks; those that both have are shared.

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
        if reuse is not None:
            self._by_ranks.update(reuse._by_ranks)
        # Groups of one rank need no process group; equal sets of ranks share one. All ranks make
        # all groups in the same order, as torch demands.
        for side, dimensions in _GROUPS:
            for ranks in layout.groups(side, *dimensions):
                self._make(tuple(ranks))

    def _make(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._by_ranks or len(ranks) == 1:
            return
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        # Noted also where this rank is not a member: all ranks must know the same groups.
        self._by_ranks[ranks] = None
        if self.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            self._by_ranks[ranks] = group

    def ranks(self, side: Side, *dimensions: str) -> list[int]:
        """The ranks of this rank's group along some dimensions of a side."""
        return next(g for g in self.layout.groups(side, *dimensions) if self.rank in g)

    def group(self, side: Side, *dimensions: str) -> dist.ProcessGroup | None:
        """This rank's process group along some dimensions; None where it is alone."""
        return self._by_ranks.get(tuple(self.ranks(side, *dimensions)))

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The ranks that exchange tokens: all slices of all experts; None where one has them all.

        The rank in the group is `part of the experts * etp + slice`.
        """
        return self.group("expert", "etp", "ep")

    def mesh(self, side: Side, device_type: str = "cpu") -> DeviceMesh:
        """The ranks of a side as a mesh, slowest dimension first: `(pp, dp, cp, tp)` or
        `(pp, edp, ep, etp)`. A collective call; for libraries that take meshes."""
        names = DENSE_DIMENSIONS if side == "dense" else EXPERT_DIMENSIONS
        shape = [self.layout.degrees(side)[name] for name in reversed(names)]
        return DeviceMesh(
            device_type,
            torch.arange(self.layout.world_size).view(shape),
            mesh_dim_names=tuple(reversed(names)),
        )

    def reduce_dense_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums over tensor, context and data parallelism, and averages over the loss's parts.

        For parameters that every rank of a pipeline stage has a copy of, each used by the rank's
        own share of the tokens.
        """
        self._reduce(parameters, self.group("dense", "tp", "cp", "dp"))

    def reduce_expert_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums over the copies of an expert, and averages over the loss's parts.

        An expert has seen the tokens of all ranks that send to it, so the sum runs over its
        `edp` copies only; the mean is still over `dp * cp`, the parts of the loss. Dividing by
        `edp` instead is the classic mistake of expert parallelism.
        """
        self._reduce(parameters, self.group("expert", "edp"))

    def _reduce(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                # A rank without tokens still has to take part.
                parameter.grad = torch.zeros_like(parameter)
            if group is not None:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= self.layout.loss_parts

    def gradient_norm(self, dense: Iterable[Tensor], experts: Iterable[Tensor]) -> float:
        """The 2-norm of the gradient of the whole model, every parameter counted once.

        To be called after the gradients were reduced; the same number on all ranks.

        Args:
            dense: Parameters that all ranks of a pipeline stage have copies of.
            experts: This rank's expert parameters.
        """
        square_dense = _square(dense)
        square_experts = _square(experts)
        expert_group, stages = self.experts, self.group("dense", "pp")
        if expert_group is not None:
            dist.all_reduce(square_experts, group=expert_group)
        total = square_dense + square_experts
        if stages is not None:
            dist.all_reduce(total, group=stages)
        return float(total.sqrt())


_GROUPS: tuple[tuple[Side, tuple[str, ...]], ...] = (
    ("dense", ("pp",)),
    ("dense", ("tp", "cp", "dp")),
    ("expert", ("etp", "ep")),
    ("expert", ("edp",)),
)


def _square(parameters: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.detach().to(torch.float64).square().sum().cpu()
    return total
