"""MoE++ (Jin et al. 2024): experts without weights, and gating residuals.

Shape suffixes: T tokens, N all experts (E with weights, then Z without), K choices of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.config import nearest
from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext, place_of
from moe_runtime.routing.capacity import Capacity
from moe_runtime.routing.topk import normalize
from moe_runtime.routing.value import Routing, ZeroRouting, expert_counts


@dataclass(frozen=True)
class ZeroExpertCounts:
    """Zero-computation experts of each kind, numbered in the order of the released model.

    Attributes:
        constant: `a1 x + a2 v` with `[a1, a2] = softmax(W x)`, trained `v` and `W`.
        copy: `x`.
        zero: 0.
    """

    constant: int = 2
    copy: int = 1
    zero: int = 1

    def __post_init__(self) -> None:
        for count in (self.constant, self.copy, self.zero):
            if type(count) is not int or count < 0:
                raise ValueError(f"counts of zero experts must be integers from 0 on, got {self}")

    @classmethod
    def of_kinds(cls, kinds: Mapping[str, int]) -> ZeroExpertCounts:
        """Counts by kind; kinds that are not named have none."""
        counts = {"constant": 0, "copy": 0, "zero": 0}
        for kind in kinds:
            if kind not in counts:
                raise ValueError(f"zero_experts has no kind {kind!r}; {nearest(kind, counts)}")
        return cls(**{**counts, **kinds})

    @property
    def total(self) -> int:
        return self.constant + self.copy + self.zero


class MoEPlusPlus(Gate):
    """Top-k softmax over E experts with weights and Z without any.

    `logits = x W + previous_logits R` (the gating residual); softmax over all N, top-k. The weight
    of a zero expert becomes 0 and the rest is divided by its sum (not with `top_k=1`).

    Loss `heterogeneous_balance`: `sum_i eta_i f_i P_i`, f the share of tokens that choose i, P its
    mean probability, `eta` 1 for experts with weights and `tau` without. An expert with weights
    takes `ceil(factor * k * tau * S / (tau * E + Z))` choices, one without `1 / tau` times that:
    the paper's formulas times k, because k choices need k places.

    Args:
        tau: In (0, 1]; below 1 the loss and the capacity favour experts without weights.
        gating_residual: Whether the gate has the matrix R.

    Attributes:
        weight: `[N, D]`.
        residual: `[N, N]`, zero at the start, or None.
    """

    default_loss_weights: ClassVar = {"heterogeneous_balance": 0.01}
    own_loss_names: ClassVar = ("heterogeneous_balance",)

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        zero_experts: ZeroExpertCounts = ZeroExpertCounts(),
        tau: float = 0.75,
        gating_residual: bool = True,
        **options: Unpack[GateOptions],
    ) -> None:
        num_scores = num_experts + zero_experts.total
        super().__init__(hidden_size, num_experts, top_k, num_scores=num_scores, **options)
        if not 0 < tau <= 1:
            raise ValueError(f"tau must be in (0, 1], got {tau}")
        self.zero_experts = zero_experts
        self.tau = tau
        self.residual: nn.Parameter | None = None
        if gating_residual:
            self.residual = nn.Parameter(torch.zeros(num_scores, num_scores, **place_of(options)))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.residual is not None:
            nn.init.zeros_(self.residual)

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        logits_TN = super().logits(x_TD, context)
        if self.residual is None:
            return logits_TN
        previous_TN = context.previous_logits_TE
        if previous_TN is None:
            # the matrix gets a gradient of zeros: wrappers wait for one of every parameter
            previous_TN = logits_TN.new_zeros(1, logits_TN.shape[1])
        elif previous_TN.shape != logits_TN.shape:
            raise ValueError(
                f"{self.name}: previous_logits must be {list(logits_TN.shape)}, got "
                f"{list(previous_TN.shape)}"
            )
        precise = logits_TN.dtype
        return logits_TN + F.linear(previous_TN.to(precise), self.residual.to(precise))

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TN = logits_TE.softmax(dim=-1)
        weights_TK, ids_TK = probs_TN.topk(self.top_k, dim=-1)
        # the kind that returns 0 comes last
        first_zero = probs_TN.shape[1] - self.zero_experts.zero
        weights_TK = weights_TK.masked_fill(ids_TK >= first_zero, 0.0)
        if self.top_k > 1:  # a single weight divided by itself would always be 1
            weights_TK = normalize(weights_TK)

        def balance_loss() -> Tensor:
            counts_N = expert_counts(ids_TK, probs_TN.shape[1]).to(probs_TN.dtype)
            num_tokens = max(1, len(ids_TK))
            means_N = probs_TN.sum(dim=0) / num_tokens
            eta_N = torch.full_like(means_N, self.tau)
            eta_N[: self.num_experts] = 1.0
            return (eta_N * counts_N / num_tokens * means_N).sum()

        own = {"heterogeneous_balance": balance_loss}
        return Choice(ids_TK, weights_TK, logits_TE, probs_TN, own)

    def finish(self, choice: Choice, context: RoutingContext) -> Routing:
        """Splits the choices: those of experts without weights leave `ids_TK`."""
        whole = super().finish(choice, context)
        num_experts, num_zero = self.num_experts, self.zero_experts.total
        is_plain_TK = whole.ids_TK < num_experts
        is_special_TK = ~is_plain_TK & (whole.ids_TK < whole.num_experts)
        zero = ZeroRouting(
            (whole.ids_TK - num_experts).masked_fill(~is_special_TK, num_zero),
            whole.weights_TK.masked_fill(~is_special_TK, 0.0),
            num_zero,
        )
        slots_TK = whole.slots_TK
        return Routing(
            whole.ids_TK.masked_fill(~is_plain_TK, num_experts),
            whole.weights_TK.masked_fill(~is_plain_TK, 0.0),
            num_experts,
            whole.losses,
            demand_E=None if whole.demand_E is None else whole.demand_E[:num_experts],
            slots_TK=None if slots_TK is None else slots_TK.masked_fill(~is_plain_TK, -1),
            logits_TE=whole.logits_TE,
            zero=zero,
        )

    def slot_limit(self, capacity: Capacity, group_size: int) -> int | Tensor:
        num_zero = self.zero_experts.total
        share = capacity.factor * group_size * self.top_k
        share /= self.tau * self.num_experts + num_zero
        plain, special = (math.ceil(round(share * eta, 9)) for eta in (self.tau, 1.0))
        device = self.weight.device if self.weight is not None else None
        return torch.tensor([plain] * self.num_experts + [special] * num_zero, device=device)
