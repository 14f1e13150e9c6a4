"""The zero-computation experts of MoE++ (Jin et al. 2024): no product, nothing to fetch.

Shape suffixes: T tokens, D model width, Z zero-computation experts, C constant ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_runtime.routing import ZeroExpertCounts, ZeroRouting


class ZeroExperts(nn.Module):
    """Constant experts `a1 x + a2 v` with `[a1, a2] = softmax(W x)`, copies `x`, and zeros.

    Attributes:
        vectors: `[C, D]`, `v` of each constant expert.
        mix_weight: `[C, 2, D]`, its `W`.
    """

    def __init__(
        self,
        counts: ZeroExpertCounts,
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.counts = counts
        self.vectors = nn.Parameter(
            torch.empty(counts.constant, hidden_size, device=device, dtype=dtype)
        )
        self.mix_weight = nn.Parameter(
            torch.empty(counts.constant, 2, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Vectors standard normal, mixing weights with standard deviation `1 / sqrt(D)`."""
        nn.init.normal_(self.vectors)
        nn.init.normal_(self.mix_weight, std=self.vectors.shape[1] ** -0.5)

    def forward(self, x_TD: Tensor, routing: ZeroRouting) -> Tensor:
        """`[T, D]`: what these experts add for their tokens."""
        precise = routing.weights_TK.dtype
        weights_TZ = routing.weights_TK.new_zeros(len(x_TD), routing.num_experts + 1)
        weights_TZ = weights_TZ.scatter_add(1, routing.ids_TK, routing.weights_TK)
        constant_TC = weights_TZ[:, : self.counts.constant]
        copy_TZ = weights_TZ[:, self.counts.constant : self.counts.constant + self.counts.copy]
        mix_TC2 = torch.einsum("td,cmd->tcm", x_TD.to(precise), self.mix_weight.to(precise))
        mix_TC2 = mix_TC2.softmax(dim=-1)
        share_of_x_T1 = copy_TZ.sum(1, keepdim=True)
        share_of_x_T1 = share_of_x_T1 + (constant_TC * mix_TC2[..., 0]).sum(1, keepdim=True)
        share_of_v_TC = constant_TC * mix_TC2[..., 1]
        out_TD = share_of_x_T1 * x_TD.to(precise) + share_of_v_TC @ self.vectors.to(precise)
        return out_TD.to(x_TD.dtype)

    def extra_repr(self) -> str:
        return str(self.counts)
