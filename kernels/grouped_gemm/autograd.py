"""Autograd around the Triton kernels of `grouped_gemm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.grouped_gemm.backward import bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.token_sort import SortedTokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def like_parameter(parameter: Tensor, groups: Groups) -> Tensor:
    """Memory for a gradient that the kernels will write for every expert with a slot.

    With a slot table there may be slots that hold no expert; those are zero.
    """
    if groups.slot_of_expert is not None:
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_SNK: Tensor,
        bias_SN: Tensor | None,
        offsets_E1: Tensor,
        slot_of_expert: Tensor | None,
        order_R: Tensor | None,
        inverse_R: Tensor | None,
        gathers_choices: int,
        scatters: bool,
    ) -> Tensor:
        num_rows = len(x) if order_R is None else len(order_R)
        groups = Groups(
            offsets_E1, num_rows, slot_of_expert, order_R, num_choices=max(1, gathers_choices)
        )
        ctx.save_for_backward(
            x, weight_SNK, bias_SN, offsets_E1, slot_of_expert, order_R, inverse_R
        )
        ctx.groups = groups
        ctx.gathers_choices, ctx.scatters = gathers_choices, scatters
        return plain_product(
            x,
            weight_SNK,
            groups,
            out=x.new_zeros(num_rows, weight_SNK.shape[1]),
            bias_SN=bias_SN,
            gathers=gathers_choices > 0,
            scatters=scatters,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_SNK, bias_SN, offsets_E1, _, _, inverse_R = ctx.saved_tensors
        dout, groups = grads[0], ctx.groups
        left_divisor = 1 if ctx.scatters else 0
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            by_slot = Groups(
                groups.offsets_E1, groups.num_rows, groups.slot_of_expert, groups.order_R
            )
            dx = plain_product(
                dout,
                weight_SNK.transpose(1, 2),
                by_slot,
                out=x.new_zeros(groups.num_rows, x.shape[1]),
                gathers=ctx.scatters,
            )
            if ctx.gathers_choices:
                dx = launch_combine_fwd(dx, None, inverse_R, offsets_E1[-1:], ctx.gathers_choices)
        if ctx.needs_input_grad[1]:
            dweight = weight_grad(
                dout,
                x,
                groups,
                out_SNK=like_parameter(weight_SNK, groups),
                left_divisor=left_divisor,
                right_divisor=ctx.gathers_choices,
            )
        if ctx.needs_input_grad[2]:
            dbias = bias_grad(
                dout,
                groups,
                out_SN=like_parameter(bias_SN, groups),
                divisor=left_divisor,
            )
        return dx, dweight, dbias, None, None, None, None, None, None


def grouped_gemm_triton(
    x: Tensor,
    weight_SNK: Tensor,
    bias_SN: Tensor | None,
    offsets_E1: Tensor,
    slot_of_expert: Tensor | None,
    sorted_tokens: SortedTokens | None,
    *,
    gathers_choices: int,
    scatters: bool,
    out: Tensor | None,
) -> Tensor:
    """`grouped_gemm` on a GPU, or in Triton's interpreter.

    Raises:
        ValueError: A dtype that the kernels do not compute in, or an `out` that is not row-major.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"impl='triton' takes fp32, bf16 or fp16, got {x.dtype}")
    order_R = None if sorted_tokens is None else sorted_tokens.order_R
    inverse_R = None if sorted_tokens is None else sorted_tokens.inverse_R
    if out is not None:
        if out.stride(1) != 1:
            raise ValueError(f"out must have unit stride along N, got strides {out.stride()}")
        num_rows = len(x) if order_R is None else len(order_R)
        groups = Groups(offsets_E1, num_rows, slot_of_expert, order_R, max(1, gathers_choices))
        return plain_product(
            x,
            weight_SNK,
            groups,
            out=out,
            bias_SN=bias_SN,
            gathers=gathers_choices > 0,
            scatters=scatters,
        )
    result = _GroupedGemm.apply(
        x,
        weight_SNK,
        bias_SN,
        offsets_E1,
        slot_of_expert,
        order_R,
        inverse_R,
        gathers_choices,
        scatters,
    )
    return result  # type: ignore[no-any-return]
