"""Tutel's switch of parallelism at run time: one layout of weights, any degree for each batch.

With more ranks than experts, `s = ranks / experts` consecutive ranks share an expert, each keeping
a slice of its hidden dimension. No parameter moves for good:

- degree 0: every rank gathers all experts and computes its own tokens (data parallelism);
- degree r: each row goes to r ranks, each of which gathers the s / r slices of its run. r = 1 is
  expert parallelism with gathered weights, r = s expert and tensor parallelism without gathering.

Shape suffixes: T tokens, D model, K choices, S slots, N slices of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.kernels.operands import Activation
from moe_runtime.parallel.cluster import Link
from moe_runtime.parallel.communication.transport import measure_link
from moe_runtime.parallel.dispatching import Group, Overlap, as_transport, expert_parallel
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.parallel_experts import ParallelExperts, replace_tensors
from moe_runtime.parallel.replicas import SlotExchange
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing


class AdaptiveParallelism:
    """The degrees that a group of ranks can switch between.

    `num_shares` ranks share an expert (1 with at least as many experts as ranks); valid degrees are
    0 and its divisors.
    """

    def __init__(self, num_experts: int, group: Group | None) -> None:
        """Works out the degrees.

        Raises:
            ValueError: Neither does the number of ranks divide that of experts, nor the reverse.
        """
        self._transport = as_transport(group)
        size = self._transport.size
        if num_experts % size and size % num_experts:
            raise ValueError(
                f"{num_experts} experts and {size} ranks: one number must divide the other"
            )
        self.num_experts = num_experts
        self.num_shares = max(1, size // num_experts)
        divisors = [r for r in range(1, self.num_shares + 1) if self.num_shares % r == 0]
        self.degrees = (0, *divisors)
        self._experts_per_rank = max(1, num_experts // size)
        self._gathers: dict[int, SlotExchange] = {}

    def slots(self, degree: int) -> ExpertSlots:
        """Where rows go with a degree from 1 on: a row for each run of ranks, spread over it."""
        shares, per_rank = self.num_shares, self._experts_per_rank
        run = shares // degree
        holders = []
        for expert in range(self.num_experts):
            first = expert // per_rank * shares
            holders.append(
                tuple(
                    tuple((first + i * run + j) * per_rank + expert % per_rank for j in range(run))
                    for i in range(degree)
                )
            )
        return ExpertSlots(self._transport.size, per_rank, tuple(holders))

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        own: StackedExperts,
        degree: int,
        *,
        activation: Activation,
        overlap: Overlap | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        impl: ExpertMlpImpl = "auto",
    ) -> Tensor:
        """Computes a layer with one of `degrees`, the same on all ranks; a collective call.

        `own` are this rank's slices (`slice_experts` of its experts), not transposed, gates first.

        Raises:
            ValueError: The degree is not valid, or the layout of the weights is another one.
        """
        if degree not in self.degrees:
            raise ValueError(f"degree must be one of {self.degrees}, got {degree}")
        if own.is_transposed or not own.is_concatenated:
            raise ValueError("adaptive experts must be [S, 2F, D], gate rows before up rows")
        gathered = self._gathered(own, degree)

        def experts(rows_RD: Tensor, counts_S: Tensor) -> Tensor:
            return grouped_expert_mlp(rows_RD, counts_S, gathered, activation=activation, impl=impl)

        read = [tensor for tensor in gathered.tensors() if tensor is not None]
        if degree == 0:
            return expert_parallel(x_TD, routing, experts, shared=shared, parameters=read)
        return expert_parallel(
            x_TD,
            routing,
            experts,
            self._transport,
            slots=self.slots(degree),
            overlap=overlap,
            shared=shared,
            parameters=read,
        )

    def _gathered(self, own: StackedExperts, degree: int) -> StackedExperts:
        """The experts that this rank computes with, put together from slices."""
        if degree == self.num_shares:
            return own
        run = self.num_shares // (degree or 1)
        if degree not in self._gathers:
            size, per_rank = self._transport.size, self._experts_per_rank
            together = run if degree else size
            wanted = [
                [
                    (other, slot)
                    for other in range(
                        rank // together * together, (rank // together + 1) * together
                    )
                    for slot in range(per_rank)
                ]
                for rank in range(size)
            ]
            self._gathers[degree] = SlotExchange(wanted, per_rank, self._transport)
        exchange = self._gathers[degree]
        tensors = [None if t is None else exchange.copy(t) for t in own.tensors()]
        return _join(replace_tensors(own, tensors), run)


def _join(slices: StackedExperts, run: int) -> StackedExperts:
    """Puts every `run` consecutive slots, slices of one expert, together."""
    if run == 1:
        return slices
    parts = 2 if slices.has_gate else 1
    gate_up, down = slices.gate_up, slices.down
    num, _, width = gate_up.shape
    hidden = slices.dim_hidden
    # [S, N, gate or up, F, D] -> [S, gate or up, N, F, D]
    joined = gate_up.view(num // run, run, parts, hidden, width).transpose(1, 2)
    bias = slices.gate_up_bias
    if bias is not None:
        bias = bias.view(num // run, run, parts, hidden).transpose(1, 2).reshape(num // run, -1)
    down_bias = slices.down_bias
    return replace(
        slices,
        gate_up=joined.reshape(num // run, -1, width),
        down=down.view(num // run, run, width, hidden)
        .transpose(1, 2)
        .reshape(num // run, width, run * hidden),
        gate_up_bias=bias,
        down_bias=None if down_bias is None else down_bias.view(num // run, run, width).sum(dim=1),
    )


def cheapest_degree(
    degrees: Sequence[int],
    *,
    row_bytes: float,
    expert_bytes: float,
    num_experts: int,
    num_ranks: int,
    alpha_s: float,
    beta_s_per_byte: float,
) -> int:
    """The degree with the least predicted communication (measured latency and inverse bandwidth).

    A rank sends `row_bytes` once for every copy of its rows, and receives the rest of the slices it
    computes with: tokens cost more and weights less as the degree grows.
    """
    shares = max(1, num_ranks // num_experts)
    own_bytes = expert_bytes * num_experts / num_ranks

    def cost(degree: int) -> float:
        # Forward and backward: weights are gathered and their gradients scattered; rows go and
        # return, and so do their gradients.
        if degree == 0:
            return 2 * (alpha_s + beta_s_per_byte * own_bytes * (num_ranks - 1))
        gathered = shares // degree
        weights_s = alpha_s + beta_s_per_byte * own_bytes * (gathered - 1) if gathered > 1 else 0.0
        return 2 * weights_s + 4 * (alpha_s + beta_s_per_byte * row_bytes * degree)

    return min(degrees, key=cost)


class SwitchingExperts(ParallelExperts):
    """Experts, each shared by as many ranks as there are for it, computed with any degree.

    Args:
        num_experts: `E`; this or the number of ranks divides the other.
        groups: As of `ParallelExperts`; a layout's `etp` is then the ranks that share an expert.
        link: Cost of an exchange; measured here by default, which is a collective call.

    Attributes:
        degrees: possible degrees: 0 gathers all experts, r sends a row to r ranks.
        degree: the one to compute with; None lets the link choose for every batch.
        last_degree: the one that the last batch was computed with.
        link: cost of an exchange; None in a process alone.

    Raises:
        ValueError: Sizes that do not divide, or another layout than the degrees need.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        groups: LayoutGroups | Group | None = None,
        *,
        link: Link | None = None,
        **options: Any,
    ) -> None:
        group = groups.experts_transport if isinstance(groups, LayoutGroups) else groups
        transport = as_transport(group)
        self._switch = AdaptiveParallelism(num_experts, transport)
        shares = self._switch.num_shares
        if isinstance(groups, LayoutGroups) and groups.layout.etp != shares:
            raise ValueError(
                f"{transport.size} ranks share {num_experts} experts by {shares}: the layout needs "
                f"etp={shares}, got etp={groups.layout.etp}"
            )
        slots = ExpertSlots.contiguous(num_experts, transport.size, num_slices=shares)
        super().__init__(
            num_experts, hidden_size, intermediate_size, groups or transport, slots=slots, **options
        )
        self.degrees = self._switch.degrees
        self.degree: int | None = None
        self.last_degree = 0
        self.link = link
        if link is None and transport.size > 1:
            self.link = measure_link(transport, device=self.get_parameter("down_proj").device)

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        later: bool = False,
    ) -> Any:
        if later:
            return partial(self.forward, x_TD, ids_TK, weights_TK, shared=shared)
        x_TD = self._as_experts_read(x_TD)
        self.last_degree = self._cheapest(x_TD, ids_TK) if self.degree is None else self.degree
        return self._switch.run(
            x_TD,
            Routing(ids_TK, weights_TK, self.num_experts),
            self.stacked(),
            self.last_degree,
            activation=self.activation,
            overlap=self.overlap,
            shared=shared,
            impl=self.impl,
        )

    def _cheapest(self, x_TD: Tensor, ids_TK: Tensor) -> int:
        """The degree for the rank with the most tokens, so that all ranks choose the same."""
        if self.link is None:
            return 0
        own_P1 = torch.full((self.transport.size, 1), x_TD.shape[0], device=x_TD.device)
        most = int(self.transport.exchange_numbers(own_P1).max())
        own_bytes = sum(p.numel() * p.element_size() for p in self.parameters())
        return cheapest_degree(
            self.degrees,
            row_bytes=most * ids_TK.shape[1] * x_TD.shape[1] * x_TD.element_size(),
            expert_bytes=own_bytes * self.transport.size / self.num_experts,
            num_experts=self.num_experts,
            num_ranks=self.transport.size,
            alpha_s=self.link.alpha_s,
            beta_s_per_byte=1 / self.link.bytes_per_s,
        )


__all__ = ["AdaptiveParallelism", "SwitchingExperts", "cheapest_degree"]
