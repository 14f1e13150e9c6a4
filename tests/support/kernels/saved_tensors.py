"""What a forward pass keeps for the backward pass, by asking autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], Tensor], *, but: Iterable[Tensor | None]) -> int:
    """Bytes of memory that autograd keeps alive for the gradient of `call()`.

    Memory that several saved tensors share counts once.

    Args:
        call: The forward pass.
        but: Tensors that are there anyway: the parameters.
    """
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    for tensor in but:
        if tensor is not None:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
