"""The specification of `linear`: plain torch, differentiable, sums in fp32 or better."""

from __future__ import annotations

from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, computed in fp32 (fp64 for fp64 input) and rounded to x's dtype once.

    Args:
        x: `[..., K]`, floating point.
        weight: `[N, K]`.
        bias: `[N]` or None.

    Returns:
        `[..., N]` in the dtype of `x`.
    """
    precise = precise_dtype(x)
    y = x.to(precise) @ weight.to(precise).T
    if bias is not None:
        y = y + bias.to(precise)
    return y.to(x.dtype)
