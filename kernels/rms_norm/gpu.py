"""What the Triton kernel of `rms_norm` can take."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from moe_runtime.kernels.native import DTYPE_CODES, needs_torch
from moe_runtime.kernels.rms_norm.reference import NormForm
from moe_runtime.kernels.triton_support import require_triton

MOST_COLUMNS = 16384
"""Of a row that one program holds."""


def run_triton(
    x: Tensor, weight: Tensor, eps: float, form: NormForm, *, is_asked_for: bool
) -> Tensor | None:
    """`rms_norm` by the Triton kernel; None where it is not able, unless it `is_asked_for`.

    Raises:
        ValueError: It is asked for and cannot take the input.
        TritonUnavailableError: It is asked for and Triton is not installed.
    """
    if is_asked_for:
        require_triton(x.device)
    if _can_take(x, weight):
        from moe_runtime.kernels.rms_norm.kernel import launch_rms_norm

        return launch_rms_norm(x, weight, eps, form)[1]
    if not is_asked_for:
        return None
    raise _refusal(x, weight)


def add_by_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: NormForm, *, is_asked_for: bool
) -> tuple[Tensor, Tensor] | None:
    """`add_rms_norm`, for operands of one shape and dtype; else as `run_triton`."""
    if is_asked_for:
        require_triton(x.device)
    if residual.device == x.device and _can_take(x, weight) and not needs_torch(residual):
        from moe_runtime.kernels.rms_norm.kernel import launch_rms_norm

        return launch_rms_norm(x, weight, eps, form, residual)
    if not is_asked_for:
        return None
    raise _refusal(x, weight)


def _refusal(x: Tensor, weight: Tensor) -> ValueError:
    return ValueError(
        "impl='triton' takes fp32, bf16 and fp16, the same for both, at least one row of 1 to "
        f"{MOST_COLUMNS} columns and no gradients, got {x.dtype} {list(x.shape)} and "
        f"{weight.dtype} {list(weight.shape)}"
    )


def _can_take(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() > 0
        and weight.shape == x.shape[-1:]
        and weight.shape[0] <= MOST_COLUMNS
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.dtype in DTYPE_CODES
        and weight.is_contiguous()
        and not needs_torch(x, weight)
        and not torch.compiler.is_compiling()
        and importlib.util.find_spec("triton") is not None
    )
