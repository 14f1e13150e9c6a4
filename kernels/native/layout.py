"""Where a tensor lies, for what remembers addresses."""

from __future__ import annotations

import torch
from torch import Tensor


def place_of(tensor: Tensor) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """Address, dtype, shape and strides: equal as long as a kernel may read the same addresses."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
