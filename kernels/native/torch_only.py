"""What only torch's own operations do: the compiled functions hide what they compute from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

NEEDS_TORCH = "it has no backward pass and takes no fake tensors; a gradient or these are wanted"


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether the result for these has to have a derivative, or they are shapes without values."""
    records = torch.is_grad_enabled()
    for one in tensors:
        if isinstance(one, FakeTensor) or (records and one is not None and one.requires_grad):
            return True
    return forward_ad._current_level >= 0
