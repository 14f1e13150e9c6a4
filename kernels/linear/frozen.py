"""`linear` with a weight that is never trained, which its gradient reads where it lies.

Letters: R rows, K summed dimension, N outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from moe_runtime.kernels.linear.few_shapes import linear_of_few_shapes
from moe_runtime.kernels.linear.op import is_faster_widened, keeps_code, linear, takes_native
from moe_runtime.kernels.linear.quantized import quantized_linear, values_of
from moe_runtime.kernels.lossless import PlanesMatrix
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.quantized import QuantizedMatrix


def frozen_linear(
    x: Tensor, weight: Tensor | QuantizedMatrix | PlanesMatrix, bias: Tensor | None = None
) -> Tensor:
    """`linear` with gradients of `x` and `bias`; the same bits whether or not they are wanted.

    Args:
        x: `[R, K]`.
        weight: `[N, K]`, of which no copy is kept for the backward pass; of one that
            is quantised or coded the values are computed anew there.
        bias: `[N]`, or None.

    Returns:
        `[R, N]` in the dtype of `x`.
    """
    return cast(Tensor, _FrozenLinear.apply(x, weight, bias))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | QuantizedMatrix | PlanesMatrix, bias: Tensor | None
    ) -> Tensor:
        if not isinstance(weight, Tensor):
            ctx.quantized = weight
            return quantized_linear(x, weight, bias)
        ctx.quantized = None
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, None, Tensor | None]:  # type: ignore[override]
        if ctx.quantized is not None:
            weight_NK = values_of(ctx.quantized, grad_RN.dtype)
        else:
            (weight_NK,) = ctx.saved_tensors
        bias_grad_N = grad_RN.sum(dim=0) if ctx.needs_input_grad[2] else None
        return _times_weight(grad_RN, weight_NK), None, bias_grad_N


def _times_weight(grad_RN: Tensor, weight_NK: Tensor) -> Tensor:
    """``grad @ weight``, `[R, K]` in the dtype of `grad`, widened where that is exact or faster."""
    library = native_library() if grad_RN.is_cpu else None
    if library is not None and takes_native(library, grad_RN, weight_NK.T, None):
        return linear(grad_RN, weight_NK.T)
    widens = library is not None and is_faster_widened(library, weight_NK.dtype)
    if grad_RN.dtype == weight_NK.dtype and not widens:
        if keeps_code(grad_RN):
            return linear_of_few_shapes(grad_RN, weight_NK.T, None)
        return grad_RN @ weight_NK
    wide = torch.promote_types(grad_RN.dtype, torch.float32)
    return (grad_RN.to(wide) @ weight_NK.to(wide)).to(grad_RN.dtype)
