"""Gradients that refuse to be differentiated once more.

torch's `once_differentiable` refuses it only where a backward pass visits every node. With named
inputs (`torch.autograd.grad`, `torch.autograd.functional`) nobody comes by its error, and what is
missing would count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor


def refusing(
    gradients: Sequence[Tensor | None],
    sources: Sequence[Tensor | None],
    kind: type[Exception] = RuntimeError,
    message: str = (
        "these experts have no second derivatives: make the layer with impl='reference' "
        "(in transformers, experts_implementation='eager')"
    ),
) -> list[Tensor | None]:
    """These gradients, as results of `sources`: a derivative of them raises an error.

    Args:
        gradients: What a backward pass found; None stays None.
        sources: All that the gradients depend on.
        kind: Of the error.
        message: Its text.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    given = iter(_Refusing.apply(kind, message, len(found), *found, *sources) if found else ())
    return [None if gradient is None else next(given) for gradient in gradients]


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: type[Exception], message: str, num_gradients: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.kind, ctx.message = kind, message
        return tuple(tensor.detach() for tensor in tensors[:num_gradients])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ctx.kind(ctx.message)
