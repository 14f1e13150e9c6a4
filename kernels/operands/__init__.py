"""What every op asks of its operands, what it computes sums in, and devices by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def precise_dtype(x: Tensor) -> torch.dtype:
    """What sums over values of the dtype of `x` are kept in: fp32, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context that computes in the dtypes of its operands, whatever autocast is around it.

    Where none is, nothing is entered: after an interrupt within torch's own `__exit__`, autocast
    would keep narrow copies of weights until the process ends.
    """
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def find_device(device: str | torch.device, name: str = "device") -> torch.device:
    """The device that an option of that name says; "auto" is a GPU where there is one.

    Raises:
        ValueError: It is no device, or a GPU that torch does not see here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{name} must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        here = f"GPUs up to cuda:{count - 1}" if count else "no GPU"
        raise ValueError(f"{name} {device}: torch sees {here} here; use cpu or auto")
    return place


def check_choice(impl: str, impls: Sequence[str]) -> None:
    """Refuses names of no implementation."""
    if impl not in impls:
        raise ValueError(f"impl must be one of {', '.join(impls)}, got {impl!r}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], reason: str = "") -> None:
    """Refuses a tensor of another shape; `reason` says why, as in "for this topology"."""
    if tuple(tensor.shape) != tuple(shape):
        why = f" {reason}" if reason else ""
        raise ValueError(f"{name} must be {list(shape)}{why}, got {list(tensor.shape)}")


def check_like(name: str, tensor: Tensor, like: Tensor, other: str) -> None:
    """Refuses a tensor of another dtype or on another device than `like`, called `other`."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} like {other}, got {tensor.dtype} on "
            f"{tensor.device}"
        )
