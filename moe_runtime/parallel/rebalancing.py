"""Moving experts while a model trains or serves, by the load that its gate caused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.parallel_experts import ParallelExperts
from moe_runtime.parallel.replicas import keep_in_place
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.policies.placement import Devices, rebalance
from moe_runtime.policies.placement.base import slots_needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebalanced:
    """One look at the loads.

    Balance is the mean over the largest load of the ranks, before and after; 1 is perfect.
    `num_transfers` counts experts that travelled between ranks.
    """

    balance_before: float
    balance_after: float
    num_transfers: int


class Rebalancer:
    """Counts where the tokens of a layer go and, from time to time, places its experts by that.

    Placement is EPLB's, with replicas if there are slots for them. Outputs change by no more than
    the order of sums. With replicas in training, `experts.sum_replica_gradients()` belongs before
    every optimizer step.

    Args:
        every: Calls of `step` between two looks at the loads.
        num_replicas: Slots beyond one for each expert; together they divide by the ranks.
        groups: The layout, where it has copies of all experts (EDP): they stay alike.
        decay: Share of the older counts that still counts at the next look.
        least_gain: Gain in balance below which nothing is moved.

    Raises:
        ValueError: Slots that do not divide by the ranks, sliced experts, or impossible numbers.
    """

    def __init__(
        self,
        experts: ParallelExperts,
        *,
        every: int = 100,
        num_replicas: int = 0,
        groups: LayoutGroups | None = None,
        decay: float = 0.5,
        least_gain: float = 0.05,
    ) -> None:
        if every < 1 or not 0 <= decay < 1 or least_gain < 0:
            raise ValueError(
                "every must be at least 1, decay in [0, 1) and least_gain not negative, got "
                f"{every}, {decay} and {least_gain}"
            )
        if experts.slots.num_slices > 1:
            raise ValueError("only whole experts are moved; these are cut into slices (etp)")
        slots_needed(experts.num_experts, num_replicas, experts.slots.num_ranks)
        self._experts, self._groups = experts, groups
        self._every, self._decay, self._least_gain = every, decay, least_gain
        self._num_slots = experts.num_experts + num_replicas
        self._num_steps = 0
        self._own_E = torch.zeros(experts.num_experts, dtype=torch.int64)
        self._loads_E = torch.zeros(experts.num_experts, dtype=torch.float64)
        self._hook = experts.register_forward_pre_hook(self._count)

    def close(self) -> None:
        self._hook.remove()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> Rebalanced | None:
        """To be called between two batches, after the optimizer's step; a collective call.

        The optimizer's states of the experts move along. Returns None between two looks at the
        loads.
        """
        self._num_steps += 1
        if self._num_steps % self._every:
            return None
        self._gather()
        experts = self._experts
        before = rank_balance(self._loads_E, experts.slots)
        num_ranks, each = experts.slots.num_ranks, experts.slots.ranks_per_node
        placement = rebalance(
            self._loads_E.numpy()[None],
            Devices(num_nodes=num_ranks // each, gpus_per_node=each),
            num_slots=self._num_slots,
        )
        wanted = placement.expert_of_slot[0].reshape(num_ranks, -1).tolist()
        slots = keep_in_place(wanted, experts.slots)
        after = rank_balance(self._loads_E, slots)
        if after < before + self._least_gain:
            return Rebalanced(balance_before=before, balance_after=before, num_transfers=0)
        num_transfers = experts.move(slots, optimizer)
        return Rebalanced(balance_before=before, balance_after=after, num_transfers=num_transfers)

    def _count(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        num_experts = len(self._own_E)
        ids = inputs[1].flatten()
        # The last number stands for choices that are not dispatched.
        counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
        self._own_E = self._own_E.to(counts.device) + counts

    def _gather(self) -> None:
        """Adds what all ranks have counted since the last look."""
        transport = self._experts.transport
        own_PE = self._own_E.cpu().expand(transport.size, -1).contiguous()
        counted_E = transport.exchange_numbers(own_PE).sum(dim=0).double()
        if self._groups is not None:
            copies = self._groups.group("expert", "edp")
            self._groups.all_reduce(counted_E, copies, "loads")
        self._loads_E = self._decay * self._loads_E + counted_E
        self._own_E = torch.zeros_like(self._own_E)


def rank_balance(loads_E: torch.Tensor, slots: ExpertSlots) -> float:
    """Mean over largest load of the ranks when an expert's load is split over its copies."""
    ranks = [0.0] * slots.num_ranks
    for load, (held, *_) in zip(loads_E.tolist(), slots.holders, strict=True):
        for slot in held:
            ranks[slot // slots.slots_per_rank] += load / len(held)
    return sum(ranks) / len(ranks) / max(ranks) if max(ranks) > 0 else 1.0
