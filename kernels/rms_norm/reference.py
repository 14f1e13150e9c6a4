"""`rms_norm` in plain torch: the specification."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in fp32, or in fp64 when `x` is fp64, and rounds before and after the weight."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
