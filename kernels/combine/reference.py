"""The specification of `combine`: plain torch, differentiable, one choice after another."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype


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
