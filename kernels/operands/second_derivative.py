"""Backward passes whose gradients raise an error if they are differentiated once more.

torch's `once_differentiable` raises only if the incoming gradient has a graph and a backward pass
visits every node. With named inputs (`torch.autograd.grad`, `torch.autograd.functional`) no node
raises, and the missing part would count as zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

_EXPERTS = (
    "these experts have no second derivatives: make the layer with impl='reference' "
    "(in transformers, experts_implementation='eager')"
)


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """The autograd formula of an operator that computes gradients."""
    raise RuntimeError(_EXPERTS)


def first_derivatives_only(
    message: str = _EXPERTS, kind: type[Exception] = RuntimeError
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks the `backward` of an autograd function that autograd cannot see through.

    It runs without a graph. A derivative of its results by incoming gradients or saved tensors
    raises an error. So a nonlinear function saves its inputs, or an output from which the graph
    leads to them.
    """

    def mark(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            reader = _Reader(ctx)
            with torch.no_grad():
                found = backward(reader, *grads)
            several = found if isinstance(found, tuple) else (found,)
            tensors = [gradient for gradient in several if gradient is not None]
            sources = [t for t in (*grads, *reader.saved_tensors) if t is not None]
            given = iter(_Refusing.apply(kind, message, len(tensors), *tensors, *sources))
            return tuple(None if gradient is None else next(given) for gradient in several)

        return once

    return mark


class _Reader:
    """A context that unpacks saved tensors once: a checkpoint's may not be unpacked twice."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


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
