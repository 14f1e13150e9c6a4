"""Triton helpers for every operation: choosing an implementation, and starting a kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import MoERuntimeError
from moe_runtime.kernels.operands import check_choice

TRITON_HINT = "install it with `pip install triton` (Linux; CUDA builds of torch bring their own)"


class TritonUnavailableError(MoERuntimeError):
    """Triton is needed (`impl="triton"`, or a GPU tensor) and not installed."""


def resolve_impl(impl: str, device: torch.device, supported: Sequence[str]) -> str:
    """The implementation of a call; `auto` is `triton` on a GPU and `torch` elsewhere.

    Raises:
        ValueError: The name is not `supported`, or it is `triton` and the tensors are on no GPU.
        TritonUnavailableError: Triton is needed and not installed.
    """
    check_choice(impl, supported)
    if impl == "auto":
        impl = "triton" if device.type == "cuda" else "torch"
    if impl == "triton":
        require_triton(device)
    return impl


def require_triton(device: torch.device) -> None:
    """Raises unless Triton kernels can run on this device, or on a CPU in Triton's interpreter.

    Raises:
        ValueError: The device is not a GPU.
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
    """Raises ValueError for a dtype that the Triton kernels lack."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"impl='triton' takes fp32, bf16 or fp16, got {x.dtype}")


def is_interpreted() -> bool:
    """Whether Triton's interpreter replaces the compiler in this process."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


_MOST_REMEMBERED = 1024


def cdiv(number: int, size: int) -> int:
    """Division rounded up; `triton.cdiv` on the host takes microseconds."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The next power of two, for numbers from 1 on."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> Any:
    """Runs `kernel` over `grid` on the GPU of its tensors; returns what Triton returns.

    Kernels have too many arguments to tell apart by position, so all are named. Compiled code for
    the same arguments is started directly, as Triton's own lookup takes as long as a small kernel.
    Code depends on a tensor's dtype, on whether its address is a multiple of 16, and on ROCm on
    whether 32 bits can index its bytes.
    """
    # products and sums are fused unless a kernel rounds as torch does; Triton's default changes
    # with its version, results must not
    arguments.setdefault("enable_fp_fusion", True)
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _launch(kernel, grid, device, arguments)
    # Triton launches on the current device, wherever the tensors are
    with torch.cuda.device(device):
        return _launch(kernel, grid, device, arguments)


def _launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]
) -> Any:
    remembered = _remembered(kernel)
    parts: list[Any] = [device, *arguments]
    for value in arguments.values():
        if isinstance(value, Tensor):
            parts += _kind_of(value)
        elif value.__class__.__hash__ is None:  # a descriptor of a tensor
            parts += value.base.dtype, *value.block_shape
        else:
            parts.append(value)
    key = tuple(parts)
    compiled = remembered.get(key)
    if compiled is None:
        compiled = kernel[grid](**arguments)
        if compiled is not None:
            if len(remembered) >= _MOST_REMEMBERED:
                remembered.clear()
            remembered[key] = compiled
        return compiled
    compiled[(*grid, 1, 1)[:3]](*itemgetter(*kernel.arg_names)(arguments))
    return compiled


def _kind_of(tensor: Tensor, *, is_rocm: bool = torch.version.hip is not None) -> tuple[Any, ...]:
    """The properties of a tensor that compiled code depends on."""
    is_short = is_rocm and tensor.untyped_storage().nbytes() < 2**31
    return tensor.dtype, tensor.data_ptr() % 16, is_short


@cache
def _remembered(kernel: Any) -> dict[Any, Any]:
    """Compiled code of a kernel; emptied now and then, as shapes change."""
    return {}


class PreparedLaunch:
    """Launches that differ in their tensors only, for steps as short as a launch."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], /, **numbers: Any) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._compiled: dict[Any, Any] = {}
        self._places: list[int] = []
        self._arguments: list[Any] = []

    @property
    def is_compiled(self) -> bool:
        """Whether it has run for some tensors; never when interpreted."""
        return bool(self._compiled)

    def __call__(self, **tensors: Tensor) -> None:
        """Runs the kernel with tensors, named in the same order in every call."""
        device = next(iter(tensors.values())).device
        key = device, *map(_kind_of, tensors.values())
        compiled = self._compiled.get(key)
        if compiled is None or (
            device.type == "cuda" and device.index != torch.cuda.current_device()
        ):
            compiled = launch(self._kernel, self._grid, **tensors, **self._numbers)
            if compiled is not None:
                names = self._kernel.arg_names
                self._places = [names.index(name) for name in tensors]
                self._arguments = [self._numbers.get(name) for name in names]
                self._compiled[key] = compiled
            return
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, tensors.values(), strict=True):
            arguments[place] = tensor
        compiled[(*self._grid, 1, 1)[:3]](*arguments)


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """IS_CHAINED and, from Hopper on, Triton's option for programmatic dependent launch.

    The kernel starts while the one before it on its stream ends, and waits for that one
    (`gdc_wait`) before it reads others' results or writes.
    """
    is_able = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_properties(device).major >= 9
        and not is_interpreted()
    )
    return {"IS_CHAINED": True, "launch_pdl": True} if is_able else {"IS_CHAINED": False}
