"""Whether somebody differentiates: the compiled functions hide what they compute from torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_BACKWARD = "it has no backward pass, and a gradient is wanted"


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether the result for these tensors has to have a derivative, backward or forward."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
