"""`combine_assignments`: the weighted sum over expert outputs that lie in the order of choices.

Shape suffixes: T tokens, K choices a token, D model, R = T*K routed rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.native import (
    DTYPE_CODES,
    NEEDS_TORCH,
    STATUS_NO_MEMORY,
    NativeLibrary,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.operands import precise_dtype

TOKENS_PER_PRODUCT = 256
"""Tokens summed at once in plain torch, which copies their rows in fp32."""

MAX_CHOICES = 1024
"""Most experts a token: the kernel keeps their weights on the stack."""

Impl = Literal["auto", "native", "reference"]


def combine_assignments(y_RD: Tensor, weights_TK: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Adds up the expert outputs of each token, weighted by its gate, in the order of its choices.

    `out[t] = sum_k weights[t, k] * y[t * K + k]` with sums in fp32, rounded once.

    Args:
        y_RD: `[T * K, D]`.
        weights_TK: `[T, K]` in any floating dtype.
        impl: `native` is the C kernel (CPU, inference only), `reference` plain torch; `auto` takes
            the native one where it is able. A named implementation never falls back.

    Returns:
        `[T, D]` in the dtype of `y`.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or `impl="native"` cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    if weights_TK.ndim != 2 or y_RD.ndim != 2 or y_RD.shape[0] != weights_TK.numel():
        raise ValueError(
            f"expected y [T * K, D] and weights [T, K], got {list(y_RD.shape)} and "
            f"{list(weights_TK.shape)}"
        )
    library = native_library() if impl == "auto" else None
    if impl == "native":
        library = require_native()
        problem = _native_problem(y_RD, weights_TK)
        if problem:
            raise ValueError(f"impl='native' cannot compute this: {problem}")
    elif impl not in ("auto", "reference"):
        raise ValueError(f"impl must be one of auto, native, reference, got {impl!r}")
    if library is None or (impl == "auto" and _native_problem(y_RD, weights_TK)):
        return combine_assignments_reference(y_RD, weights_TK)
    return _run_native(library, y_RD, weights_TK)


def combine_assignments_reference(y_RD: Tensor, weights_TK: Tensor) -> Tensor:
    """The specification of `combine_assignments`, in plain torch; in fp64 when `y` is fp64."""
    wide = precise_dtype(y_RD)
    num_choices = weights_TK.shape[1]
    parts = zip(
        y_RD.split(TOKENS_PER_PRODUCT * num_choices),
        weights_TK.split(TOKENS_PER_PRODUCT),
        strict=True,
    )
    summed = [
        (weights.to(wide)[:, None] @ y.to(wide).unflatten(0, weights.shape))[:, 0].to(y.dtype)
        for y, weights in parts
    ]
    return summed[0] if len(summed) == 1 else torch.cat(summed)


def _native_problem(y: Tensor, weights: Tensor) -> str | None:
    """Why the C kernel cannot take these, or None."""
    if not (y.is_cpu and weights.is_cpu):
        return f"it needs CPU tensors, got {y.device} and {weights.device}"
    if y.dtype not in DTYPE_CODES or weights.dtype not in DTYPE_CODES:
        return f"it knows fp32, bf16 and fp16, got {y.dtype} and {weights.dtype}"
    if not 0 < weights.shape[1] <= MAX_CHOICES:
        return f"it takes 1 to {MAX_CHOICES} choices a token, got {weights.shape[1]}"
    if needs_torch(y, weights):
        return NEEDS_TORCH
    return None


def _run_native(library: NativeLibrary, y: Tensor, weights: Tensor) -> Tensor:
    y, weights = y.contiguous(), weights.contiguous()
    num_tokens, num_choices = weights.shape
    out = y.new_empty((num_tokens, y.shape[1]))
    status = library.combine_slots(
        y.data_ptr(), weights.data_ptr(), out.data_ptr(),
        num_tokens, num_choices, y.shape[1],
        DTYPE_CODES[y.dtype], DTYPE_CODES[weights.dtype], library.shares_threads(),
    )  # fmt: skip
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory to sum rows of {y.shape[1]} values")
    return out
