"""What a linear layer may differ by from fp64, and operands of it."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(UNIT_ROUNDOFF)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close_to_fp64(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """One rounding to the output's type, and one to fp32 for each of the K + 8 operations of a sum.

    The second part is relative to the sum of absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1); a product that is left out exceeds it by far.
    """
    x64, weight64 = x.double(), weight.double()
    expected = x64 @ weight64.T
    magnitude = x64.abs() @ weight64.abs().T
    if bias is not None:
        expected = expected + bias.double()
        magnitude = magnitude + bias.double().abs()
    allowed = (
        UNIT_ROUNDOFF[y.dtype] * expected.abs() + torch.finfo(y.dtype).smallest_normal * 2**-11
    )
    allowed = allowed + (weight.shape[1] + 8) * 2.0**-24 * magnitude
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    excess = (y.double() - expected).abs() - 1.01 * allowed
    assert excess.max() <= 0, f"exceeds the allowed error by {excess.max()}"
