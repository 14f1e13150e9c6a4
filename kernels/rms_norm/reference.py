"""`rms_norm` in plain torch: the specification."""

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in fp32, or in fp64 when `x` is fp64, and rounds before and after the weight.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean of the squares.
    """
    wide = x.to(precise_dtype(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
