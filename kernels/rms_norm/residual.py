"""`add_rms_norm`: a residual is added, and the sum is normalised."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from moe_runtime.kernels.rms_norm.gpu import add_by_triton
from moe_runtime.kernels.rms_norm.op import rms_norm
from moe_runtime.kernels.rms_norm.reference import NormForm, rms_norm_reference

AddImpl = Literal["auto", "triton", "reference"]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    form: NormForm = "rounded",
    impl: AddImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """`x + residual` in their dtype, and `rms_norm` of it, in the bits of the two one by one.

    Args:
        x: `[..., D]`.
        residual: The shape and dtype of `x`.
        weight: `[D]`, dtype of `x`.
        eps: As of `rms_norm`.
        form: As of `rms_norm`.
        impl: `triton` is one kernel, for inference only; `auto` takes it on a GPU where it is able,
            and else torch's sum and `rms_norm`. A named implementation never falls back.

    Returns:
        The sum and the normalised sum, both of the shape and dtype of `x`.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the kernel cannot take the input.
        TritonUnavailableError: `impl="triton"` and Triton is not installed.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            "expected a residual of the shape and dtype of x, got "
            f"{list(residual.shape)} {residual.dtype} for {list(x.shape)} {x.dtype}"
        )
    if impl == "triton" or (x.is_cuda and impl == "auto"):
        is_asked_for = impl == "triton"
        found = add_by_triton(x, residual, weight, eps, form, is_asked_for=is_asked_for)
        if found is not None:
            return found
    total = x + residual
    if impl == "auto":
        return total, rms_norm(total, weight, eps, form=form)
    if impl == "reference":
        return total, rms_norm_reference(total, weight, eps, form)
    raise ValueError(f"impl must be one of auto, triton, reference, got {impl!r}")
