"""Hecate's fully sharded sparse data parallelism: copies of hot experts for one iteration.

Every expert has one owner, which keeps its parameters and optimizer state. For an iteration, chosen
experts are copied to other ranks (sparse all-gather), which then compute their own tokens for them;
the gradients of the copies are summed at the owner (sparse reduce-scatter, the backward pass of the
first). Which experts are copied where changes the traffic, never the result.

Shape suffixes: S owned slots of a rank, X slots with copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.parallel.dispatch import Group, as_transport
from moe_runtime.parallel.slot_exchange import PendingSlots, SlotExchange
from moe_runtime.parallel.slots import ExpertSlots


class SparseMaterialisation:
    """Copies of some experts on some ranks.

    Attributes:
        slots: where the experts lie while the copies exist: owned slots first, then copies.
        sent_experts: experts that this rank sends, with repetitions: the traffic of one pass.
    """

    def __init__(
        self, owners: ExpertSlots, copies: Sequence[Sequence[int]], group: Group | None
    ) -> None:
        """Plans the copies; a collective call.

        Args:
            owners: Where the experts lie, each on one rank.
            copies: For each rank, experts to copy to it; those it owns are passed over.
            group: The ranks.

        Raises:
            ValueError: An expert has several owners, or the plan does not fit the group.
        """
        transport = as_transport(group)
        if owners.num_slices > 1 or any(len(held[0]) > 1 for held in owners.holders):
            raise ValueError("every expert must have exactly one owner")
        if len(copies) != owners.num_ranks:
            raise ValueError(
                f"the plan is of {len(copies)} ranks, the experts lie on {owners.num_ranks}"
            )
        owned = [owners.experts_of(rank) for rank in range(owners.num_ranks)]
        extra = [
            [expert for expert in dict.fromkeys(wanted) if expert not in owned[rank]]
            for rank, wanted in enumerate(copies)
        ]
        unknown = [e for experts in extra for e in experts if not 0 <= e < owners.num_experts]
        if unknown:
            raise ValueError(f"there is no expert {unknown[0]} among {owners.num_experts}")
        self.slots = ExpertSlots.from_ranks(
            [own + more for own, more in zip(owned, extra, strict=True)], owners.num_experts
        )
        width = owners.slots_per_rank
        sources = [divmod(owners.holders[e][0][0], width) for e in range(owners.num_experts)]
        self._exchange = SlotExchange(
            [[sources[expert] for expert in experts] for experts in extra], width, transport
        )
        self._num_empty = self.slots.slots_per_rank - width - len(extra[transport.rank])
        self.sent_experts = len(self._exchange.sent_slots)

    def start(self, parameters: Sequence[Tensor]) -> PendingParameters:
        """Starts copying parameters `[S, ...]`; attention can run meanwhile."""
        pending = [self._exchange.start(parameter) for parameter in parameters]
        return PendingParameters(parameters, pending, self._num_empty)

    def materialise(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """`[X, ...]` for each parameter: owned slots, copies, and slots that stay empty."""
        return self.start(parameters).wait()


class PendingParameters:
    """Copies of parameters on their way."""

    def __init__(
        self, parameters: Sequence[Tensor], pending: Sequence[PendingSlots], num_empty: int
    ) -> None:
        self._parameters = parameters
        self._pending = pending
        self._num_empty = num_empty

    def wait(self) -> list[Tensor]:
        """`[X, ...]` for each parameter.

        Raises:
            RankFailureError: A rank died or stalled.
        """
        return [
            torch.cat(
                [parameter, pending.wait(), parameter.new_zeros(self._empty_shape(parameter))]
            )
            for parameter, pending in zip(self._parameters, self._pending, strict=True)
        ]

    def _empty_shape(self, parameter: Tensor) -> tuple[int, ...]:
        return (self._num_empty, *parameter.shape[1:])
