"""`batched_matmul`: validation and choice of the implementation.

Shape suffixes: B outer batch, H inner batch, M rows of x, N rows of a matrix, K its columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.batched_matmul.reference import batched_matmul_reference
from moe_runtime.kernels.native import (
    DTYPE_CODES,
    NativeLibrary,
    native_library,
    require_native,
)

MAX_COLUMNS = 8192
"""Longest row of a matrix: the kernel keeps one on the stack."""

Impl = Literal["auto", "native", "reference"]


def batched_matmul(
    x_BHMC: Tensor, w_BHNK: Tensor, *, transpose_w: bool, impl: Impl = "auto"
) -> Tensor:
    """Multiplies a few rows by each of `B * H` matrices, every matrix read once, in fp32.

    Args:
        x_BHMC: `[B, H, M, K]` with `transpose_w`, else `[B, H, M, N]`; fp32, contiguous.
        w_BHNK: `[B, H, N, K]`; fp32, bf16 or fp16, unit stride along K, any other strides.
        transpose_w: Whether to multiply by the transposed matrices.
        impl: `native` is the C kernel (CPU, inference only), `reference` plain torch; `auto` takes
            the native one where it is able. A named implementation never falls back.

    Returns:
        `[B, H, M, N]` with `transpose_w`, else `[B, H, M, K]`; fp32.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or `impl="native"` cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    summed = w_BHNK.shape[-1 if transpose_w else -2]
    if x_BHMC.ndim != 4 or w_BHNK.ndim != 4 or x_BHMC.shape[-1] != summed:
        raise ValueError(
            f"expected x [B, H, M, {summed}] and w [B, H, N, K], got {list(x_BHMC.shape)} and "
            f"{list(w_BHNK.shape)}"
        )
    if x_BHMC.shape[:2] != w_BHNK.shape[:2]:
        raise ValueError(
            f"x and w must have one batch, got {list(x_BHMC.shape)} and {list(w_BHNK.shape)}"
        )
    if impl == "native":
        require_native()
        problem = _native_problem(x_BHMC, w_BHNK)
        if problem:
            raise ValueError(f"impl='native' cannot compute this: {problem}")
    elif impl not in ("auto", "reference"):
        raise ValueError(f"impl must be one of auto, native, reference, got {impl!r}")
    library = native_library()
    if impl == "reference" or library is None or _native_problem(x_BHMC, w_BHNK):
        return batched_matmul_reference(x_BHMC, w_BHNK, transpose_w=transpose_w)
    return _run_native(library, x_BHMC, w_BHNK, transpose_w)


def _native_problem(x: Tensor, w: Tensor) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    if not (x.is_cpu and w.is_cpu):
        return f"it needs CPU tensors, got {x.device} and {w.device}"
    if x.dtype != torch.float32 or w.dtype not in DTYPE_CODES:
        return f"it knows fp32 x and fp32, bf16 or fp16 matrices, got {x.dtype} and {w.dtype}"
    if w.shape[-1] > MAX_COLUMNS:
        return f"rows have at most {MAX_COLUMNS} elements, got {w.shape[-1]}"
    if w.stride(-1) != 1 and w.shape[-1] > 1:
        return f"matrices need unit stride along their rows, got strides {w.stride()}"
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return "it has no backward pass, and a gradient is wanted"
    return None


def _run_native(library: NativeLibrary, x: Tensor, w: Tensor, transpose_w: bool) -> Tensor:
    x = x.contiguous()
    outer, inner, rows, _ = x.shape
    out = x.new_empty((outer, inner, rows, w.shape[2 if transpose_w else 3]))
    size = w.element_size()
    library.batched_matmul(
        x.data_ptr(),
        w.data_ptr(),
        out.data_ptr(),
        outer,
        inner,
        rows,
        w.shape[2],
        w.shape[3],
        w.stride(0) * size,
        w.stride(1) * size,
        w.stride(2) * size,
        DTYPE_CODES[w.dtype],
        transpose_w,
        library.shares_threads(),
    )
    return out
