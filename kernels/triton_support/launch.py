"""Starting a Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> Any:
    """Runs `kernel` over `grid` on the GPU that its tensors lie on.

    By keyword only: kernels have too many arguments to tell apart by position.

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
        return kernel[grid](**arguments)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device(device):
        return kernel[grid](**arguments)
