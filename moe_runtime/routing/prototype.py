"""k-top-1 prototyping (M6-T, Yang et al. 2021): k routers, each over its own experts."""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext


class Prototype(Gate):
    """Experts form `k` equal runs; each run's softmax gives a token its best expert there.

    The weight is the probability within the run, so a token's weights do not add up to 1.
    With `top_k=1` this is Switch without jitter. M6-T found that a balance loss does not help, so
    none is on by default.

    Args:
        top_k: Prototypes, and experts of a token.
        slots: `k`: an expert's capacity grows with k as usual; `1`: it is that of top-1 routing,
            so that the work does not grow with k.

    Raises:
        ValueError: `top_k` does not divide `num_experts`, or `slots` is unknown.
    """

    default_loss_weights: ClassVar = {}

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        slots: Literal["k", "1"] = "k",
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if num_experts % top_k:
            raise ValueError(
                f"the prototypes (top_k={top_k}) must divide num_experts={num_experts}"
            )
        if slots not in ("k", "1"):
            raise ValueError(f"slots must be 'k' or '1', got {slots!r}")
        self.slots = slots

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TKM = logits_TE.unflatten(1, (self.top_k, -1)).softmax(dim=-1)
        weights_TK, within_TK = probs_TKM.max(dim=-1)
        first_K = torch.arange(self.top_k, device=logits_TE.device) * probs_TKM.shape[2]
        return Choice(within_TK + first_K, weights_TK, logits_TE, probs_TKM.flatten(1) / self.top_k)

    def slot_limit(self, group_size: int) -> int | Tensor:
        assert self.capacity is not None, "without capacity there is no limit"
        top_k = self.top_k if self.slots == "k" else 1
        return self.capacity.slots_per_expert(group_size, top_k, self.num_experts)
