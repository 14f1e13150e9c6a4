"""`dispatch` and `combine`: tokens to the ranks that hold their experts, results back.

Counts travel first, then exactly the rows that are needed: nothing is padded or dropped. Shape
suffixes: T tokens, D model, K choices, R rows, S slots of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.parallel.communication.transport import FlatTransport, LocalTransport, Transport
from moe_runtime.parallel.communication.wire import WireName, wires
from moe_runtime.parallel.exchange import AsyncAllToAll
from moe_runtime.parallel.plan import DispatchPlan, DispatchStage, plan_dispatch
from moe_runtime.parallel.rows import (
    Expansion,
    Splitting,
    assembled_rows,
    combine_rows,
    merge_rows,
    tie_rows,
)
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing

Group = dist.ProcessGroup | Transport


@dataclass(frozen=True, eq=False, slots=True)
class Dispatched:
    """Rows at the rank that holds their experts, with what `combine` needs.

    Attributes:
        rows_RD: slot by slot; within a slot by the rank they came from, then by token.
        counts_S: int64: rows of each slot of this rank.
    """

    rows_RD: Tensor
    counts_S: Tensor
    context: Dispatch


class Dispatch:
    """One batch on its way through a group: a plan, and the exchanges of its stages."""

    def __init__(
        self,
        x_TD: Tensor,
        routing: Routing,
        group: Group | None = None,
        *,
        slots: ExpertSlots | None = None,
        num_chunks: int = 1,
        is_local_first: bool = False,
        num_panels: int = 1,
        wire: WireName = "exact",
    ) -> None:
        """Exchanges counts and gathers the rows; arguments as in `dispatch`, and:

        Args:
            num_chunks: Parts that travel and are computed one after another.
            is_local_first: Whether rows that stay are a stage of their own, which runs first.
            num_panels: Groups of columns in which results return, one after another.
        """
        self.transport = as_transport(group)
        slots = slots or ExpertSlots.contiguous(routing.num_experts, self.transport.size)
        _validate(x_TD, routing, self.transport, slots, num_chunks)
        self._width = x_TD.shape[1]
        row_wire, sum_wire = wires(wire)
        self._there, self._back = (row_wire, sum_wire), (sum_wire, sum_wire)
        slots_TK = slots.table(self.transport.rank, x_TD.device).slots_of(routing.ids_TK)
        self._weights_TK = routing.weights_TK.repeat_interleave(slots.num_slices, dim=1)
        self.plan: DispatchPlan = plan_dispatch(
            slots_TK,
            slots.slots_per_rank,
            self.transport,
            num_chunks=num_chunks,
            is_local_first=is_local_first,
            agreement=[
                ("the width of the rows", x_TD.shape[1]),
                ("the dtype of the rows (its size)", x_TD.dtype.itemsize),
                ("the number of experts", routing.num_experts),
                ("the placement of the experts (its checksum)", slots.fingerprint),
                ("the number of chunks", num_chunks),
                ("whether rows that stay run first", int(is_local_first)),
                ("the number of panels", num_panels),
                ("the wire format", ("exact", "bf16", "fp8").index(wire)),
                (
                    "whether the rows need gradients",
                    int(torch.is_grad_enabled() and x_TD.requires_grad),
                ),
            ],
        )
        sent = [stage.sent[1] - stage.sent[0] for stage in self.plan.stages]
        self._rows = Expansion(x_TD, self.plan.source_R, self.plan.place_TK, sent)
        self._results: dict[int, Tensor] = {}
        self._transfers: dict[int, AsyncAllToAll] = {}
        self._empty: dict[int, Tensor] = {}

    def start(self, index: int) -> None:
        """Sends the rows of a stage."""
        stage = self.plan.stages[index]
        if stage.route is not None:
            self._transfers[index] = transfer = self._transfer(stage, is_return=False)
            transfer.start(self._rows.parts[index])

    def arrive(self, index: int) -> Tensor:
        """Waits for the rows of a stage: `[R, D]` in the order of this rank's slots."""
        stage = self.plan.stages[index]
        if stage.route is None:
            rows_RD = self._rows.last()
        else:
            # Rows that stay are gathered while the others are on their way.
            kept_RD = self._rows.last() if stage.keeps_rows else None
            arrived_RD = self._transfers.pop(index).wait()
            if kept_RD is None:
                kept_RD = arrived_RD.new_empty((0, self._width))
            rows_RD = merge_rows(arrived_RD, kept_RD, stage.arriving_position, stage.kept_position)
        if rows_RD.shape[0] == 0:
            self._empty[index] = rows_RD
        return rows_RD

    def send_back(self, index: int, y_RD: Tensor, panel: int = 0) -> Returning:
        """Sends (a panel of) the results of a stage back to the ranks that its rows came from."""
        stage = self.plan.stages[index]
        num_rows = stage.arriving_position.shape[0] + stage.kept_position.shape[0]
        if y_RD.shape[0] != num_rows:
            raise ValueError(
                f"expected {num_rows} rows of results, one for each dispatched row, "
                f"got {y_RD.shape[0]}"
            )
        if index in self._empty:
            y_RD = tie_rows(y_RD, self._empty[index])
        if stage.route is None and self.transport.size == 1:
            return Returning(None, y_RD)
        if panel not in self._results:
            shape = (self.plan.source_R.shape[0], y_RD.shape[1])
            self._results[panel] = y_RD.new_empty(shape)
        buffer_RD = self._results[panel]
        split = Splitting(y_RD, stage.arriving_position, stage.kept_position)
        transfer = None
        if stage.route is not None:
            transfer = self._transfer(stage, is_return=True, out_RD=buffer_RD[slice(*stage.sent)])
            transfer.start(split.first_AD)
        return Returning(
            transfer,
            split.second(buffer_RD[self.plan.num_sent :] if stage.keeps_rows else buffer_RD[:0]),
        )

    def sum_up(self, returning: Sequence[Returning], panel: int = 0) -> Tensor:
        """Waits for the results of all stages and sums those of each token: `[T, D]`."""
        # Empty parts take part as well: the graph of every rank must hold every exchange, or its
        # backward pass would leave out collectives in which the other ranks wait for it.
        arrived = [part.transfer.wait() for part in returning if part.transfer is not None]
        if panel not in self._results:
            y_RD = returning[0].kept_RD
        else:
            parts = [*arrived, *(part.kept_RD for part in returning)]
            y_RD = assembled_rows(self._results[panel], parts)
        return combine_rows(y_RD, self._weights_TK, self.plan.source_R, self.plan.place_TK)

    def _transfer(
        self, stage: DispatchStage, *, is_return: bool, out_RD: Tensor | None = None
    ) -> AsyncAllToAll:
        wire, gradient_wire = self._back if is_return else self._there
        return AsyncAllToAll(
            self.transport,
            stage.route,
            is_return=is_return,
            wire=wire,
            gradient_wire=gradient_wire,
            out_RD=out_RD,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Returning:
    """Results of one stage on their way back; `transfer` is None where they all stay."""

    transfer: AsyncAllToAll | None
    kept_RD: Tensor


def dispatch(
    x_TD: Tensor,
    routing: Routing,
    group: Group | None = None,
    *,
    slots: ExpertSlots | None = None,
    wire: WireName = "exact",
) -> Dispatched:
    """Sends every token's row to the ranks that hold its experts; differentiable in `x`.

    A collective call: all ranks of the group make it in the same order, also those without tokens.

    Args:
        x_TD: this rank's tokens; `T` may differ between ranks, and be 0.
        routing: Their experts, by logical number.
        group: The ranks among which the experts are spread; None for this process alone.
        slots: Where the experts lie; equal runs of experts by default.
        wire: How rows are encoded while they travel: `exact`, or the lossy `bf16` and `fp8`.

    Raises:
        ValueError: Shapes do not fit each other, or the slots do not fit the group.
        RankFailureError: A rank died, stalled, or has other settings.
    """
    context = Dispatch(x_TD, routing, group, slots=slots, wire=wire)
    context.start(0)
    return Dispatched(context.arrive(0), context.plan.stages[0].counts_S, context)


def combine(y_RD: Tensor, dispatched: Dispatched) -> Tensor:
    """Returns results `[R, D]` and sums them: `y[t] = sum over k of weights[t, k] * result`.

    The sum runs on the token's rank in the order of its choices, so it does not depend on where the
    experts lie. Differentiable in `y` and in the weights of the routing.

    Raises:
        ValueError: There is not one result for every row.
        RankFailureError: A rank died or stalled.
    """
    context = dispatched.context
    return context.sum_up([context.send_back(0, y_RD)])


def as_transport(group: Group | None) -> Transport:
    """The transport of a group: flat all-to-all unless the caller has chosen another one."""
    if group is None:
        return LocalTransport()
    if isinstance(group, dist.ProcessGroup):
        return FlatTransport(group)
    if not hasattr(group, "exchange_numbers"):
        raise TypeError(
            f"expected a process group, a layout or a Transport, got {type(group).__name__}"
        )
    return group


def _validate(
    x_TD: Tensor, routing: Routing, transport: Transport, slots: ExpertSlots, num_chunks: int
) -> None:
    if x_TD.ndim != 2 or x_TD.shape[0] != routing.ids_TK.shape[0]:
        raise ValueError(
            f"x must be [{routing.ids_TK.shape[0]}, D], one row for each routed token, got "
            f"{list(x_TD.shape)}"
        )
    if slots.num_ranks != transport.size:
        raise ValueError(
            f"the experts are placed on {slots.num_ranks} ranks, the group has {transport.size}"
        )
    if slots.num_experts != routing.num_experts:
        raise ValueError(
            f"the placement is of {slots.num_experts} experts, the routing of "
            f"{routing.num_experts}: the map belongs to another model"
        )
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
