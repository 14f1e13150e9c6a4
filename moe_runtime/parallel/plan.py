"""The plan of one dispatch: how many rows go to which rank, and where every row belongs.

Index arithmetic on top of one exchange of counts. Rows for other ranks come first, by chunk, rank,
slot and token; rows that stay come last, by slot and token. A receiver orders the rows of a slot by
the rank they came from, which is the order of one process with all tokens.

Shape suffixes: T tokens, K choices (slices included), R rows, P ranks, S slots, C chunks, N
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.communication.watch import check_agreement

# The message that carries settings and counts has this length on all ranks, whatever they are: what
# must agree is compared before messages of another length than expected can arrive, which would end
# a process of gloo's on the spot. Counts that do not fit follow in a second message.
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
    named = [("the number of slots of a rank", counts_PS.shape[1]), *agreement]
    num_named, num_slots = len(named), counts_PS.shape[1]
    header_N = torch.tensor([value for _, value in named], device=counts_PS.device)
    message_PN = counts_PS.new_zeros((transport.size, _MESSAGE_NUMBERS))
    message_PN[:, :num_named] = header_N
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
    nothing_PS = torch.zeros_like(counts_PS)
    kept_PS = nothing_PS.clone()
    kept_PS[rank] = counts_PS[rank]
    stays = _stage(nothing_PS, kept_PS, (0, 0), None, device)
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
