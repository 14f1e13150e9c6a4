"""Replicas and moves of experts: gradients summed over copies, moves with the fewest transfers.

All ranks know the whole plan of a `SlotExchange`, so no counts travel. The gradient of a copied
slot is the sum over its copies, in the order of the ranks (Hecate's sparse all-gather and
reduce-scatter).

Shape suffixes: S slots of a rank, W wanted slots, M copies of a slot, N numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_runtime.parallel import placement_map
from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.dispatching import AsyncAllToAll, Group, as_transport
from moe_runtime.parallel.rows import Expansion, merge_rows
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.policies.placement import Devices, Placement

Wanted = Sequence[Sequence[tuple[int, int]]]
"""For every rank, the `(rank, slot)` that it wants copies of, in its own order."""


class SlotExchange:
    """A plan of copies between the ranks of a group; `sent_slots` go to other ranks: the traffic.

    Args:
        wanted: The slots that each rank wants; the same on all ranks.
        num_slots: `S`.

    Raises:
        ValueError: The plan is of another number of ranks, or names slots that do not exist.
    """

    def __init__(self, wanted: Wanted, num_slots: int, transport: Transport) -> None:
        if len(wanted) != transport.size:
            raise ValueError(f"the plan is of {len(wanted)} ranks, the group has {transport.size}")
        for rank, slot in (pair for pairs in wanted for pair in pairs):
            if not (0 <= rank < transport.size and 0 <= slot < num_slots):
                raise ValueError(
                    f"slot {slot} of rank {rank} does not exist: there are {transport.size} ranks "
                    f"of {num_slots} slots"
                )
        me = transport.rank
        sent = [
            [s for r, s in pairs if r == me] if p != me else [] for p, pairs in enumerate(wanted)
        ]
        self._kept = [slot for rank, slot in wanted[me] if rank == me]
        self.sent_slots = [slot for slots in sent for slot in slots]
        # Arriving slots are ordered by the rank they come from, then as this rank wants them.
        by_rank = sorted((rank, place) for place, (rank, _) in enumerate(wanted[me]) if rank != me)
        self._arriving = torch.tensor([place for _, place in by_rank], dtype=torch.int64)
        self._kept_places = torch.tensor(
            [place for place, (rank, _) in enumerate(wanted[me]) if rank == me], dtype=torch.int64
        )
        self._source, self._places = _places([*self.sent_slots, *self._kept], num_slots)
        arriving = [sum(rank == p for rank, _ in by_rank) for p in range(transport.size)]
        self._transport = transport
        (self._route,) = transport.routes(
            torch.tensor([[len(slots) for slots in sent]]), torch.tensor([arriving])
        )

    def start(self, own_SN: Tensor) -> Callable[[], Tensor]:
        """Starts copying `[S, ...]`, contiguous; the result waits for the wanted slots."""
        device, shape = own_SN.device, own_SN.shape[1:]
        rows = Expansion(
            own_SN.reshape(own_SN.shape[0], -1),
            self._source.to(device),
            self._places.to(device),
            [len(self.sent_slots)],
        )
        transfer = AsyncAllToAll(self._transport, self._route)
        transfer.start(rows.parts[0])
        kept_RN = rows.last()

        def wait() -> Tensor:
            places = self._arriving.to(device), self._kept_places.to(device)
            return merge_rows(transfer.wait(), kept_RN, *places).view(-1, *shape)

        return wait

    def copy(self, own_SN: Tensor) -> Tensor:
        """`[W, ...]`: the wanted slots of one tensor."""
        return self.start(own_SN)()


def _places(source: list[int], num_slots: int) -> tuple[Tensor, Tensor]:
    """The slots as a tensor, and the places of each slot in it: `[S, M]`, padded."""
    copies: list[list[int]] = [[] for _ in range(num_slots)]
    for place, slot in enumerate(source):
        copies[slot].append(place)
    width = max(1, max((len(places) for places in copies), default=1))
    padded = [places + [len(source)] * (width - len(places)) for places in copies]
    table = torch.tensor(padded, dtype=torch.int64).view(num_slots, width)
    return torch.tensor(source, dtype=torch.int64), table


def sum_replica_gradients(
    parameters: Iterable[Tensor], slots: ExpertSlots, group: Group | None
) -> None:
    """Gives every copy of an expert the sum of the gradients of all its copies, in place.

    All copies add in the same order: copies that start equal and use the same optimizer stay equal.
    Only replicated experts travel. A collective call; `parameters` are `[S, ...]`.
    """
    transport = as_transport(group)
    width = slots.slots_per_rank
    wanted: list[list[tuple[int, int]]] = [[] for _ in range(slots.num_ranks)]
    targets: list[list[int]] = [[] for _ in range(slots.num_ranks)]
    for held in (held for slices in slots.holders for held in slices if len(held) > 1):
        for slot in held:
            wanted[slot // width] += [divmod(other, width) for other in sorted(held)]
            targets[slot // width] += [slot % width] * len(held)
    exchange = SlotExchange(wanted, width, transport)
    target = torch.tensor(targets[transport.rank], dtype=torch.int64)
    replicated = target.unique()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        copies = exchange.copy(parameter.grad)
        parameter.grad[replicated] = 0
        parameter.grad.index_add_(0, target.to(copies.device), copies)


def keep_in_place(new: Sequence[Sequence[int]], old: ExpertSlots) -> ExpertSlots:
    """The placement that gives each rank the wanted experts and moves none that it has already.

    Args:
        new: For each rank, the experts it is to hold, -1 for empty slots.
        old: Where the experts lie now (whole experts).

    Raises:
        ValueError: An expert lies nowhere, or does not exist.
    """
    wanted = ExpertSlots.from_ranks(new, old.num_experts, ranks_per_node=old.ranks_per_node)
    kept = placement_map.keep_in_place(_as_placement(old), _as_placement(wanted), _devices(wanted))
    ranks = kept.expert_of_slot[0].reshape(wanted.num_ranks, -1).tolist()
    return ExpertSlots.from_ranks(ranks, old.num_experts, ranks_per_node=old.ranks_per_node)


def transfers_between(old: ExpertSlots, new: ExpertSlots) -> int:
    """Experts that travel between ranks from one placement of whole experts to another."""
    moves = placement_map.moves_between(_as_placement(old), _as_placement(new), _devices(old))
    return sum(not move.is_local for move in moves)


class ExpertMove:
    """The move from one placement of whole experts to another.

    An expert that a rank keeps does not travel. One that it lacks comes from a rank that has it, of
    its own machine if possible. `num_transfers` is the smallest possible.
    """

    def __init__(self, old: ExpertSlots, new: ExpertSlots, group: Group | None) -> None:
        """Plans the move; a collective call.

        Raises:
            ValueError: The placements are of different models or groups, or of sliced experts.
        """
        if old.num_experts != new.num_experts or old.num_ranks != new.num_ranks:
            raise ValueError(
                f"cannot move {old.num_experts} experts on {old.num_ranks} ranks to "
                f"{new.num_experts} experts on {new.num_ranks} ranks"
            )
        if old.num_slices > 1 or new.num_slices > 1:
            raise ValueError("only whole experts are moved; these are cut into slices")
        self.new = new
        moves = placement_map.moves_between(_as_placement(old), _as_placement(new), _devices(old))
        self.num_transfers = sum(not move.is_local for move in moves)
        source_of = {move.target_slot: move.source_slot for move in moves}
        transport = as_transport(group)
        wanted: list[list[tuple[int, int]]] = []
        for rank in range(new.num_ranks):
            held = [place for place, expert in enumerate(new.experts_of(rank)) if expert >= 0]
            sources = [
                source_of.get(rank * new.slots_per_rank + place, rank * old.slots_per_rank + place)
                for place in held
            ]
            # Two copies on one rank travel once.
            once = list(dict.fromkeys(sources))
            wanted.append([divmod(source, old.slots_per_rank) for source in once])
            if rank == transport.rank:
                self._filled = held
                self._copy_of = [once.index(source) for source in sources]
        self._exchange = SlotExchange(wanted, old.slots_per_rank, transport)

    def apply(self, tensor: Tensor) -> Tensor:
        """`[S', ...]`: a parameter or optimizer state `[S, ...]` moved; empty slots are zero."""
        with torch.no_grad():
            copies = self._exchange.copy(tensor.detach())
        moved = tensor.new_zeros((self.new.slots_per_rank, *tensor.shape[1:]))
        moved[self._filled] = copies[self._copy_of]
        return moved


def _as_placement(slots: ExpertSlots) -> Placement:
    ranks = [slots.experts_of(rank) for rank in range(slots.num_ranks)]
    return Placement(
        expert_of_slot=np.array(ranks).reshape(1, -1),
        num_experts=slots.num_experts,
        num_gpus=slots.num_ranks,
    )


def _devices(slots: ExpertSlots) -> Devices:
    each = slots.ranks_per_node
    return Devices(num_nodes=slots.num_ranks // each, gpus_per_node=each)
