"""`choose_experts`: from a router's logits to the experts of each token and their weights."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl

Scores = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SCORES: tuple[Scores, ...] = ("softmax", "softmax_of_chosen", "sigmoid")
MOST_EXPERTS, MOST_CHOICES = 512, 16  # of the Triton kernel

ChoiceImpl = Literal["auto", "triton", "reference"]


class ChoiceForm(NamedTuple):
    """How the weights of the chosen experts are computed.

    Attributes:
        scores: `softmax` over all experts (Mixtral, OLMoE, Qwen3), `softmax_of_chosen` over the
            chosen ones (gpt-oss, Granite), or `sigmoid` (DeepSeek-V3).
        normalises: Weights are divided by their sum.
        factor: Multiplies the weights afterwards.
        least_sum: Added to the sum before the division: 1e-20 in DeepSeek-V3.
    """

    scores: Scores
    normalises: bool = False
    factor: float = 1.0
    least_sum: float = 0.0


def choose_experts(
    logits_TE: Tensor,
    num_choices: int,
    form: ChoiceForm,
    *,
    bias_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    impl: ChoiceImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token by its logits and computes their weights.

    Equal experts come in ascending order. As in `torch.topk`, NaN is greater than any number; it
    makes the weights of a softmax NaN.

    Args:
        logits_TE: fp32, bf16 or fp16; computed in fp32.
        num_choices: K, at most E.
        bias_E: Added to sigmoids for the choice only, or None.
        dtype: Of the weights.
        impl: `triton` (up to 512 experts and 16 choices, inference only), `reference`, or `auto`:
            triton on a GPU.

    Returns:
        `(ids_TK, weights_TK)`, int64 and `dtype`, best expert first. With the kernel, a token's
        result does not depend on the other tokens.

    Raises:
        ValueError: Shapes do not fit, a name is unknown, or the kernel cannot take the input.
        TritonUnavailableError: Triton is needed and not installed.
    """
    if logits_TE.ndim != 2 or not 0 < num_choices <= logits_TE.shape[1]:
        raise ValueError(
            f"logits must be [T, E] with E of at least {num_choices} and one choice or more, got "
            f"{list(logits_TE.shape)}"
        )
    if form.scores not in SCORES:
        raise ValueError(f"scores must be one of {', '.join(SCORES)}, got {form.scores!r}")
    num_experts = logits_TE.shape[1]
    if bias_E is not None and (bias_E.shape != (num_experts,) or form.scores != "sigmoid"):
        raise ValueError(
            f"bias must be [{num_experts}], and is added to sigmoids alone, got "
            f"{list(bias_E.shape)} and {form.scores}"
        )
    if resolve_impl(impl, logits_TE.device, ("auto", "triton", "reference")) != "triton":
        return choose_experts_reference(logits_TE, num_choices, form, bias_E, dtype)
    check_triton_dtype(logits_TE)
    if num_experts > MOST_EXPERTS or num_choices > MOST_CHOICES or logits_TE.requires_grad:
        raise ValueError(
            f"impl='triton' takes up to {MOST_EXPERTS} experts and {MOST_CHOICES} choices and no "
            f"gradients, got {num_experts} and {num_choices}"
        )
    from moe_runtime.kernels.decode_step.expert_choice_kernel import launch_choose_experts

    return launch_choose_experts(logits_TE, num_choices, form, bias_E, dtype)


def choose_experts_reference(
    logits_TE: Tensor,
    num_choices: int,
    form: ChoiceForm,
    bias_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The specification in torch: computes in fp32 and rounds the weights once."""
    ranked = rank_experts(logits_TE, form, bias_E)
    ranked = ranked.where(~ranked.isnan(), torch.nan)  # CUDA sorts a negative NaN last
    ids_TK = ranked.argsort(dim=-1, descending=True, stable=True)[:, :num_choices]
    return ids_TK, weigh_experts(logits_TE, ids_TK, form, dtype)


def rank_experts(logits_TE: Tensor, form: ChoiceForm, bias_E: Tensor | None = None) -> Tensor:
    """The scores `[T, E]` by which experts are chosen, in fp32."""
    logits = logits_TE.float()
    if form.scores != "sigmoid":
        return logits
    return logits.sigmoid() if bias_E is None else logits.sigmoid() + bias_E.float()


def weigh_experts(
    logits_TE: Tensor, ids_TK: Tensor, form: ChoiceForm, dtype: torch.dtype
) -> Tensor:
    """The weights `[T, K]` of chosen experts."""
    logits = logits_TE.float()
    if form.scores == "softmax":
        weights = logits.softmax(-1).gather(1, ids_TK)
    elif form.scores == "sigmoid":
        weights = logits.sigmoid().gather(1, ids_TK)
    else:
        weights = logits.gather(1, ids_TK).softmax(-1)
    if form.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + form.least_sum)
    return (weights * form.factor).to(dtype)
