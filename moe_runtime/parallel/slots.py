"""Which rank holds which expert, as the table that dispatch reads.

It covers plain expert parallelism, replicas, slices (expert tensor parallelism) and copies for one
iteration: a choice becomes one row for each slice, sent to one of the slots that hold it.

Shape suffixes: T tokens, K choices, E experts, J slices of an expert, M holders of a slice, P
ranks, S slots of a rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Where the slices of every expert lie in a group of ranks.

    A slot's number in the group is `rank * slots_per_rank + slot of the rank`.

    Attributes:
        slots_per_rank: `S`, the same for all ranks; slots may be empty.
        holders: `holders[e][j]`: slot numbers that hold slice `j` of expert `e`, at least one.
        ranks_per_node: consecutive ranks of a machine: a token whose rank has no copy of its expert
            prefers one of its machine.

    Raises:
        ValueError: An expert has no holder, or slots lie outside the group.
    """

    num_ranks: int
    slots_per_rank: int
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        end = self.num_ranks * self.slots_per_rank
        widths = {len(slices) for slices in self.holders}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(
                f"all experts must have the same number of slices, at least 1, got {sorted(widths)}"
            )
        for expert, slices in enumerate(self.holders):
            for held in slices:
                if not held:
                    raise ValueError(f"expert {expert} lies nowhere; every expert needs a slot")
                if len(set(held)) != len(held) or not all(0 <= slot < end for slot in held):
                    raise ValueError(
                        f"expert {expert} must lie in different slots of 0..{end - 1}, got {held}"
                    )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int, *, num_slices: int = 1) -> ExpertSlots:
        """Equal runs of experts; the last ranks hold fewer, or none, where it does not divide.

        `num_slices` consecutive ranks share an expert, each with a slice of its hidden dimension.
        """
        if num_experts < 1 or num_ranks < 1:
            raise ValueError(f"need experts and ranks, got {num_experts} and {num_ranks}")
        if num_slices < 1 or num_ranks % num_slices:
            raise ValueError(
                f"the number of ranks ({num_ranks}) must be a multiple of the slices ({num_slices})"
            )
        per_rank = -(-num_experts // (num_ranks // num_slices))
        first_ranks = (expert // per_rank * num_slices for expert in range(num_experts))
        holders = tuple(
            tuple(((rank + j) * per_rank + expert % per_rank,) for j in range(num_slices))
            for expert, rank in enumerate(first_ranks)
        )
        return cls(num_ranks, per_rank, holders)

    @classmethod
    def from_ranks(
        cls, experts_of_rank: Sequence[Sequence[int]], num_experts: int, *, ranks_per_node: int = 1
    ) -> ExpertSlots:
        """Whole experts, with replicas, from the expert in each slot of each rank; -1 for an empty
        one.

        Raises:
            ValueError: An expert lies nowhere, or does not exist.
        """
        per_rank = max((len(experts) for experts in experts_of_rank), default=0)
        held: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(experts_of_rank):
            for slot, expert in enumerate(experts):
                if not -1 <= expert < num_experts:
                    raise ValueError(
                        f"rank {rank} would hold expert {expert} of a layer of {num_experts}; "
                        "the map belongs to another model"
                    )
                if expert >= 0:
                    held[expert].append(rank * per_rank + slot)
        holders = tuple((tuple(slots),) for slots in held)
        return cls(len(experts_of_rank), per_rank, holders, ranks_per_node)

    @property
    def num_experts(self) -> int:
        return len(self.holders)

    @property
    def num_slices(self) -> int:
        return len(self.holders[0])

    @cached_property
    def fingerprint(self) -> int:
        """A number that is equal on two ranks when (very likely) their tables are."""
        return zlib.crc32(repr((self.slots_per_rank, self.holders, self.ranks_per_node)).encode())

    def experts_of(self, rank: int) -> list[int]:
        """The expert in each slot of a rank, -1 for empty slots."""
        experts = [-1] * self.slots_per_rank
        for expert, slices in enumerate(self.holders):
            for slot in (slot for held in slices for slot in held):
                if self._rank_of(slot) == rank:
                    experts[slot % self.slots_per_rank] = expert
        return experts

    def shares_of(self, rank: int) -> Tensor:
        """`[S]` float64: for each slot of a rank one over the number of copies of its expert, 0 if
        empty."""
        shares_S = torch.zeros(self.slots_per_rank, dtype=torch.float64)
        for held in (held for slices in self.holders for held in slices):
            here = [slot % self.slots_per_rank for slot in held if self._rank_of(slot) == rank]
            shares_S[here] = 1 / len(held)
        return shares_S

    def _rank_of(self, slot: int) -> int:
        return slot // self.slots_per_rank

    def table(self, rank: int, device: torch.device) -> SlotTable:
        """The slots that a rank's tokens use: its own, else those of its machine, else all, in
        turn."""
        key = (rank, device)
        if key not in self._tables:
            self._tables[key] = self._make_table(rank, device)
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[tuple[int, torch.device], SlotTable]:
        return {}

    def _make_table(self, rank: int, device: torch.device) -> SlotTable:
        num_experts, num_slices = self.num_experts, self.num_slices
        usable = [[self._nearest(held, rank) for held in slices] for slices in self.holders]
        width = max(len(held) for slices in usable for held in slices)
        nowhere = self.num_ranks * self.slots_per_rank
        # One more row, for choices that are not dispatched.
        choices_EJM = torch.full((num_experts + 1, num_slices, width), nowhere, dtype=torch.int64)
        numbers_EJ = torch.ones((num_experts + 1, num_slices), dtype=torch.int64)
        for expert, slices in enumerate(usable):
            for j, held in enumerate(slices):
                choices_EJM[expert, j, : len(held)] = torch.tensor(held)
                numbers_EJ[expert, j] = len(held)
        return SlotTable(choices_EJM.to(device), numbers_EJ.to(device), rank)

    def _nearest(self, held: tuple[int, ...], rank: int) -> tuple[int, ...]:
        for reach in (1, self.ranks_per_node):
            near = tuple(s for s in held if self._rank_of(s) // reach == rank // reach)
            if near:
                return near
        return held


@dataclass(frozen=True, eq=False)
class SlotTable:
    """One rank's view of `ExpertSlots`, as tensors; row `E` is for undispatched choices."""

    choices_EJM: Tensor
    numbers_EJ: Tensor
    rank: int

    def slots_of(self, ids_TK: Tensor) -> Tensor:
        """`[T, K * J]`: the slot number of every slice of every choice."""
        num_tokens, num_slices = ids_TK.shape[0], self.numbers_EJ.shape[1]
        if self.choices_EJM.shape[2] == 1:
            slots_TKJ = self.choices_EJM[:, :, 0][ids_TK]
        else:
            turn_T11 = torch.arange(num_tokens, device=ids_TK.device).view(-1, 1, 1) + self.rank
            pick_TKJ = turn_T11 % self.numbers_EJ[ids_TK]
            slots_TKJ = self.choices_EJM[ids_TK].gather(3, pick_TKJ.unsqueeze(3)).squeeze(3)
        return slots_TKJ.reshape(num_tokens, ids_TK.shape[1] * num_slices)
