"""Noisy top-k (Shazeer et al. 2017): trained noise on the scores, smooth estimate of the load."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext, score_dtype
from moe_runtime.routing.losses import squared_variation
from moe_runtime.routing.value import expert_counts


class NoisyTopK(Gate):
    """`H = x W + N(0, 1) * (softplus(x W_noise) + 1e-2)`; weights: softmax over the top-k of H.

    For one choice the weight is its probability among all experts: alone it would always be 1.

    Noise is added in training only. Losses: `importance`, and `load`, the squared coefficient of
    variation of the expected number of tokens of each expert, which is differentiable in scores
    and noise: an expert is used if its noisy score exceeds the k-th best of the others.

    Attributes:
        noise_weight: `[E, D]`, zero at the start.
    """

    default_loss_weights: ClassVar = {"importance": 0.01, "load": 0.01}
    own_loss_names: ClassVar = ("load",)
    noise_floor: ClassVar[float] = 1e-2

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, **options: Unpack[GateOptions]
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        self.noise_weight = nn.Parameter(
            torch.zeros(
                num_experts, hidden_size, device=options.get("device"), dtype=options.get("dtype")
            )
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.noise_weight)

    def decide(self, x_TD: Tensor, context: RoutingContext) -> Choice:
        clean_TE = self.logits(x_TD, context)
        self.check_logits(clean_TE)
        if not self.training:
            return self._choose(clean_TE, clean_TE, None)
        precise = score_dtype(x_TD)
        raw_TE = F.linear(x_TD.to(precise), self.noise_weight.to(precise))
        sigma_TE = F.softplus(raw_TE) + self.noise_floor
        noise_TE = torch.randn(
            sigma_TE.shape, dtype=precise, device=x_TD.device, generator=context.generator
        )
        return self._choose(clean_TE, clean_TE + noise_TE * sigma_TE, sigma_TE)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        """Without noise, as in evaluation."""
        return self._choose(logits_TE, logits_TE, None)

    def _choose(self, clean_TE: Tensor, noisy_TE: Tensor, sigma_TE: Tensor | None) -> Choice:
        num_ranked = min(self.top_k + 1, self.num_experts)
        best, ranked_ids = noisy_TE.topk(num_ranked, dim=-1)
        ids_TK = ranked_ids[:, : self.top_k]
        if self.top_k == 1:
            weights_TK = noisy_TE.softmax(dim=-1).gather(1, ids_TK)
        else:
            weights_TK = best[:, : self.top_k].softmax(dim=-1)

        def load_loss() -> Tensor:
            if sigma_TE is None or num_ranked == self.top_k:
                counts_E = expert_counts(ids_TK, self.num_experts)
                return squared_variation(counts_E.to(clean_TE.dtype))
            return squared_variation(self.expected_load(clean_TE, noisy_TE, sigma_TE, best))

        return Choice(ids_TK, weights_TK, clean_TE, clean_TE.softmax(dim=-1), {"load": load_loss})

    def expected_load(
        self, clean_TE: Tensor, noisy_TE: Tensor, sigma_TE: Tensor, best_TK1: Tensor
    ) -> Tensor:
        """`[E]`: expected tokens of each expert if its own noise were drawn again.

        Args:
            best_TK1: `[T, k + 1]`, the best noisy scores, best first.
        """
        kth, next_best = best_TK1[:, -2, None], best_TK1[:, -1, None]
        # the k-th best of the others: for a chosen expert that is the (k+1)-th of all
        threshold_TE = torch.where(noisy_TE > next_best, next_best, kth)
        odds = (clean_TE - threshold_TE) / sigma_TE
        return (0.5 * (1 + torch.erf(odds / math.sqrt(2)))).sum(dim=0)
