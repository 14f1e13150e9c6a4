"""Our dispatcher for `transformers`' expert parallelism (5.23 or newer).

Call `register_expert_parallelism()`, then load under `torchrun` with
`DistributedConfig(ep_size=..., ep_implementation="moe_runtime")`. `moe_runtime.parallel` exchanges
the tokens; the chosen experts implementation computes a rank's rows.

Shape suffixes: T tokens, D model, K choices, R rows, S experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.parallel import ExpertSlots, FlatTransport, Overlap, Transport, expert_parallel
from moe_runtime.parallel.communication.watch import DEFAULT_TIMEOUT_S
from moe_runtime.parallel.rows import SPREAD
from moe_runtime.routing import Routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "moe_runtime"
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


def register_expert_parallelism(
    name: str = NAME, *, overlap: Overlap | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Registers the dispatcher with transformers; call it before loading a model.

    Args:
        name: value of `DistributedConfig.ep_implementation`.
        overlap: how to hide communication; without chunks by default.
        timeout_s: seconds to wait for another rank before an error that names it.

    Raises:
        UnsupportedModelError: the installed transformers has no such interface.
    """
    try:
        from transformers.distributed.expert_parallel import (
            EPImplementation,
            EPImplementationInterface,
        )
    except ImportError as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot be told how to spread experts; "
            "5.23 or newer can"
        ) from error

    class MoERuntimeEP(EPImplementation):
        """One experts module of one rank."""

        def __init__(
            self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
        ) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._transport = FlatTransport(ep_mesh.get_group(), timeout_s=timeout_s)
            self._batch_group = tp_mesh.get_group() if tp_mesh.size() > 1 else None
            num_local = cast(int, self.num_local_experts)
            self._slots = ExpertSlots.contiguous(num_local * ep_mesh.size(), ep_mesh.size())

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            return spread_experts(
                hidden_states,
                top_k_index,
                top_k_weights,
                self.experts_forward,
                self._transport,
                self._slots,
                self._batch_group,
                overlap or Overlap(is_local_first=False),
            )

    EPImplementationInterface.register(name, MoERuntimeEP)


def spread_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts_forward: ExpertsForward,
    transport: Transport,
    slots: ExpertSlots,
    batch_group: dist.ProcessGroup | None,
    overlap: Overlap,
) -> Tensor:
    """``[T, D]``: the weighted outputs of the experts for each of a rank's tokens.

    Args:
        x_TD: ``[T, D]``.
        ids_TK: ``[T, K]`` expert numbers of the whole layer.
        weights_TK: ``[T, K]``.
        experts_forward: this rank's experts, called with rows, their local expert ``[R, 1]`` and
            weights of 1.
        batch_group: ranks that all hold this batch (tensor parallelism); each takes an equal part
            of the tokens.
    """
    num_tokens = x_TD.shape[0]
    if batch_group is not None:
        x_TD, ids_TK, weights_TK = (
            _take_part(tensor, batch_group) for tensor in (x_TD, ids_TK, weights_TK)
        )

    def experts(rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        num_rows = rows_RD.shape[0]
        # One row of zeros if none came: the parameters stay in the graph, so that their gradients
        # can be reduced with other ranks.
        rows_RD = rows_RD if num_rows else rows_RD.sum(dim=0, keepdim=True)
        ids_R = torch.repeat_interleave(counts_S, output_size=num_rows)
        ids_R1 = (ids_R if num_rows else counts_S.new_zeros(1)).unsqueeze(1)
        ones_R1 = torch.ones(ids_R1.shape, dtype=rows_RD.dtype, device=rows_RD.device)
        return experts_forward(rows_RD, ids_R1, ones_R1)[:num_rows]

    y_TD = expert_parallel(
        x_TD,
        Routing(ids_TK.long(), weights_TK, slots.num_experts),
        experts,
        transport,
        slots=slots,
        overlap=overlap,
    )
    if batch_group is None:
        return y_TD
    return _GatherParts.apply(y_TD, batch_group, num_tokens)  # pyright: ignore[reportReturnType]


def _take_part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if tensor.requires_grad:
        return _TakePart.apply(tensor, group)  # pyright: ignore[reportReturnType]
    begin, end = _part(tensor.shape[0], group)
    return tensor[begin:end]


def _part(num_rows: int, group: dist.ProcessGroup) -> tuple[int, int]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return num_rows * rank // size, num_rows * (rank + 1) // size


def _gather_parts(part_RD: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
    """All ranks' parts in order; padded in between, since they differ by up to a row."""
    size = dist.get_world_size(group)
    longest = -(-num_rows // size)
    padded = part_RD.new_zeros((longest, *part_RD.shape[1:]))
    padded[: part_RD.shape[0]] = part_RD
    gathered = part_RD.new_empty((size * longest, *part_RD.shape[1:]))
    dist.all_gather_into_tensor(gathered, padded, group=group)
    ends = [num_rows * (rank + 1) // size - num_rows * rank // size for rank in range(size)]
    return torch.cat([gathered[i * longest : i * longest + n] for i, n in enumerate(ends)])


class _TakePart(Function):
    """A rank's part of rows that all ranks hold; the backward pass gathers all gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows = group, tensor.shape[0]
        begin, end = _part(tensor.shape[0], group)
        return tensor[begin:end].clone()

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_parts(grad.contiguous(), ctx.group, ctx.num_rows), None


class _GatherParts(Function):
    """All ranks' parts on every rank; the backward pass returns a part's own gradients."""

    @staticmethod
    def forward(ctx: Any, part_RD: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
        ctx.group, ctx.num_rows = group, num_rows
        return _gather_parts(part_RD, group, num_rows)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        begin, end = _part(ctx.num_rows, ctx.group)
        return grad_TD[begin:end], None, None
