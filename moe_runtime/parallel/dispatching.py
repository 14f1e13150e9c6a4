"""`dispatch` and `combine`: tokens to the ranks that hold their experts, results back; a layer's
experts over a group (`expert_parallel`).

Counts travel first, then exactly the rows that are needed: nothing is padded or dropped. Rows for
other ranks come first, by chunk, rank, slot and token; rows that stay come last, by slot and token.
A receiver orders the rows of a slot by the rank they came from, which is the order of one process
with all tokens.

Starting and waiting are two nodes of the graph. Autograd runs nodes in the reverse order of their
creation: the backward pass starts the reverse exchange where the forward pass waited.

`expert_parallel` computes rows that stay first, while the others travel (Comet). It cuts rows for
other ranks into chunks, so that one is computed while the next arrives (Tutel, without padding).
Results may return in panels of columns (Comet's second product). Only the order in which weight
gradients are summed depends on it.

Shape suffixes: T tokens, D model, K choices (slices included), R rows, P ranks (columns of a panel
in `RP`), S slots of a rank, C chunks, N numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation
from moe_runtime.kernels.expert_mlp.reference import apply_activation
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.operands import Activation
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.parallel.communication.transport import (
    FlatTransport,
    LocalTransport,
    Pending,
    Transport,
)
from moe_runtime.parallel.communication.watch import check_agreement
from moe_runtime.parallel.communication.wire import EXACT, Wire, WireName, wires
from moe_runtime.parallel.rows import (
    SPREAD,
    Expansion,
    Splitting,
    alias,
    assembled_rows,
    combine_rows,
    merge_rows,
    tie_rows,
)
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing

# The message with settings and counts has this length on all ranks. So settings are compared before
# a message of an unexpected length can arrive, which would end a process of gloo's on the spot.
# Counts that do not fit follow in a second message.
_MESSAGE_NUMBERS = 128


@dataclass(frozen=True, eq=False, slots=True)
class DispatchStage:
    """Rows that go through the experts together.

    Attributes:
        counts_S: int64: rows of each of this rank's slots.
        sent: begin and end of the rows this rank sends, among all its rows.
        route: how the transport moves the sent rows; None for a stage of rows that stay.
        arriving_position, kept_position: where arriving and kept rows go in slot order.
    """

    counts_S: Tensor
    sent: tuple[int, int]
    keeps_rows: bool
    route: object | None
    arriving_position: Tensor
    kept_position: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class DispatchPlan:
    """Where the rows of one batch go.

    Attributes:
        source_R: token of each of this rank's rows.
        place_TK: row of each choice; `R` where it has none.
        num_sent: rows for other ranks.
        sent_P, received_P: rows for and from each rank, this one included.
    """

    source_R: Tensor
    place_TK: Tensor
    stages: tuple[DispatchStage, ...]
    num_sent: int
    sent_P: tuple[int, ...]
    received_P: tuple[int, ...]


def plan_dispatch(
    slots_TK: Tensor,
    slots_per_rank: int,
    transport: Transport,
    *,
    num_chunks: int = 1,
    is_local_first: bool = False,
    agreement: Sequence[tuple[str, int]] = (),
) -> DispatchPlan:
    """Exchanges counts and makes the plan.

    Args:
        slots_TK: int64 slot numbers in the group; `P * S` for choices that go nowhere.
        slots_per_rank: `S`.
        num_chunks: Parts into which every run of rows for another rank's slot is cut.
        is_local_first: Puts the rows that stay into a stage of their own, which runs first.
        agreement: Names and values that must be equal on all ranks.
    """
    num_tokens, num_choices = slots_TK.shape
    num_ranks, rank = transport.size, transport.rank
    order, place, counts_PS = _sort_by_slot(slots_TK, slots_per_rank, num_ranks, rank)
    received_PS = counts_PS
    if num_ranks > 1:
        counts_PS, received_PS = _exchange_counts(counts_PS, transport, agreement)
    else:
        counts_PS = received_PS = counts_PS.cpu()
    num_rows = int(counts_PS.sum())
    num_kept = int(counts_PS[rank].sum())
    num_sent = num_rows - num_kept
    order = order[:num_rows]
    if num_chunks > 1 and num_ranks > 1:
        order = torch.cat(
            [_sort_by_chunk(order[:num_sent], counts_PS, rank, num_chunks), order[num_sent:]]
        )
        place = place.clone()
        place[order] = torch.arange(num_rows, device=order.device)
    return DispatchPlan(
        source_R=order // num_choices,
        place_TK=place.view(num_tokens, num_choices),
        stages=_stages(counts_PS, received_PS, transport, num_chunks, is_local_first, order.device),
        num_sent=num_sent,
        sent_P=tuple(counts_PS.sum(dim=1).tolist()),
        received_P=tuple(received_PS.sum(dim=1).tolist()),
    )


def _sort_by_slot(
    slots_TK: Tensor, slots_per_rank: int, num_ranks: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices ordered by rank (this one last), slot and token; their places; counts `[P, S]`."""
    begin, end = rank * slots_per_rank, (rank + 1) * slots_per_rank
    num_slots = num_ranks * slots_per_rank
    # The slots of later ranks move up, and this rank's come after all others.
    keys_TK = slots_TK - slots_per_rank * (slots_TK >= end)
    keys_TK = torch.where(
        (slots_TK >= begin) & (slots_TK < end), slots_TK + num_slots - end, keys_TK
    )
    keys_TK = torch.where(slots_TK == num_slots, num_slots, keys_TK)
    by_key = token_sort(keys_TK, num_slots)
    counts_PS = by_key.counts_E.view(num_ranks, slots_per_rank)
    counts_PS = torch.cat([counts_PS[:rank], counts_PS[-1:], counts_PS[rank:-1]])
    return by_key.order_R, by_key.inverse_R, counts_PS


def _exchange_counts(
    counts_PS: Tensor, transport: Transport, agreement: Sequence[tuple[str, int]]
) -> tuple[Tensor, Tensor]:
    """Counts that this rank sends and receives, on the CPU: the one wait for the device."""
    num_slots = counts_PS.shape[1]
    named = [("the number of slots of a rank", num_slots), *agreement]
    num_named = len(named)
    message_PN = counts_PS.new_zeros((transport.size, _MESSAGE_NUMBERS))
    message_PN[:, :num_named] = counts_PS.new_tensor([value for _, value in named])
    fits = num_named + num_slots <= _MESSAGE_NUMBERS
    if fits:
        message_PN[:, num_named : num_named + num_slots] = counts_PS
    received_PN = transport.exchange_numbers(message_PN)
    both = torch.stack([message_PN, received_PN]).cpu()
    check_agreement(named, both[1, :, :num_named], transport.rank)
    if not fits:
        return counts_PS.cpu(), transport.exchange_numbers(counts_PS).cpu()
    counts = both[:, :, num_named : num_named + num_slots]
    return counts[0], counts[1]


def _sort_by_chunk(order_R: Tensor, counts_PS: Tensor, rank: int, num_chunks: int) -> Tensor:
    """Sent rows, so far by rank, slot and token, ordered by chunk first."""
    sent_PS = _without(counts_PS, rank)
    counts = sent_PS.flatten().to(order_R.device)
    num_rows = order_R.shape[0]
    run_R = torch.repeat_interleave(counts, output_size=num_rows)
    begin = counts.cumsum(0) - counts
    within_R = torch.arange(num_rows, device=order_R.device) - begin[run_R]
    # Chunk c of a run of n rows holds rows n * c // C to n * (c + 1) // C.
    chunk_R = ((within_R + 1) * num_chunks - 1) // counts[run_R]
    return order_R[torch.sort(chunk_R, stable=True).indices]


def _stages(
    counts_PS: Tensor,
    received_PS: Tensor,
    transport: Transport,
    num_chunks: int,
    is_local_first: bool,
    device: torch.device,
) -> tuple[DispatchStage, ...]:
    rank = transport.rank
    kept_PS = counts_PS - _without(counts_PS, rank)
    stays = _stage(torch.zeros_like(counts_PS), kept_PS, (0, 0), None, device)
    if transport.size == 1:
        return (stays,)
    sent_CPS = _chunk_counts(_without(counts_PS, rank), num_chunks)
    arriving_CPS = _chunk_counts(_without(received_PS, rank), num_chunks)
    routes = transport.routes(sent_CPS.sum(dim=2), arriving_CPS.sum(dim=2))
    ends = [0, *sent_CPS.sum(dim=(1, 2)).cumsum(0).tolist()]
    travels = [
        _stage(
            arriving_CPS[chunk],
            kept_PS if chunk == 0 and not is_local_first else None,
            (ends[chunk], ends[chunk + 1]),
            routes[chunk],
            device,
        )
        for chunk in range(num_chunks)
    ]
    return (stays, *travels) if is_local_first else tuple(travels)


def _stage(
    arriving_PS: Tensor,
    kept_PS: Tensor | None,
    sent: tuple[int, int],
    route: object | None,
    device: torch.device,
) -> DispatchStage:
    keeps_rows = kept_PS is not None
    if kept_PS is None:
        kept_PS = torch.zeros_like(arriving_PS)
    all_PS = arriving_PS + kept_PS
    return DispatchStage(
        counts_S=all_PS.sum(dim=0).to(device),
        sent=sent,
        keeps_rows=keeps_rows,
        route=route,
        arriving_position=_positions(all_PS, arriving_PS, device),
        kept_position=_positions(all_PS, kept_PS, device),
    )


def _positions(all_PS: Tensor, part_PS: Tensor, device: torch.device) -> Tensor:
    """Where the rows of a part, ordered by rank and slot, lie in the order by slot and rank."""
    by_slot = all_PS.T.flatten()
    begin_PS = (by_slot.cumsum(0) - by_slot).view(all_PS.T.shape).T
    part = part_PS.flatten()
    shift = (begin_PS.flatten() - (part.cumsum(0) - part)).to(device)
    num_rows = int(part.sum())
    return torch.repeat_interleave(shift, part.to(device), output_size=num_rows) + torch.arange(
        num_rows, device=device
    )


def _chunk_counts(counts_PS: Tensor, num_chunks: int) -> Tensor:
    """`[C, P, S]`: rows of each run in each chunk."""
    edges = torch.arange(num_chunks + 1).view(-1, 1, 1) * counts_PS // num_chunks
    return edges[1:] - edges[:-1]


def _without(counts_PS: Tensor, rank: int) -> Tensor:
    """The counts with this rank's own taken out."""
    others_PS = counts_PS.clone()
    others_PS[rank] = 0
    return others_PS


class AsyncAllToAll:
    """One exchange of rows, there or back, and the exchange of its gradients the other way.

    Args:
        route: As the transport prepared it.
        is_return: Whether these rows travel back along the route.
        wires: How rows are encoded, and how their gradients are.
        out_RD: Memory for the arriving rows; new by default.
    """

    def __init__(
        self,
        transport: Transport,
        route: object,
        *,
        is_return: bool = False,
        wires: tuple[Wire, Wire] = (EXACT, EXACT),
        out_RD: Tensor | None = None,
    ) -> None:
        self._transport, self._route, self._is_return = transport, route, is_return
        self._wires = wires
        self._out_RD = out_RD
        self._pending: Pending | None = None
        self._dtype = torch.float32
        self._width = 0
        self._token: Tensor | None = None

    def start(self, rows_RD: Tensor) -> None:
        self._token = _Start.apply(rows_RD, self)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self) -> Tensor:
        """The rows that arrived."""
        if self._token is None:
            raise ValueError("start() has to come before wait()")
        token, self._token = self._token, None
        return _Wait.apply(token, self)  # pyright: ignore[reportReturnType]

    def launch(self, rows_RD: Tensor, *, is_gradient: bool) -> None:
        self._dtype, self._width = rows_RD.dtype, rows_RD.shape[1]
        self._pending = self._transport.exchange(
            self._wires[is_gradient].encode(rows_RD),
            self._route,
            reverse=self._is_return != is_gradient,
            # Encoded rows have to be decoded into their place.
            out=self._out_RD if not is_gradient and self._wires[0] is EXACT else None,
        )

    def land(self, *, is_gradient: bool) -> Tensor:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        arrived_RD = self._wires[is_gradient].decode(pending.wait(), self._dtype, self._width)
        out_RD = self._out_RD
        if is_gradient or out_RD is None:
            return arrived_RD
        if arrived_RD.data_ptr() != out_RD.data_ptr():
            out_RD.copy_(arrived_RD)
        return alias(out_RD)


class _Start(Function):
    """Launches; returns a token that ties the wait to the rows in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.launch(rows_RD, is_gradient=False)
        return rows_RD.new_zeros(1)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.land(is_gradient=True), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.land(is_gradient=False)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.launch(grad_RD, is_gradient=True)
        return grad_RD.new_zeros(1), None


Group = dist.ProcessGroup | Transport


@dataclass(frozen=True, eq=False, slots=True)
class Dispatched:
    """Rows at the rank that holds their experts, with the plan that `combine` needs.

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
            transfer = AsyncAllToAll(self.transport, stage.route, wires=self._there)
            self._transfers[index] = transfer
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
            transfer = AsyncAllToAll(
                self.transport,
                stage.route,
                is_return=True,
                wires=self._back,
                out_RD=buffer_RD[slice(*stage.sent)],
            )
            transfer.start(split.first_AD)
        kept_RD = buffer_RD[self.plan.num_sent :] if stage.keeps_rows else buffer_RD[:0]
        return Returning(transfer, split.second(kept_RD))

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


@runtime_checkable
class PanelExperts(Protocol):
    """A rank's experts, whose outputs come panel by panel."""

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        """`[R, columns of the panel]`, the leftmost first, each computed when it is asked for."""
        ...


class StackedPanels:
    """Experts in stacked parameters, panel by panel."""

    def __init__(self, experts: StackedExperts, activation: Activation) -> None:
        self._experts = experts
        self._activation = resolve_activation(activation)

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        experts = self._experts
        if not 1 <= num_panels <= experts.dim_model:
            raise ValueError(f"panels must be in 1..{experts.dim_model}, got {num_panels}")
        offsets = pad(counts_S.cumsum(0), (1, 0))
        transposed = experts.is_transposed
        z_RZ = grouped_gemm(
            rows_RD,
            experts.gate_up,
            offsets,
            bias_SN=experts.gate_up_bias,
            is_transposed=transposed,
        )
        hidden_RF = apply_activation(z_RZ, experts.layout, self._activation)
        # Cut once, so that the gradients of all panels are put together once.
        downs = experts.down.tensor_split(num_panels, dim=2 if transposed else 1)
        biases: tuple[Tensor | None, ...] = (None,) * num_panels
        if experts.down_bias is not None:
            biases = experts.down_bias.tensor_split(num_panels, dim=1)
        for down, bias in zip(downs, biases, strict=True):
            yield grouped_gemm(hidden_RF, down, offsets, bias_SN=bias, is_transposed=transposed)


ExpertsFn = Callable[[Tensor, Tensor], Tensor]
"""`(rows_RD, counts_S) -> y_RD`: this rank's experts on rows sorted by slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How much of the communication is hidden.

    Attributes:
        degree: chunks into which the rows for other ranks are cut; 1, 2, 4 or 8 are usual.
        is_local_first: computes the rows that stay while the others travel. Reads the weights of an
            expert once more; worth it unless there are few rows.
        panels: groups of columns in which results are computed and returned; more than one needs
            experts that can (`PanelExperts`).
    """

    degree: int = 1
    is_local_first: bool = True
    panels: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree must be at least 1, got {self.degree}")
        if self.panels < 1:
            raise ValueError(f"panels must be at least 1, got {self.panels}")


def expert_parallel(
    x_TD: Tensor,
    routing: Routing,
    experts: ExpertsFn | PanelExperts,
    group: Group | None = None,
    *,
    slots: ExpertSlots | None = None,
    overlap: Overlap | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    parameters: Sequence[Tensor] = (),
    wire: WireName = "exact",
) -> Tensor:
    """Routed (and shared) experts of one layer, spread over a group: `[T, D]`.

    A collective call. `x_TD`, `routing`, `group`, `slots`, `wire` and errors as of `dispatch`.

    Args:
        experts: This rank's experts. Called once for each stage, also with no rows at all.
        overlap: How communication is hidden.
        shared: Experts that every token visits, whose output is added; computed while the first
            rows travel.
        parameters: Tensors that `experts` reads and that need gradients: a rank without rows then
            takes part in the backward pass too. Needed where `x` needs no gradients, and for
            tensors that an exchange brought (gathered slices, copies).
    """
    finish = begin_expert_parallel(
        x_TD,
        routing,
        experts,
        group,
        slots=slots,
        overlap=overlap,
        shared=shared,
        parameters=parameters,
        wire=wire,
    )
    return finish()


def begin_expert_parallel(
    x_TD: Tensor,
    routing: Routing,
    experts: ExpertsFn | PanelExperts,
    group: Group | None = None,
    *,
    slots: ExpertSlots | None = None,
    overlap: Overlap | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    parameters: Sequence[Tensor] = (),
    wire: WireName = "exact",
) -> Callable[[], Tensor]:
    """Sends the first rows, and returns a function that computes the layer.

    Rows travel between the two calls, and their gradients in the backward pass. Arguments as of
    `expert_parallel`.
    """
    overlap = overlap or Overlap()
    batch = Dispatch(
        x_TD,
        routing,
        group,
        slots=slots,
        num_chunks=overlap.degree,
        is_local_first=overlap.is_local_first,
        num_panels=overlap.panels,
        wire=wire,
    )
    stages = batch.plan.stages
    for index in range(min(2, len(stages))):
        batch.start(index)

    def finish() -> Tensor:
        returning: list[list[Returning]] = [[] for _ in range(overlap.panels)]
        shared_TD = None
        for index, stage in enumerate(stages):
            # The next stage travels while this one is computed.
            if 2 <= index + 1 < len(stages):
                batch.start(index + 1)
            if index == 0 and shared is not None:
                shared_TD = shared(x_TD)
            rows_RD = batch.arrive(index)
            results = _results(experts, rows_RD, stage.counts_S, overlap.panels)
            for panel, y_RP in enumerate(results):
                if rows_RD.shape[0] == 0:
                    y_RP = tie_rows(y_RP, *parameters)
                returning[panel].append(batch.send_back(index, y_RP, panel))
        panels = [batch.sum_up(parts, panel) for panel, parts in enumerate(returning)]
        y_TD = panels[0] if len(panels) == 1 else torch.cat(panels, dim=1)
        return y_TD if shared_TD is None else y_TD + shared_TD

    return finish


def _results(
    experts: ExpertsFn | PanelExperts, rows_RD: Tensor, counts_S: Tensor, num_panels: int
) -> Iterator[Tensor]:
    if isinstance(experts, PanelExperts):
        yield from experts.panels(rows_RD, counts_S, num_panels)
    elif num_panels == 1:
        yield experts(rows_RD, counts_S)
    else:
        raise ValueError(
            f"{num_panels} panels need experts that compute columns apart, such as StackedPanels; "
            "a function gives all at once"
        )
