"""Autograd around the Triton kernels of `grouped_gemm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.grouped_gemm.backward import bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.triton_support import check_triton_dtype


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
        groups: Groups,
        inverse_R: Tensor | None,
        moves: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_SNK, bias_SN, inverse_R)
        ctx.groups, ctx.moves = groups, moves
        out = x.new_zeros(groups.num_rows, weight_SNK.shape[1])
        return plain_product(x, weight_SNK, groups, out=out, bias_SN=bias_SN, **moves)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_SNK, bias_SN, inverse_R = ctx.saved_tensors
        dout, groups, moves = grads[0], ctx.groups, ctx.moves
        left = 1 if moves["scatters"] else 0
        right = groups.num_choices if moves["gathers"] else 0
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            by_slot, to_rows = replace(groups, num_choices=1), weight_SNK.transpose(1, 2)
            dx = x.new_zeros(groups.num_rows, x.shape[1])
            plain_product(dout, to_rows, by_slot, out=dx, gathers=moves["scatters"])
            if right:
                dx = launch_combine_fwd(dx, None, inverse_R, groups.offsets_E1[-1:], right)
        if ctx.needs_input_grad[1]:
            out = like_parameter(weight_SNK, groups)
            divisors = {"left_divisor": left, "right_divisor": right}
            dweight = weight_grad(dout, x, groups, out_SNK=out, **divisors)
        if ctx.needs_input_grad[2]:
            out = like_parameter(bias_SN, groups)
            dbias = bias_grad(dout, groups, out_SN=out, divisor=left)
        return dx, dweight, dbias, None, None, None


def grouped_gemm_triton(
    x: Tensor,
    weight_SNK: Tensor,
    bias_SN: Tensor | None,
    groups: Groups,
    inverse_R: Tensor | None,
    *,
    gathers: bool,
    scatters: bool,
    out: Tensor | None,
) -> Tensor:
    """`grouped_gemm` on a GPU, or in Triton's interpreter.

    Raises:
        ValueError: A dtype that the kernels do not compute in, or an `out` that is not row-major.
    """
    check_triton_dtype(x)
    moves: dict[str, Any] = {"gathers": gathers, "scatters": scatters}
    if out is not None:
        if out.stride(1) != 1:
            raise ValueError(f"out must have unit stride along N, got strides {out.stride()}")
        return plain_product(x, weight_SNK, groups, out=out, bias_SN=bias_SN, **moves)
    result = _GroupedGemm.apply(x, weight_SNK, bias_SN, groups, inverse_R, moves)
    return result  # type: ignore[no-any-return]
