"""`choose_experts`: validation and choice of the implementation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.expert_choice.reference import (
    SCORES,
    ChoiceForm,
    choose_experts_reference,
)
from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl

MOST_EXPERTS, MOST_CHOICES = 512, 16
"""Of the Triton kernel."""

ChoiceImpl = Literal["auto", "triton", "reference"]


def choose_experts(
    logits_TE: Tensor,
    num_choices: int,
    form: ChoiceForm,
    *,
    bias_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    impl: ChoiceImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token by its logits, and weighs them.

    Of equals the first expert comes first. As in `torch.topk`, a NaN is greater than any number; it
    makes the weights of a softmax NaN.

    Args:
        logits_TE: `[T, E]`, fp32, bf16 or fp16; computed with in fp32.
        num_choices: K, at most E.
        form: What the weights are made of.
        bias_E: `[E]`, added to sigmoids for the choice alone, or None.
        dtype: Of the weights, which are rounded to it at last.
        impl: `triton` is one kernel for up to 512 experts and 16 choices, for inference only;
            `auto` takes it on a GPU. A named implementation never falls back.

    Returns:
        `(ids_TK, weights_TK)`, int64 and `dtype`, the most preferred expert of a token first. The
        kernel gives the same bits for a token whatever the other ones are.

    Raises:
        ValueError: Shapes do not fit, a name is unknown, or the kernel cannot take the input.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
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
    from moe_runtime.kernels.expert_choice.kernel import launch_choose_experts

    return launch_choose_experts(logits_TE, num_choices, form, bias_E, dtype)
