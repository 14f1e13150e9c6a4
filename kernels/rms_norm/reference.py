"""`rms_norm` in plain torch: the specification."""

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype

NormForm = Literal["rounded", "wide", "plus_one"]
"""How a row that was divided is multiplied, see `rms_norm`."""
FORMS: tuple[NormForm, ...] = ("rounded", "wide", "plus_one")


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, form: NormForm = "rounded") -> Tensor:
    """Normalises in fp32, or in fp64 when `x` is fp64.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean of the squares.
        form: as of `rms_norm`.
    """
    wide = x.to(precise_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if form == "rounded":
        return weight * normed.to(x.dtype)
    return (normed * (weight.to(normed.dtype) + (form == "plus_one"))).to(x.dtype)
