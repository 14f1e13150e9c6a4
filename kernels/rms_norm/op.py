"""`rms_norm`, also of the sum with a residual."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.native import (
    DTYPE_CODES,
    NativeLibrary,
    kernel_problem,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.triton_support import require_triton

NormForm = Literal["rounded", "wide", "plus_one"]
FORMS: tuple[NormForm, ...] = ("rounded", "wide", "plus_one")


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, form: NormForm = "rounded") -> Tensor:
    """The specification, in fp32, or in fp64 when `x` is fp64."""
    wide = x.to(precise_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if form == "rounded":
        return weight * normed.to(x.dtype)
    return (normed * (weight.to(normed.dtype) + (form == "plus_one"))).to(x.dtype)


MOST_COLUMNS = 16384  # of a row that one program of the Triton kernel holds
ROWS_ALONE = 64  # rows that the calling thread normalises alone, as in `norm.c`

Impl = Literal["auto", "native", "triton", "reference"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, form: NormForm = "rounded", impl: Impl = "auto"
) -> Tensor:
    """Divides rows by their root mean square and multiplies by a weight (Zhang and Sennrich, 2019).

    Args:
        x: `[..., D]`.
        weight: `[D]`, dtype of `x`.
        eps: Added to the mean of squares.
        form: `rounded` rounds the row to the dtype of `x` before the weight is applied (Llama);
            `wide` rounds once, after it (gpt-oss); `plus_one` is `wide` with the weight plus one
            (Gemma, Qwen3-Next).
        impl: `native` (C, CPU) and `triton` (GPU) are for inference only, `reference` is torch;
            `auto` takes a kernel if possible.

    Returns:
        The shape and dtype of `x`. A kernel's result for a row does not depend on other rows.

    Raises:
        ValueError: Shapes do not fit, a name is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
        TritonUnavailableError: `impl="triton"` and Triton is not installed.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if impl == "triton" or (x.is_cuda and impl == "auto"):
        found = _by_triton(x, weight, eps, form, is_asked_for=impl == "triton")
        if found is not None:
            return found[1]
    if impl == "auto":
        library = native_library()
        # torch reports invalid arguments
        if (
            library is not None
            and x.numel() > 0
            and weight.shape == x.shape[-1:]
            and native_problem(x, weight) is None
            and not torch.compiler.is_compiling()
        ):
            return _run_native(library, x, weight, eps, form)
        return rms_norm_reference(x, weight, eps, form)
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"expected x [..., D] and weight [D], got {list(x.shape)} and {list(weight.shape)}"
        )
    if impl == "native":
        library = require_native()
        problem = native_problem(x, weight)
        if problem:
            raise ValueError(f"impl='native' cannot compute this: {problem}")
        return _run_native(library, x, weight, eps, form)
    if impl == "reference":
        return rms_norm_reference(x, weight, eps, form)
    raise ValueError(f"impl must be one of auto, native, triton, reference, got {impl!r}")


def native_problem(x: Tensor, weight: Tensor) -> str | None:
    """Why the C kernel cannot take these, or None."""
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return f"it needs a contiguous weight in the dtype of x, got {weight.dtype} and {x.dtype}"
    return kernel_problem(x, weight)


def _run_native(
    library: NativeLibrary, x: Tensor, weight: Tensor, eps: float, form: NormForm
) -> Tensor:
    dim = weight.shape[0]
    rows = x if x.is_contiguous() else x.contiguous()
    out = torch.empty_like(rows)
    library.rms_norm(
        rows.data_ptr(),
        dim * rows.element_size(),
        rows.numel() // max(dim, 1),
        weight.data_ptr(),
        out.data_ptr(),
        dim,
        eps,
        DTYPE_CODES[rows.dtype],
        FORMS.index(form),
        library.shares_threads(),
    )
    return out


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
    """`x + residual` in their dtype, and its `rms_norm`, with the bits of the two in turn.

    `triton` is one kernel, for inference only; `auto` takes it on a GPU if possible.

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
        found = _by_triton(x, weight, eps, form, residual, is_asked_for=impl == "triton")
        if found is not None:
            return found
    total = x + residual
    if impl == "auto":
        return total, rms_norm(total, weight, eps, form=form)
    if impl == "reference":
        return total, rms_norm_reference(total, weight, eps, form)
    raise ValueError(f"impl must be one of auto, triton, reference, got {impl!r}")


def _by_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    form: NormForm,
    residual: Tensor | None = None,
    *,
    is_asked_for: bool,
) -> tuple[Tensor, Tensor] | None:
    """The normalised sum and the result; None if the kernel cannot take them, unless asked for."""
    if is_asked_for:
        require_triton(x.device)
    if (
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
        and (residual is None or (residual.device == x.device and not needs_torch(residual)))
    ):
        from moe_runtime.kernels.rms_norm.kernel import launch_rms_norm

        return launch_rms_norm(x, weight, eps, form, residual)
    if not is_asked_for:
        return None
    raise ValueError(
        "impl='triton' takes fp32, bf16 and fp16, the same for both, at least one row of 1 to "
        f"{MOST_COLUMNS} columns and no gradients, got {x.dtype} {list(x.shape)} and "
        f"{weight.dtype} {list(weight.shape)}"
    )
