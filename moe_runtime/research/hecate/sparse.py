"""Hecate's fully sharded sparse data parallelism: copies of hot experts for one iteration.

The owner of an expert keeps its parameters and optimizer state. For an iteration, chosen experts
are copied to other ranks (sparse all-gather), which compute their own tokens for them; gradients of
the copies are summed at the owner (the backward pass of the first).

Shape suffixes: T tokens, D model, R rows, S owned slots of a rank, X slots with copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import Group, as_transport
from moe_runtime.parallel.pipeline import Overlap, expert_parallel
from moe_runtime.parallel.rows import SPREAD, tie_rows
from moe_runtime.parallel.slot_exchange import SlotExchange
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing

ExpertsWith = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""`(rows_RD, counts_X, parameters) -> y_RD`: experts that read the parameters they are given."""


class SparseMaterialisation:
    """Copies of some experts on some ranks.

    Attributes:
        slots: where the experts lie while the copies exist: owned slots first, then copies.
        copies: for each rank, the experts that are copied to it.
        sent_experts: experts that this rank sends, with repetitions: the traffic of one pass.
    """

    def __init__(
        self,
        owners: ExpertSlots,
        copies: Sequence[Sequence[int]],
        group: Group | None,
        *,
        ranks_per_node: int = 1,
    ) -> None:
        """Plans the copies; a collective call.

        Args:
            owners: Where the experts lie, each on one rank.
            copies: For each rank, experts to copy to it; those it owns are skipped.

        Raises:
            ValueError: An expert has several owners, or the plan does not fit the group.
        """
        if owners.num_slices > 1 or any(len(held[0]) > 1 for held in owners.holders):
            raise ValueError("every expert must have exactly one owner")
        self.transport = as_transport(group)
        self._owners = owners
        self._ranks_per_node = ranks_per_node
        self.copies: list[list[int]] = [[] for _ in range(owners.num_ranks)]
        self._held = [owners.experts_of(rank) for rank in range(owners.num_ranks)]
        self._waves: list[SlotExchange] = []
        self._add(copies)

    def _add(self, copies: Sequence[Sequence[int]]) -> None:
        """Plans one more exchange of copies; what a rank holds already is skipped."""
        owners = self._owners
        if len(copies) != owners.num_ranks:
            raise ValueError(
                f"the plan is of {len(copies)} ranks, the experts lie on {owners.num_ranks}"
            )
        extra = [
            [expert for expert in dict.fromkeys(wanted) if expert not in held]
            for wanted, held in zip(copies, self._held, strict=True)
        ]
        unknown = [e for experts in extra for e in experts if not 0 <= e < owners.num_experts]
        if unknown:
            raise ValueError(f"there is no expert {unknown[0]} among {owners.num_experts}")
        width = owners.slots_per_rank
        sources = [divmod(owners.holders[e][0][0], width) for e in range(owners.num_experts)]
        wave = SlotExchange(
            [[sources[expert] for expert in experts] for experts in extra], width, self.transport
        )
        self._waves.append(wave)
        self._held = [held + more for held, more in zip(self._held, extra, strict=True)]
        self.copies = [held + more for held, more in zip(self.copies, extra, strict=True)]
        self.slots = ExpertSlots.from_ranks(
            self._held, owners.num_experts, ranks_per_node=self._ranks_per_node
        )
        self._num_empty = self.slots.slots_per_rank - len(self._held[self.transport.rank])
        self.sent_experts = sum(len(wave.sent_slots) for wave in self._waves)

    def start(self, parameters: Sequence[Tensor]) -> PendingParameters:
        """Starts copying parameters `[S, ...]`; attention can run meanwhile."""
        pending = PendingParameters(parameters)
        for wave in self._waves:
            pending.add(wave)
        pending.num_empty = self._num_empty
        return pending

    def extend(
        self, copies: Sequence[Sequence[int]], pending: PendingParameters | None = None
    ) -> SparseMaterialisation:
        """A plan with more copies, once the loads are known (calibration); a collective call.

        Copies of this plan in `pending` become those of the new plan: only what is new is sent.
        """
        longer = copy.copy(self)
        longer._waves = list(self._waves)
        longer._add(copies)
        if pending is not None:
            pending.add(longer._waves[-1])
            pending.num_empty = longer._num_empty
        return longer

    def materialise(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """`[X, ...]` for each parameter: owned slots, copies, and slots that stay empty."""
        return self.start(parameters).wait()


class PendingParameters:
    """Copies of parameters on their way; `num_empty` slots after them stay empty."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._pending: list[list[Callable[[], Tensor]]] = [[] for _ in parameters]
        self.num_empty = 0

    def add(self, wave: SlotExchange) -> None:
        """Starts one more exchange of copies."""
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            pending.append(wave.start(parameter))

    def wait(self) -> list[Tensor]:
        """`[X, ...]` for each parameter."""
        return [
            torch.cat(
                [
                    parameter,
                    *(wait() for wait in pending),
                    parameter.new_zeros((self.num_empty, *parameter.shape[1:])),
                ]
            )
            for parameter, pending in zip(self._parameters, self._pending, strict=True)
        ]


def loads_of_all(routing: Routing, transport: Transport) -> list[int]:
    """Tokens that each expert gets from all ranks together, `[E]`; a collective call."""
    ids = routing.ids_TK.flatten()
    own_E = torch.bincount(ids[ids < routing.num_experts], minlength=routing.num_experts)
    own_PE = own_E.expand(transport.size, -1).contiguous()
    return transport.exchange_numbers(own_PE).sum(dim=0).tolist()


def sparse_expert_parallel(
    x_TD: Tensor,
    routing: Routing,
    experts: ExpertsWith,
    parameters: Sequence[Tensor],
    plan: SparseMaterialisation,
    *,
    copies: PendingParameters | None = None,
    rematerialise: bool = False,
    overlap: Overlap | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    wire: WireName = "exact",
) -> Tensor:
    """One layer of experts with copies; gradients arrive at the owners.

    Args:
        experts: What computes the tokens; it may not keep the parameters.
        parameters: `[S, ...]` what this rank owns.
        copies: `plan.start(parameters)`, started earlier to hide it; made here by default.
        rematerialise: Drops the copies after the forward pass and makes them again in the backward
            pass.
    """
    materialised = (copies or plan.start(parameters)).wait()
    again = _Again(plan, parameters, materialised) if rematerialise else None

    def compute(rows_RD: Tensor, counts_X: Tensor) -> Tensor:
        if again is None:
            return experts(rows_RD, counts_X, materialised)
        rows_RD = _Backwards.apply(rows_RD, again.forget)  # pyright: ignore[reportAssignmentType]
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            y_RD = experts(rows_RD, counts_X, materialised)
        if rows_RD.shape[0] == 0:
            y_RD = tie_rows(y_RD, rows_RD, *materialised)
        again.num_stages += 1
        return _Backwards.apply(y_RD, again.fetch)  # pyright: ignore[reportReturnType]

    y_TD = expert_parallel(
        x_TD,
        routing,
        compute,
        plan.transport,
        slots=plan.slots,
        overlap=overlap,
        shared=shared,
        parameters=materialised,
        wire=wire,
    )
    if again is not None:
        again.storages.clear()  # the addresses mean nothing from now on
    return y_TD


class _Again:
    """Replaces materialised parameters among what autograd saves, and makes them again.

    Every stage of the backward pass asks for them, so all ranks exchange them at the same point,
    with or without rows; the last stage drops them.
    """

    def __init__(
        self,
        plan: SparseMaterialisation,
        parameters: Sequence[Tensor],
        materialised: Sequence[Tensor],
    ) -> None:
        self._plan = plan
        self._parameters = [parameter.detach() for parameter in parameters]
        self.storages = {t.untyped_storage().data_ptr(): i for i, t in enumerate(materialised)}
        self._fetched: list[Tensor] = []
        self.num_stages = 0
        self._num_left = 0

    def pack(self, tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...], int]:
        index = self.storages.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        return index, tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def unpack(self, saved: Tensor | tuple[int, torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        index, shape, stride, offset = saved
        return self._fetched[index].as_strided(shape, stride, offset)

    def fetch(self) -> None:
        if self._num_left == 0:
            self._num_left = self.num_stages
            with torch.no_grad():
                self._fetched = self._plan.materialise(self._parameters)

    def forget(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._fetched = []


class _Backwards(Function):
    """Nothing in the forward pass; calls a function before the backward pass goes on."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return rows_RD.view_as(rows_RD)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grad_RD, None
