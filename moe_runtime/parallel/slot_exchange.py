"""Moving experts instead of tokens: copies of slots to ranks that want them, differentiable.

All ranks know the whole plan, so no counts travel. The gradient of a copied slot is the sum over
its copies, in the order of the ranks (Hecate's sparse all-gather and reduce-scatter).

Shape suffixes: S slots of a rank, W wanted slots, M copies of a slot, N numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.communication.wire import ExactWire
from moe_runtime.parallel.exchange import AsyncAllToAll
from moe_runtime.parallel.rows import Expansion, merge_rows

Wanted = Sequence[Sequence[tuple[int, int]]]
"""For every rank, the `(rank, slot)` that it wants copies of, in its own order."""


class SlotExchange:
    """A plan of copies between the ranks of a group; `sent_slots` go to other ranks: the traffic.

    Args:
        wanted: Which rank wants what; the same on all ranks.
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
        # What arrives is ordered by the rank it comes from, then as this rank wants it.
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
        wire = ExactWire()
        transfer = AsyncAllToAll(
            self._transport, self._route, is_return=False, wire=wire, gradient_wire=wire
        )
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
    """The slots as a tensor, and where in it each slot's copies are: `[S, M]`, padded."""
    copies: list[list[int]] = [[] for _ in range(num_slots)]
    for place, slot in enumerate(source):
        copies[slot].append(place)
    width = max(1, max((len(places) for places in copies), default=1))
    padded = [places + [len(source)] * (width - len(places)) for places in copies]
    table = torch.tensor(padded, dtype=torch.int64).view(num_slots, width)
    return torch.tensor(source, dtype=torch.int64), table
