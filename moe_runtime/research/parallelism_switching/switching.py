"""`SwitchingExperts`: a layer's experts whose parallelism is chosen anew for every batch (Tutel).

The weights lie in one layout and never move; `adaptive` beside this file computes with any degree,
and the degree is the one that a measured link makes cheapest for the tokens of the batch.

Shape suffixes: T tokens, D model, K choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_runtime.parallel.cluster import Link
from moe_runtime.parallel.communication.measure import measure_link
from moe_runtime.parallel.dispatch import Group, as_transport
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.parallel_experts import ParallelExperts
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.research.parallelism_switching.adaptive import AdaptiveParallelism, cheapest_degree
from moe_runtime.routing import Routing


class SwitchingExperts(ParallelExperts):
    """Experts, each shared by as many ranks as there are for it, computed with any degree.

    Args:
        num_experts: `E`; this or the number of ranks divides the other.
        hidden_size: `D`.
        intermediate_size: `F`.
        groups: As of `ParallelExperts`; a layout's `etp` is then the ranks that share an expert.
        link: What an exchange costs; measured here by default, which is a collective call.
        options: As of `ParallelExperts`.

    Attributes:
        degrees: what can be chosen: 0 gathers all experts, r sends a row to r ranks.
        degree: the one to compute with; None lets the link choose for every batch.
        last_degree: the one that the last batch was computed with.

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
        self._link = link
        if link is None and transport.size > 1:
            self._link = measure_link(transport, device=self.get_parameter("down_proj").device)

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """As of `ParallelExperts`; a collective call."""
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
        if self._link is None:
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
            alpha_s=self._link.alpha_s,
            beta_s_per_byte=1 / self._link.bytes_per_s,
        )
