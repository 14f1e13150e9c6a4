"""`SparseExperts`: a layer's experts under Hecate's fully sharded sparse data parallelism.

Every expert has one owner. Each iteration the hottest ones are copied to other ranks, behind what
computes before the layer; gradients of all copies are summed at the owner. Results change by no
more than the order of sums.

Shape suffixes: T tokens, D model, K choices, R rows, X slots with copies, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp import grouped_expert_mlp
from moe_runtime.parallel.dispatching import Group
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.parallel_experts import ParallelExperts
from moe_runtime.parallel.replicas import keep_in_place
from moe_runtime.parallel.slices import replace_tensors
from moe_runtime.research.hecate.materialise import calibrate, plan_copies, reshard
from moe_runtime.research.hecate.sparse import (
    PendingParameters,
    SparseMaterialisation,
    loads_of_all,
    sparse_expert_parallel,
)
from moe_runtime.routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRules:
    """How much is copied.

    Attributes:
        max_experts: Experts of a layer that are copied at most: those whose transfer hides behind
            the computation before the layer (`hidden_experts`).
        slots_per_rank: Copies of a layer that a rank has room for.
        ranks_per_node: Consecutive ranks of a machine. Copies go to other machines first, and
            tokens to a holder on their own machine.
        window: Iterations whose mean loads are the forecast of the next one.
        rematerialise: Copies are dropped after the forward pass and made again in the backward
            pass: memory for traffic.
        token_s: Seconds to compute one row, in all passes; with `expert_s` it allows more copies
            once the loads are known (calibration).
        expert_s: Seconds to copy one expert and to bring its gradient back, hidden by nothing.
    """

    max_experts: int
    slots_per_rank: int
    ranks_per_node: int = 1
    window: int = 5
    rematerialise: bool = False
    token_s: float = 0.0
    expert_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("max_experts", 0), ("slots_per_rank", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.token_s, self.expert_s) < 0 or bool(self.token_s) != bool(self.expert_s):
            raise ValueError(
                "calibration needs token_s and expert_s, both positive, got "
                f"{self.token_s} and {self.expert_s}"
            )


def hidden_experts(compute_s: float, bytes_per_s: float, expert_bytes: int) -> int:
    """Experts whose copying takes no longer than the computation before a layer."""
    return int(compute_s * bytes_per_s / expert_bytes)


class SparseExperts(ParallelExperts):
    """Experts of which each has an owner, and the hot ones copies for an iteration.

    Arguments as of `ParallelExperts`, whole experts only. `num_copied` counts the experts that this
    rank sent in the last forward pass.

    Raises:
        ValueError: Experts cut into slices, or ranks that do not divide by machines.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        groups: LayoutGroups | Group | None = None,
        *,
        rules: CopyRules,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, groups, **options)
        if self.slots.num_slices > 1:
            raise ValueError("only whole experts are copied; these are cut into slices (etp)")
        if self.slots.num_ranks % rules.ranks_per_node:
            raise ValueError(
                f"{self.slots.num_ranks} ranks are no whole number of machines of "
                f"{rules.ranks_per_node}"
            )
        self.rules = rules
        self.num_copied = 0
        self._loads: deque[list[int]] = deque(maxlen=rules.window)
        self._plan: SparseMaterialisation | None = None
        self._pending: PendingParameters | None = None

    @property
    def forecast_E(self) -> list[float]:
        """Mean tokens of each expert, of all ranks, over the last iterations."""
        if not self._loads:
            return [0.0] * self.num_experts
        return [sum(loads) / len(self._loads) for loads in zip(*self._loads, strict=True)]

    def prepare(self) -> None:
        """Starts this iteration's copies, to be hidden behind what is computed before the layer.

        A collective call, once before each forward pass, which makes it otherwise. No parameter may
        change in between.
        """
        self._plan = SparseMaterialisation(
            self.slots, self._copies(), self.transport, ranks_per_node=self.rules.ranks_per_node
        )
        self._pending = self._plan.start(self._owned())

    def prepare_before(self, module: nn.Module) -> None:
        """Has `prepare` called before each forward pass of a module, such as the attention."""
        module.register_forward_pre_hook(lambda *_: self.prepare())

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        if self._pending is None:
            self.prepare()
        plan, pending = self._plan, self._pending
        assert plan is not None
        assert pending is not None
        self._plan = self._pending = None
        routing = Routing(ids_TK, weights_TK, self.num_experts)
        loads_E = loads_of_all(routing, self.transport)
        self._loads.append(loads_E)
        if self.rules.token_s:
            extra = calibrate(
                loads_E,
                self._owners(),
                plan.copies,
                devices_per_node=self.rules.ranks_per_node,
                slots_per_device=self.rules.slots_per_rank,
                token_s=self.rules.token_s,
                expert_s=self.rules.expert_s,
            )
            plan = plan.extend(extra, pending) if any(extra) else plan
        self.num_copied = plan.sent_experts
        stacked = self.stacked()
        is_there = [tensor is not None for tensor in stacked.tensors()]

        def compute(rows_RD: Tensor, counts_X: Tensor, read: Sequence[Tensor]) -> Tensor:
            remaining = iter(read)
            tensors = [next(remaining) if there else None for there in is_there]
            return grouped_expert_mlp(
                rows_RD,
                counts_X,
                replace_tensors(stacked, tensors),
                activation=self.activation,
                impl=self.impl,
                recompute=self.recompute,
            )

        return sparse_expert_parallel(
            self._as_experts_read(x_TD),
            routing,
            compute,
            self._owned(),
            plan,
            copies=pending,
            rematerialise=self.rules.rematerialise,
            overlap=self.overlap,
            shared=shared,
            wire=self.wire,
        )

    def move(self, slots: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
        if self._pending is not None:
            raise ValueError("copies are on their way: owners change between two iterations")
        return super().move(slots, optimizer)

    def _owned(self) -> list[Tensor]:
        return [tensor for tensor in self.stacked().tensors() if tensor is not None]

    def _owners(self) -> list[int]:
        return [held[0][0] // self.slots.slots_per_rank for held in self.slots.holders]

    def _copies(self) -> list[list[int]]:
        if not self._loads:
            return [[] for _ in range(self.slots.num_ranks)]
        return plan_copies(
            self.forecast_E,
            self._owners(),
            num_devices=self.slots.num_ranks,
            devices_per_node=self.rules.ranks_per_node,
            max_experts=self.rules.max_experts,
            slots_per_device=self.rules.slots_per_rank,
        )


def reshard_layers(
    layers: Sequence[SparseExperts], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Gives the experts of several layers new owners by their forecasts (Hecate's algorithm 2).

    Every rank ends with the same number of experts over all layers. A collective call between two
    iterations, every hundred or so; the optimizer's states of the parameters move along.

    Returns:
        Experts that travelled, over all ranks.

    Raises:
        ValueError: The experts of all layers do not divide by the ranks.
    """
    rules = layers[0].rules
    num_ranks = layers[0].slots.num_ranks
    owners = reshard(
        [layer.forecast_E for layer in layers],
        num_devices=num_ranks,
        devices_per_node=rules.ranks_per_node,
        num_copied=min(rules.max_experts, rules.slots_per_rank),
    )
    num_moved = 0
    for layer, owner_E in zip(layers, owners, strict=True):
        wanted = [[e for e, owner in enumerate(owner_E) if owner == r] for r in range(num_ranks)]
        slots = keep_in_place(wanted, layer.slots)
        if slots.holders != layer.slots.holders:
            num_moved += layer.move(slots, optimizer)
    return num_moved
