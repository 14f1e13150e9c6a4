"""RL-R (Clark et al., "Unified Scaling Laws for Routed Language Models", 2022).

The gate samples an expert, and the loss of the token later rewards the choice (REINFORCE, Williams
1992). Shape suffixes: T tokens, D model width, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.routing.base import (
    Choice,
    Gate,
    GateOptions,
    RoutingContext,
    place_of,
    score_dtype,
)
from moe_runtime.routing.value import Policy


class Reinforce(Gate):
    """Samples one expert from `softmax(logits)`, cut to its nucleus; its output is not weighted.

    `policy_loss` gives the gate its gradient, once the rewards are known; a linear baseline of the
    token's value lowers its variance. Evaluation takes the best expert. The losses `load_balance`
    and `entropy` keep the policy from collapsing.

    Args:
        top_p: Experts are sampled from the fewest that hold this share of the probability.
        policy_weight: Coefficient of `policy_loss` in a model that adds it.

    Attributes:
        value_weight: `[D]`, of the baseline.
        value_bias: A scalar.
    """

    default_loss_weights: ClassVar = {"load_balance": 0.01, "entropy": 0.001}
    own_loss_names: ClassVar = ("entropy",)
    fixed_top_k: ClassVar = 1

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        top_p: float = 0.95,
        policy_weight: float = 0.01,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
        if not policy_weight >= 0:
            raise ValueError(f"policy_weight must be at least 0, got {policy_weight}")
        self.top_p = top_p
        self.policy_weight = policy_weight
        self.value_weight = nn.Parameter(torch.zeros(hidden_size, **place_of(options)))
        self.value_bias = nn.Parameter(torch.zeros((), **place_of(options)))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.value_weight)
        nn.init.zeros_(self.value_bias)

    def decide(self, x_TD: Tensor, context: RoutingContext) -> Choice:
        choice = super().decide(x_TD, context)
        if choice.policy is None:
            return choice
        precise = score_dtype(x_TD)
        # The baseline learns the rewards from the tokens as they are, and does not shape them.
        values_T = x_TD.detach().to(precise) @ self.value_weight.to(precise)
        values_T = values_T + self.value_bias.to(precise)
        log_probs_T = choice.policy.log_probs_T
        # Without a reward all parameters get gradients of zeros: wrappers wait for one of each.
        weights_TK = choice.weights_TK + 0.0 * (log_probs_T + values_T)[:, None]
        policy = Policy(log_probs_T, values_T)
        return dataclasses.replace(choice, weights_TK=weights_TK, policy=policy)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        log_probs_TE = logits_TE.log_softmax(dim=-1)
        probs_TE = log_probs_TE.exp()
        losses = {"entropy": lambda: _negative_entropy(probs_TE, log_probs_TE)}
        if not self.training:
            ids_T1 = probs_TE.argmax(dim=-1, keepdim=True)
            ones_T1 = torch.ones_like(ids_T1, dtype=probs_TE.dtype)
            return Choice(ids_T1, ones_T1, logits_TE, probs_TE, losses)
        policy_TE = nucleus(log_probs_TE, self.top_p)
        ids_T1 = _sample(policy_TE.detach().exp(), context.generator)
        log_probs_T = policy_TE.gather(1, ids_T1).squeeze(1)
        # `decide` adds the values of the baseline
        policy = Policy(log_probs_T, torch.zeros_like(log_probs_T))
        ones_T1 = torch.ones_like(ids_T1, dtype=probs_TE.dtype)
        return Choice(ids_T1, ones_T1, logits_TE, probs_TE, losses, policy)

    def policy_loss(self, policy: Policy, rewards_T: Tensor) -> Tensor:
        """What to minimise, with `policy_weight`, so that rewarded choices become likelier.

        `-mean((reward - value) log p) + mean((reward - value)^2) / 2`; the difference in the first
        term is not differentiated.

        Args:
            policy: `aux.routing.policy` of the call.
            rewards_T: `[T]`: for a language model minus the token's loss.
        """
        if rewards_T.shape != policy.log_probs_T.shape:
            raise ValueError(
                f"{self.name}: expected {list(policy.log_probs_T.shape)} rewards, "
                f"got {list(rewards_T.shape)}"
            )
        surprise_T = rewards_T.detach().to(policy.values_T.dtype) - policy.values_T
        num_tokens = max(1, len(rewards_T))
        gain = (surprise_T.detach() * policy.log_probs_T).sum() / num_tokens
        return surprise_T.square().sum() / (2 * num_tokens) - gain


def nucleus(log_probs_TE: Tensor, top_p: float) -> Tensor:
    """`[T, E]`: the fewest experts that hold `top_p` of each row, renormalised; the others -inf.

    Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    if top_p == 1:
        return log_probs_TE
    sorted_TE, order_TE = log_probs_TE.detach().exp().sort(dim=-1, descending=True, stable=True)
    is_out_TE = (sorted_TE.cumsum(dim=-1) - sorted_TE) >= top_p
    is_out_TE = torch.zeros_like(is_out_TE).scatter(1, order_TE, is_out_TE)
    return F.log_softmax(log_probs_TE.masked_fill(is_out_TE, -torch.inf), dim=-1)


def _sample(probs_TE: Tensor, generator: torch.Generator | None) -> Tensor:
    """`[T, 1]`: one expert of each row, by a draw against the running sums."""
    sums_TE = probs_TE.cumsum(dim=-1)
    draws_T1 = torch.rand(
        (len(probs_TE), 1), dtype=probs_TE.dtype, device=probs_TE.device, generator=generator
    )
    # A sum of rounded shares may end below 1, and a last expert may have no probability.
    passed_TE = sums_TE <= draws_T1 * sums_TE[:, -1:]
    return passed_TE.sum(dim=-1, keepdim=True).clamp(max=probs_TE.shape[1] - 1)


def _negative_entropy(probs_TE: Tensor, log_probs_TE: Tensor) -> Tensor:
    """Mean of `sum_e p log p` over the tokens: least where the policy is undecided."""
    return (probs_TE * log_probs_TE).sum() / max(1, len(probs_TE))
