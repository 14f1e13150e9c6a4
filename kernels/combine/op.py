"""`combine`: validation and choice of the implementation.

Shape suffixes: T tokens, K choices a token, D model, E experts, R = T*K routed rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import resolve_impl

CombineImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[CombineImpl, ...] = ("auto", "triton", "torch", "reference")


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
    an expert, in order of k with sums in fp32. No atomics: the same bits in every run.
    Differentiable in `y` and in the weights; gradients of assignments and rows without an expert
    are zero.

    Args:
        y_RD: `[R, D]`, rows in the order of `sorted_tokens`. Rows past the last real one may hold
            anything.
        weights_TK: `[T, K]` in any floating dtype, or None for weights of 1.
        sorted_tokens: Of the same ids.
        num_choices: K, needed when `weights_TK` is None.
        impl: As in `token_sort`.

    Returns:
        `[T, D]` in the dtype of `y`.

    Raises:
        ValueError: Shapes do not belong together, or `impl` cannot run here.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
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
            f"{num_assignments} assignments are no whole number of tokens of {num_choices}"
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
    """`[T, D]`: the sum over k of `weights[t, k] * y[inverse[t, k]]`, in order of k.

    Sums are kept in fp32 (fp64 for fp64) and rounded once. A slot whose row is not below `num_rows`
    adds nothing, whatever its weight and whatever lies in `y` there.
    """
    precise = precise_dtype(y_RD)
    num_tokens, num_choices = inverse_TK.shape
    total = torch.zeros(num_tokens, y_RD.shape[1], dtype=precise, device=y_RD.device)
    for k in range(num_choices):
        is_real = (inverse_TK[:, k] < num_rows)[:, None]
        rows_TD = y_RD[inverse_TK[:, k]].to(precise)
        if weights_TK is not None:
            # Chosen before the product: what was never written may be infinite, and 0 * inf is NaN.
            rows_TD = torch.where(is_real, rows_TD, 0)
            rows_TD = rows_TD * weights_TK[:, k, None].to(precise)
        total = total + torch.where(is_real, rows_TD, 0)
    return total.to(y_RD.dtype)
