"""Triton kernels of `combine` and their launchers.

Forward: one program per token and slice of D adds the token's K rows in order. Backward: one
program per row writes the row's gradient and its gate weight's, so nothing needs atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import cdiv, check_triton_dtype, launch, power_of_2


@triton.jit
def _combine_fwd(
    y_ptr, weights_ptr, inverse_ptr, num_rows_ptr, out_ptr,
    num_choices, dim,
    stride_yr, stride_wt, stride_wk, stride_ot,
    HAS_WEIGHTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    num_rows = tl.load(num_rows_ptr)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for k in range(num_choices):
        row = tl.load(inverse_ptr + token * num_choices + k)
        is_real = row < num_rows
        mask = offs_d < tl.where(is_real, dim, 0)
        y = tl.load(y_ptr + row * stride_yr + offs_d, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + token * stride_wt + k * stride_wk)
            y *= tl.where(is_real, weight.to(tl.float32), 0.0)
        acc += y
    tl.store(out_ptr + token * stride_ot + offs_d, acc, mask=offs_d < dim)


@triton.jit
def _combine_bwd(
    dout_ptr, y_ptr, weights_ptr, order_ptr, num_rows_ptr, dy_ptr, dweights_ptr,
    num_choices, dim,
    stride_gt, stride_gd, stride_yr, stride_wt, stride_wk, stride_dyr,
    HAS_WEIGHTS: tl.constexpr, NEEDS_DY: tl.constexpr, NEEDS_DWEIGHTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    token = slot // num_choices
    choice = slot % num_choices
    is_real = row < tl.load(num_rows_ptr)
    limit = tl.where(is_real, dim, 0)
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + token * stride_wt + choice * stride_wk).to(tl.float32)
    dot = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first in range(0, dim, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        mask = offs_d < limit
        offs_g = offs_d.to(tl.int64) * stride_gd
        dout = tl.load(dout_ptr + token * stride_gt + offs_g, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DY:
            # rows without an expert get zeros
            dy = tl.where(is_real, dout * weight, 0.0)
            tl.store(dy_ptr + row * stride_dyr + offs_d, dy, mask=offs_d < dim)
        if NEEDS_DWEIGHTS:
            y = tl.load(y_ptr + row * stride_yr + offs_d, mask=mask, other=0.0)
            dot += dout * y.to(tl.float32)
    if NEEDS_DWEIGHTS:
        tl.store(dweights_ptr + slot, tl.sum(dot, axis=0))


def launch_combine_fwd(
    y_RD: Tensor, weights_TK: Tensor | None, inverse_R: Tensor, num_rows: Tensor, num_choices: int
) -> Tensor:
    """`[T, D]` in the dtype of `y`, which needs unit stride along D."""
    num_tokens, dim = len(inverse_R) // num_choices, y_RD.shape[1]
    out_TD = torch.empty(num_tokens, dim, dtype=y_RD.dtype, device=y_RD.device)
    if out_TD.numel():
        block = _block(dim)
        weights = y_RD if weights_TK is None else weights_TK
        launch(
            _combine_fwd, (num_tokens, cdiv(dim, block)),
            y_ptr=y_RD, weights_ptr=weights, inverse_ptr=inverse_R, num_rows_ptr=num_rows,
            out_ptr=out_TD,
            num_choices=num_choices, dim=dim,
            stride_yr=y_RD.stride(0), stride_wt=weights.stride(0), stride_wk=weights.stride(1),
            stride_ot=out_TD.stride(0),
            HAS_WEIGHTS=weights_TK is not None, BLOCK_D=block,
        )  # fmt: skip
    return out_TD


def launch_combine_bwd(
    dout_TD: Tensor,
    y_RD: Tensor,
    weights_TK: Tensor | None,
    order_R: Tensor,
    num_rows: Tensor,
    num_choices: int,
    *,
    needs_dy: bool,
    needs_dweights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`(dy_RD, dweights_TK)` in the dtypes of `y` and the weights; None if not needed."""
    num_rows_all, dim = y_RD.shape
    dy_RD = torch.empty_like(y_RD) if needs_dy else None
    dweights = None
    if needs_dweights:
        dweights = torch.empty(num_rows_all, dtype=torch.float32, device=y_RD.device)
    if y_RD.numel() and (needs_dy or needs_dweights):
        weights = dout_TD if weights_TK is None else weights_TK
        launch(
            _combine_bwd, (num_rows_all,),
            dout_ptr=dout_TD, y_ptr=y_RD, weights_ptr=weights, order_ptr=order_R,
            num_rows_ptr=num_rows, dy_ptr=dy_RD if dy_RD is not None else y_RD,
            dweights_ptr=dweights if dweights is not None else y_RD,
            num_choices=num_choices, dim=dim,
            stride_gt=dout_TD.stride(0), stride_gd=dout_TD.stride(1), stride_yr=y_RD.stride(0),
            stride_wt=weights.stride(0), stride_wk=weights.stride(1),
            stride_dyr=dy_RD.stride(0) if dy_RD is not None else 0,
            HAS_WEIGHTS=weights_TK is not None, NEEDS_DY=needs_dy, NEEDS_DWEIGHTS=needs_dweights,
            BLOCK_D=_block(dim),
        )  # fmt: skip
    elif dweights is not None:
        dweights.zero_()
    if dweights is None or weights_TK is None:
        return dy_RD, None
    return dy_RD, dweights.view(weights_TK.shape).to(weights_TK.dtype)


def _block(dim: int) -> int:
    return min(1024, max(16, power_of_2(dim)))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        weights_TK: Tensor | None,
        order_R: Tensor,
        inverse_R: Tensor,
        num_rows: Tensor,
        num_choices: int,
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, order_R, num_rows)
        ctx.num_choices = num_choices
        return launch_combine_fwd(y_RD, weights_TK, inverse_R, num_rows, num_choices)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_RD, weights_TK, order_R, num_rows = ctx.saved_tensors
        dy_RD, dweights_TK = launch_combine_bwd(
            grads[0],
            y_RD,
            weights_TK,
            order_R,
            num_rows,
            ctx.num_choices,
            needs_dy=ctx.needs_input_grad[0],
            needs_dweights=ctx.needs_input_grad[1],
        )
        return dy_RD, dweights_TK, None, None, None, None


def combine_triton(
    y_RD: Tensor, weights_TK: Tensor | None, sorted_tokens: SortedTokens, num_choices: int
) -> Tensor:
    """`combine` on a GPU, or in Triton's interpreter."""
    check_triton_dtype(y_RD)
    if y_RD.stride(1) != 1:
        y_RD = y_RD.contiguous()
    result = _Combine.apply(
        y_RD,
        weights_TK,
        sorted_tokens.order_R,
        sorted_tokens.inverse_R,
        sorted_tokens.offsets_E1[-1:],
        num_choices,
    )
    return result  # type: ignore[no-any-return]
