"""`batched_matmul` in plain torch: the specification."""

import torch
from torch import Tensor


def batched_matmul_reference(x: Tensor, w: Tensor, *, transpose_w: bool) -> Tensor:
    """Multiplies in fp32, or in fp64 when `x` is fp64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrices = w.to(wide)
    return x.to(wide) @ (matrices.transpose(-1, -2) if transpose_w else matrices)
