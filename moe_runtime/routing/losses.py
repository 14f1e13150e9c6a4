"""Auxiliary losses of routing, without coefficients.

Losses that measure balance are 1 (or 0, as said) when the load is uniform. Shape suffixes: T
tokens, E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.config import is_number, nearest
from moe_runtime.routing.value import expert_counts


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What the losses are computed from.

    Attributes:
        logits_TE: Raw scores, differentiable.
        probs_TE: Scores as shares of 1 in each row, differentiable.
        ids_TK: Chosen experts before capacity; `E` where there is none.
        weights_TK: Combine weights before capacity, differentiable.
        batch_counts_E: Choices of each expert in the batch that these tokens are a part of; None
            means that they are all of it.
        sequence_T: The sequence of each token, where lengths differ.
    """

    logits_TE: Tensor
    probs_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    num_groups: int = 1
    num_sequences: int = 1
    batch_counts_E: Tensor | None = None
    sequence_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.probs_TE.shape[1]


def load_balance_loss(inputs: LossInputs) -> Tensor:
    """`E * sum_e f_e P_e`: f the share of choices that went to e, P its mean probability.

    1 when both are uniform, `E` when everything goes to one expert. Mean over the groups. Switch
    Transformer (Fedus et al. 2021), generalised to k choices; `load_balancing_loss_func` of
    transformers is k times as large.
    """
    return _balance(inputs.probs_TE, inputs.ids_TK, inputs.num_groups)


def sequence_balance_loss(inputs: LossInputs) -> Tensor:
    """`load_balance_loss` of each sequence, then the mean (DeepSeek-V2 and V3)."""
    return _balance(inputs.probs_TE, inputs.ids_TK, inputs.num_sequences, inputs.sequence_T)


def global_balance_loss(inputs: LossInputs) -> Tensor:
    """`load_balance_loss` with f over the whole batch, P over these tokens.

    Megatron-Core; Qiu et al. 2025, "Demons in the Detail". The mean over the parts of a batch is
    the loss of the whole, so one part may use its experts unevenly.
    """
    counts_E = inputs.batch_counts_E
    if counts_E is None:
        return _balance(inputs.probs_TE, inputs.ids_TK, 1)
    shares_E = counts_E.to(inputs.probs_TE.dtype) / counts_E.sum().clamp(min=1)
    means_E = inputs.probs_TE.sum(dim=0) / max(1, len(inputs.probs_TE))
    return inputs.num_experts * (shares_E * means_E).sum()


def first_choice_balance_loss(inputs: LossInputs) -> Tensor:
    """`E * sum_e c_e m_e` with c the share of tokens whose first choice is e (GShard)."""
    return _balance(inputs.probs_TE, inputs.ids_TK[:, :1], inputs.num_groups)


def importance_loss(inputs: LossInputs) -> Tensor:
    """Squared coefficient of variation (unbiased) of the experts' summed weights (Shazeer et al.
    2017).

    0 when every expert has the same sum.
    """
    sums = inputs.weights_TK.new_zeros(inputs.num_experts + 1)
    sums = sums.index_add(0, inputs.ids_TK.reshape(-1), inputs.weights_TK.reshape(-1))
    return squared_variation(sums[: inputs.num_experts])


def z_loss(inputs: LossInputs) -> Tensor:
    """Mean of `logsumexp(logits)^2` over the tokens (ST-MoE, Zoph et al. 2022)."""
    squares_T = inputs.logits_TE.logsumexp(dim=-1).square()
    return squares_T.sum() / max(1, len(squares_T))


def squared_variation(values_E: Tensor) -> Tensor:
    """`variance / mean^2`, with 1e-10 against division by zero; 0 for a single value."""
    if values_E.numel() < 2:
        return values_E.sum() * 0.0
    return values_E.var() / (values_E.mean().square() + 1e-10)


LOSSES: Mapping[str, Callable[[LossInputs], Tensor]] = {
    "load_balance": load_balance_loss,
    "first_choice_balance": first_choice_balance_loss,
    "sequence_balance": sequence_balance_loss,
    "global_balance": global_balance_loss,
    "importance": importance_loss,
    "z": z_loss,
}


def check_loss_names(names: Mapping[str, float], known: Mapping[str, object]) -> None:
    """Refuses losses that do not exist, and coefficients that are not numbers."""
    for name, weight in names.items():
        if name not in known:
            raise ValueError(f"unknown loss {name!r}: {nearest(name, known)}")
        if not is_number(weight):
            raise ValueError(f"loss_weights[{name!r}] must be a finite number, got {weight!r}")


def _balance(
    probs_TE: Tensor, ids_TK: Tensor, num_parts: int, part_of_token: Tensor | None = None
) -> Tensor:
    """`E * sum_e f_e P_e` of each of `num_parts` runs of consecutive tokens, then the mean.

    The runs are equally long, or as `part_of_token` says; empty ones do not count.
    """
    num_tokens, num_experts = probs_TE.shape
    if num_tokens == 0:
        return probs_TE.sum() * 0.0
    is_equal = part_of_token is None
    if part_of_token is None:
        part_of_token = torch.arange(num_tokens, device=ids_TK.device) // (num_tokens // num_parts)
    # each part counts in a block of its own; sentinels fall into the block's last place
    keys = part_of_token[:, None] * (num_experts + 1) + ids_TK
    counts = expert_counts(keys, num_parts * (num_experts + 1)).view(num_parts, num_experts + 1)
    counts_PE = counts[:, :num_experts].to(probs_TE.dtype)
    shares_PE = counts_PE / counts_PE.sum(dim=-1, keepdim=True).clamp(min=1)
    if is_equal:
        means_PE = probs_TE.view(num_parts, -1, num_experts).mean(dim=1)
        return num_experts * (shares_PE * means_PE).sum(dim=-1).mean()
    sizes_P = expert_counts(part_of_token, num_parts)
    sums_PE = probs_TE.new_zeros(num_parts, num_experts).index_add(0, part_of_token, probs_TE)
    means_PE = sums_PE / sizes_P.clamp(min=1)[:, None]
    return num_experts * (shares_PE * means_PE).sum() / (sizes_P > 0).sum()
