"""GShard's gate (Lepikhin et al. 2020): top-2, the second expert at random."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.switch import require_top_k
from moe_runtime.routing.topk import normalize


class GShard(Gate):
    """Top-2 of the softmax, normalised; the second expert is used with probability `2 * g2`.

    A second expert of normalised weight 0.5 is always used, one of 0.1 in a fifth of the cases.
    That is so in training; in evaluation the second expert is always used. With capacity, second
    choices take places after all first choices of their group (policy `choice`), and a choice
    that is not used takes none. The weight of a lost choice is lost.

    Args:
        top_k: Must be 2.
        random_second: Whether the second expert is random in training.

    Raises:
        ValueError: `top_k` is not 2.
    """

    default_loss_weights: ClassVar = {"first_choice_balance": 0.01}

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        random_second: bool = True,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        require_top_k(self, 2)
        self.random_second = random_second

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        best_T2, ids_T2 = probs_TE.topk(2, dim=-1)
        weights_T2 = normalize(best_T2)
        if self.random_second and self.training:
            draws_T = torch.rand(
                len(logits_TE), device=logits_TE.device, generator=context.generator
            )
            is_used_T = 2 * weights_T2[:, 1] > draws_T
            is_used_T2 = torch.stack([torch.ones_like(is_used_T), is_used_T], dim=1)
            ids_T2 = ids_T2.masked_fill(~is_used_T2, self.num_experts)
            weights_T2 = weights_T2.masked_fill(~is_used_T2, 0.0)
        return Choice(ids_T2, weights_T2, logits_TE, probs_TE)
