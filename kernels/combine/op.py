"""`combine` and `combine_assignments`: the weighted sums of expert outputs.

Shape suffixes: T tokens, K choices a token, D model, E experts, R = T*K routed rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.native import (
    DTYPE_CODES,
    STATUS_NO_MEMORY,
    kernel_problem,
    native_library,
    require_native,
)
from moe_runtime.kernels.operands import check_choice, precise_dtype
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import resolve_impl

CombineImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[CombineImpl, ...] = ("auto", "triton", "torch", "reference")
AssignmentsImpl = Literal["auto", "native", "reference"]
MAX_CHOICES = 1024  # of a token in the C kernel, which keeps their weights on the stack
_TOKENS_PER_PRODUCT = 256  # in torch, which copies their rows in fp32


def combine(
    y_RD: Tensor,
    weights_TK: Tensor | None,
    sorted_tokens: SortedTokens,
    *,
    num_choices: int | None = None,
    impl: CombineImpl = "auto",
) -> Tensor:
    """Adds up the expert outputs of each token, weighted by its gate.

    `out[t] = sum_k weights[t, k] * y[row of assignment t * K + k]`, over the assignments that have
    an expert, in order of k with fp32 sums. No atomics: the same bits in every run. Differentiable
    in `y` and the weights; gradients of assignments and rows without an expert are zero.

    Args:
        y_RD: Rows in the order of `sorted_tokens`; rows past the last real one may hold anything.
        weights_TK: Any floating dtype, or None for weights of 1.
        sorted_tokens: Of the same ids.
        num_choices: K, needed if `weights_TK` is None.
        impl: As in `token_sort`.

    Returns:
        `[T, D]` in the dtype of `y`.

    Raises:
        ValueError: Shapes do not fit, or `impl` cannot run here.
        TritonUnavailableError: Triton is needed and not installed.
    """
    if weights_TK is not None:
        if weights_TK.ndim != 2:
            raise ValueError(f"weights must be [T, K], got {list(weights_TK.shape)}")
        num_choices = weights_TK.shape[1]
    if num_choices is None:
        raise ValueError("num_choices is needed where there are no weights to tell it")
    num_assignments = len(sorted_tokens.inverse_R)
    if num_choices < 1 or num_assignments % num_choices:
        raise ValueError(
            f"{num_assignments} assignments are not a whole number of tokens of {num_choices}"
        )
    num_tokens = num_assignments // num_choices
    if weights_TK is not None and weights_TK.shape[0] != num_tokens:
        raise ValueError(
            f"weights must be [{num_tokens}, {num_choices}] for {num_assignments} sorted "
            f"assignments, got {list(weights_TK.shape)}"
        )
    if y_RD.ndim != 2 or len(y_RD) != num_assignments:
        raise ValueError(f"y must be [{num_assignments}, D], got {list(y_RD.shape)}")
    if y_RD.device != sorted_tokens.inverse_R.device:
        raise ValueError(
            f"y is on {y_RD.device}, the sorted tokens on {sorted_tokens.inverse_R.device}"
        )
    if resolve_impl(impl, y_RD.device, IMPLS) == "triton":
        from moe_runtime.kernels.combine.kernel import combine_triton

        return combine_triton(y_RD, weights_TK, sorted_tokens, num_choices)
    inverse_TK = sorted_tokens.inverse_R.view(num_tokens, num_choices)
    return combine_reference(y_RD, weights_TK, inverse_TK, sorted_tokens.offsets_E1[-1])


def combine_reference(
    y_RD: Tensor, weights_TK: Tensor | None, inverse_TK: Tensor, num_rows: Tensor
) -> Tensor:
    """The specification of `combine`: `[T, D]`, in order of k, differentiable.

    Sums are in fp32 (fp64 for fp64) and rounded once. A slot whose row is not below `num_rows` adds
    nothing, whatever its weight and its row of `y`.
    """
    precise = precise_dtype(y_RD)
    num_tokens, num_choices = inverse_TK.shape
    total = torch.zeros(num_tokens, y_RD.shape[1], dtype=precise, device=y_RD.device)
    for k in range(num_choices):
        is_real = (inverse_TK[:, k] < num_rows)[:, None]
        rows_TD = y_RD[inverse_TK[:, k]].to(precise)
        if weights_TK is not None:
            # chosen before the product: unwritten rows may be infinite, and 0 * inf is NaN
            rows_TD = torch.where(is_real, rows_TD, 0)
            rows_TD = rows_TD * weights_TK[:, k, None].to(precise)
        total = total + torch.where(is_real, rows_TD, 0)
    return total.to(y_RD.dtype)


def combine_assignments(
    y_RD: Tensor, weights_TK: Tensor, *, impl: AssignmentsImpl = "auto"
) -> Tensor:
    """`combine` of rows in the order of choices, without Triton.

    `out[t] = sum_k weights[t, k] * y[t * K + k]` with fp32 sums, rounded once.

    Args:
        y_RD: `[T * K, D]`.
        weights_TK: Any floating dtype.
        impl: `native` (C, CPU, inference only), `reference` (torch), or `auto`: native if possible.

    Returns:
        `[T, D]` in the dtype of `y`.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    if weights_TK.ndim != 2 or y_RD.ndim != 2 or y_RD.shape[0] != weights_TK.numel():
        raise ValueError(
            f"expected y [T * K, D] and weights [T, K], got {list(y_RD.shape)} and "
            f"{list(weights_TK.shape)}"
        )
    check_choice(impl, ("auto", "native", "reference"))
    library = require_native() if impl == "native" else native_library()
    problem = _native_problem(y_RD, weights_TK) if impl != "reference" else None
    if impl == "native" and problem:
        raise ValueError(f"impl='native' cannot compute this: {problem}")
    if impl == "reference" or library is None or problem:
        return combine_assignments_reference(y_RD, weights_TK)
    y, weights = y_RD.contiguous(), weights_TK.contiguous()
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


def combine_assignments_reference(y_RD: Tensor, weights_TK: Tensor) -> Tensor:
    """The specification of `combine_assignments` in torch; in fp64 if `y` is fp64."""
    wide = precise_dtype(y_RD)
    num_choices = weights_TK.shape[1]
    parts = zip(
        y_RD.split(_TOKENS_PER_PRODUCT * num_choices),
        weights_TK.split(_TOKENS_PER_PRODUCT),
        strict=True,
    )
    summed = [
        (weights.to(wide)[:, None] @ y.to(wide).unflatten(0, weights.shape))[:, 0].to(y.dtype)
        for y, weights in parts
    ]
    return summed[0] if len(summed) == 1 else torch.cat(summed)


def _native_problem(y: Tensor, weights: Tensor) -> str | None:
    """Why the C kernel cannot take these, or None."""
    if not 0 < weights.shape[1] <= MAX_CHOICES:
        return f"it takes 1 to {MAX_CHOICES} choices a token, got {weights.shape[1]}"
    return kernel_problem(y, weights)
