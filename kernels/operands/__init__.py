"""What every op asks of its operands, and what it computes sums in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def precise_dtype(x: Tensor) -> torch.dtype:
    """What sums over values of the dtype of `x` are kept in: fp32, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_choice(impl: str, impls: Sequence[str]) -> None:
    """Refuses names of no implementation.

    Raises:
        ValueError: The name is unknown.
    """
    if impl not in impls:
        raise ValueError(f"impl must be one of {', '.join(impls)}, got {impl!r}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], reason: str = "") -> None:
    """Refuses a tensor of another shape.

    Args:
        name: Of the argument.
        tensor: What was given.
        shape: What it must be.
        reason: Why, as in "for this topology".

    Raises:
        ValueError: The shapes differ.
    """
    if tuple(tensor.shape) != tuple(shape):
        why = f" {reason}" if reason else ""
        raise ValueError(f"{name} must be {list(shape)}{why}, got {list(tensor.shape)}")


def check_like(name: str, tensor: Tensor, like: Tensor, other: str) -> None:
    """Refuses a tensor of another dtype or on another device than `like`, which is called `other`.

    Raises:
        ValueError: They differ.
    """
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} like {other}, got {tensor.dtype} on "
            f"{tensor.device}"
        )
