"""Replicas and moves of experts: one sum of gradients, and moves with the fewest transfers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_runtime.parallel import remap
from moe_runtime.parallel.dispatching import Group, as_transport
from moe_runtime.parallel.slot_exchange import SlotExchange
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.policies.placement import Devices, Placement


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
    kept = remap.keep_in_place(_as_placement(old), _as_placement(wanted), _devices(wanted))
    ranks = kept.expert_of_slot[0].reshape(wanted.num_ranks, -1).tolist()
    return ExpertSlots.from_ranks(ranks, old.num_experts, ranks_per_node=old.ranks_per_node)


class ExpertMove:
    """Getting from one placement of whole experts to another.

    An expert that a rank keeps does not travel. One that it lacks comes from a rank that has it, of
    its own machine if there is one (`parallel.remap`). `num_transfers` is the smallest possible.
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
        moves = remap.moves_between(_as_placement(old), _as_placement(new), _devices(old))
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
        """`[S', ...]` a parameter or an optimizer's state `[S, ...]` in its new place; empty slots
        are zero."""
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
