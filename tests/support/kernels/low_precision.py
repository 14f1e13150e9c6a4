"""Tolerances that are measured, not chosen."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_as_good_as_eager(
    found: Tensor, eager: Tensor, exact: Tensor, what: str = "", *, dtype: torch.dtype | None = None
) -> None:
    """Holds a kernel to twice the error of the same computation in eager torch.

    Where there are few values eager may be nearly exact by luck, so four roundings of the largest
    value are allowed beside it: of input, pre-activation, hidden value and result.

    Args:
        found: The kernel's result.
        eager: The result of plain torch operations in the same dtype.
        exact: The result in fp64 from the same (rounded) inputs.
        what: Named in the failure.
        dtype: What the computation rounds to, if not the dtype of the result.
    """
    assert found.dtype == eager.dtype, what
    assert found.shape == exact.shape, what
    if not exact.numel():
        return
    rounding = UNIT_ROUNDOFF[dtype or found.dtype] * float(exact.abs().max())
    budget = 2 * float((eager.double() - exact).abs().max()) + 4 * rounding
    error = float((found.double().cpu() - exact).abs().max())
    assert error <= budget, f"{what}: error {error:.3e}, allowed {budget:.3e}"


def assert_rounded_only(found: Tensor, exact: Tensor, what: str = "") -> None:
    """Holds plain torch itself to fp64: eight roundings of independent sign, as a norm.

    An eager run serves as a yardstick only as long as it computes the same thing.
    """
    error = float((found.double() - exact.double()).norm())
    budget = 8 * UNIT_ROUNDOFF[found.dtype] * float(exact.norm())
    assert error <= budget, f"{what}: error {error:.3e}, allowed {budget:.3e}"
