"""The Triton kernel of `choose_experts`: one warp per token.

A value and its index form one integer, ordered by value and then by index. So each choice is one
maximum.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.triton_support import PreparedLaunch, dependent_launch, power_of_2

_MOST_PREPARED = 256  # layer sizes times numbers of tokens
_Form = tuple[str, bool, float, float]  # the fields of `ChoiceForm`


@triton.jit
def choose_experts_fwd(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr,
    num_experts, factor, least_sum, stride_logits,
    SCORES: tl.constexpr, NORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_CHOICES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_E)
    mask = offs < num_experts
    row_ptr = logits_ptr + token * stride_logits
    logits = tl.load(row_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    ranked = logits
    if SCORES == "sigmoid":
        ranked = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
        if HAS_BIAS:
            ranked += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    # both zeros are one value, and all NaNs the greatest
    bits = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    bits = tl.where(ranked != ranked, 0x7FFFFFFF, bits)
    order = (bits.to(tl.int64) << 32) | (BLOCK_E - 1 - offs).to(tl.int64)
    order = tl.where(mask, order, -0x7FFFFFFFFFFFFFFF)
    offs_k = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], dtype=tl.int64)
    for k in tl.static_range(NUM_CHOICES):  # type: ignore[misc]
        best = tl.max(order, axis=0)
        place = best & 0xFFFFFFFF  # pyright: ignore[reportOperatorIssue]
        ids = tl.where(offs_k == k, BLOCK_E - 1 - place, ids)
        order = tl.where(order == best, -0x7FFFFFFFFFFFFFFF, order)
    is_choice = offs_k < NUM_CHOICES
    chosen = tl.load(row_ptr + ids, mask=is_choice, other=float("-inf")).to(tl.float32)
    if SCORES == "sigmoid":
        weights = tl.div_rn(1.0, 1.0 + tl.exp(-chosen))
    elif SCORES == "softmax":
        largest = tl.max(logits, axis=0)
        total = tl.sum(tl.where(mask, tl.exp(logits - largest), 0.0), axis=0)
        weights = tl.div_rn(tl.exp(chosen - largest), total)
    else:
        powers = tl.where(is_choice, tl.exp(chosen - tl.max(chosen, axis=0)), 0.0)
        weights = tl.div_rn(powers, tl.sum(powers, axis=0))
    if NORMALISES:
        total = tl.sum(tl.where(is_choice, weights, 0.0), axis=0) + least_sum
        weights = tl.div_rn(weights, total)
    place = token * NUM_CHOICES + offs_k
    tl.store(ids_ptr + place, ids, mask=is_choice)
    tl.store(weights_ptr + place, weights * factor, mask=is_choice)


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare(
    num_tokens: int,
    num_experts: int,
    num_choices: int,
    form: _Form,
    stride: int,
    has_bias: bool,
    device: torch.device,
) -> PreparedLaunch:
    scores, normalises, factor, least_sum = form
    return PreparedLaunch(
        choose_experts_fwd, (num_tokens,),
        num_experts=num_experts, factor=float(factor),
        least_sum=float(least_sum), stride_logits=stride,
        SCORES=scores, NORMALISES=normalises, HAS_BIAS=has_bias,
        NUM_CHOICES=num_choices, BLOCK_E=power_of_2(num_experts), BLOCK_K=power_of_2(num_choices),
        num_warps=1, **dependent_launch(device),
    )  # fmt: skip


def launch_choose_experts(
    logits_TE: Tensor,
    num_choices: int,
    form: _Form,
    bias_E: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`choose_experts` for checked arguments."""
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    ids_TK = logits_TE.new_empty((num_tokens, num_choices), dtype=torch.int64)
    weights_TK = logits_TE.new_empty((num_tokens, num_choices), dtype=dtype)
    if num_tokens:
        stride, has_bias = logits_TE.stride(0), bias_E is not None
        prepared = _prepare(
            num_tokens, num_experts, num_choices, form, stride, has_bias, logits_TE.device
        )
        prepared(
            logits_ptr=logits_TE,
            bias_ptr=logits_TE if bias_E is None else bias_E.contiguous(),
            ids_ptr=ids_TK,
            weights_ptr=weights_TK,
        )
    return ids_TK, weights_TK
