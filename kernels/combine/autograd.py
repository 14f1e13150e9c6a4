"""Autograd around the Triton kernels of `combine`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_bwd, launch_combine_fwd
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import check_triton_dtype


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
    """`combine` on a GPU, or in Triton's interpreter.

    Raises:
        ValueError: fp64, which the kernels do not accumulate in.
    """
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
