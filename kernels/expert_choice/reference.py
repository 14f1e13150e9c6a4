"""`choose_experts` in plain torch: the specification.

Shape suffixes: T tokens, E experts, K choices.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scores = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SCORES: tuple[Scores, ...] = ("softmax", "softmax_of_chosen", "sigmoid")


class ChoiceForm(NamedTuple):
    """What weights are made of.

    Attributes:
        scores: `softmax` over all experts (Mixtral, OLMoE, Qwen3), `softmax_of_chosen` over those
            that were chosen by their logits (gpt-oss, Granite), or `sigmoid` (DeepSeek-V3).
        normalises: Whether they are divided by their sum.
        factor: Of the weights, behind that.
        least_sum: Added to the sum before it divides: 1e-20 in DeepSeek-V3.
    """

    scores: Scores
    normalises: bool = False
    factor: float = 1.0
    least_sum: float = 0.0


def choose_experts_reference(
    logits_TE: Tensor,
    num_choices: int,
    form: ChoiceForm,
    bias_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Computes as `choose_experts` says, in fp32, and rounds the weights once.

    Args:
        logits_TE: `[T, E]`.
        num_choices: K.
        form: What the weights are made of.
        bias_E: `[E]` or None.
        dtype: Of the weights.
    """
    logits = ranked = logits_TE.float()
    if form.scores == "sigmoid":
        ranked = logits.sigmoid() if bias_E is None else logits.sigmoid() + bias_E.float()
    ranked = ranked.where(
        ~ranked.isnan(), torch.nan
    )  # CUDA sorts one with a sign behind all others
    ids_TK = ranked.argsort(dim=-1, descending=True, stable=True)[:, :num_choices]
    if form.scores == "softmax":
        weights = logits.softmax(-1).gather(1, ids_TK)
    elif form.scores == "sigmoid":
        weights = logits.sigmoid().gather(1, ids_TK)
    else:
        weights = logits.gather(1, ids_TK).softmax(-1)
    if form.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + form.least_sum)
    return ids_TK, (weights * form.factor).to(dtype)
