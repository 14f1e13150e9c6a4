"""Which implementation of an op runs, decided by the device alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.errors import MoERuntimeError
from moe_runtime.kernels.operands import check_choice

TRITON_HINT = "install it with `pip install triton` (Linux; CUDA builds of torch bring their own)"


class TritonUnavailableError(MoERuntimeError):
    """`impl="triton"` was asked for, or a GPU tensor given, where Triton is not installed."""


def resolve_impl(impl: str, device: torch.device, supported: Sequence[str]) -> str:
    """The implementation that a call uses.

    Args:
        impl: What the caller wrote. `auto` is `triton` on a GPU and `torch` elsewhere; anything
            else is taken as it is and never replaced.
        device: Of the tensors.
        supported: The names that the op knows, `auto` among them.

    Raises:
        ValueError: The name is unknown, or it is `triton` and the tensors are not on a GPU.
        TritonUnavailableError: It comes out as `triton` and Triton is not installed.
    """
    check_choice(impl, supported)
    if impl == "auto":
        impl = "triton" if device.type == "cuda" else "torch"
    if impl == "triton":
        require_triton(device)
    return impl


def require_triton(device: torch.device) -> None:
    """Raises unless Triton kernels can run on tensors of this device.

    A CPU will do while Triton's interpreter is on, which is how the tests run the kernels.

    Raises:
        ValueError: The device is no GPU.
        TritonUnavailableError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise TritonUnavailableError(f"impl='triton' needs the package triton: {TRITON_HINT}")
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"impl='triton' needs tensors on a CUDA or ROCm GPU, got {device.type}; "
            "impl='auto' picks what the device can run"
        )


def check_triton_dtype(x: Tensor) -> None:
    """Refuses values that no Triton kernel here computes with.

    Raises:
        ValueError: They are fp64, or no floating-point numbers.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"impl='triton' takes fp32, bf16 or fp16, got {x.dtype}")


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for the compiler in this process."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
