"""Starting a Triton kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Compiled kernels that are remembered of one kernel: shapes come and go.
_MOST_REMEMBERED = 1024


def cdiv(number: int, size: int) -> int:
    """Blocks of a size that a number takes; `triton.cdiv` on the host takes microseconds."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The next power of two from a number on, which is at least 1."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> Any:
    """Runs `kernel` over `grid` on the GPU that its tensors lie on.

    By keyword only: kernels have too many arguments to tell apart by position. What was compiled
    for the same arguments, but for tensors' addresses, is started at once: for a decode step
    Triton's own way to find it takes longer than the kernel.

    Args:
        kernel: A `triton.jit` function.
        grid: Programs along each axis, none of them 0.
        arguments: Those of the kernel, `num_warps` and `num_stages` with them.

    Returns:
        What Triton returns for a launch: the compiled kernel, or None when interpreted.
    """
    # Products and sums are fused. Triton's default changes with its version; results must not.
    arguments["enable_fp_fusion"] = True
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _launch(kernel, grid, device, arguments)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device(device):
        return _launch(kernel, grid, device, arguments)


def _launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]
) -> Any:
    remembered = _remembered(kernel)
    key = (device, *arguments, *map(_what_counts, arguments.values()))
    compiled = remembered.get(key)
    if compiled is None:
        compiled = kernel[grid](**arguments)
        if compiled is not None:
            if len(remembered) >= _MOST_REMEMBERED:
                remembered.clear()
            remembered[key] = compiled
        return compiled
    compiled[(*grid, 1, 1)[:3]](*[arguments[name] for name in kernel.arg_names])
    return compiled


def _what_counts(value: Any) -> Any:
    """What the compiled code depends on of an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if hasattr(value, "block_shape"):
        return value.base.dtype, *value.block_shape
    return value


@cache
def _remembered(kernel: Any) -> dict[Any, Any]:
    """What was compiled of a kernel, by everything that it depends on."""
    return {}
