"""What the Triton kernel of `linear` can take: one row, in inference."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.nn import Parameter

from moe_runtime.kernels.native import DTYPE_CODES, needs_torch
from moe_runtime.kernels.triton_support import require_triton

Layer = tuple[Tensor, Tensor | None]
"""A weight `[N, K]` and a bias `[N]` or None."""


def row_problem(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the Triton kernel cannot take these arguments of `linear`, or None."""
    if weight.ndim != 2 or x.numel() != weight.shape[1] or not weight.numel():
        return f"it takes one row and at least one column, got {list(x.shape)}"
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return (
            "bias must have a value for each column, side by side, got "
            f"{list(bias.shape)} with strides {bias.stride()}"
        )
    if weight.stride(1) != 1:
        return f"weights must have unit stride along K, got strides {weight.stride()}"
    tensors = (x, weight) if bias is None else (x, weight, bias)
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) > 1 or x.dtype not in DTYPE_CODES:
        return f"it knows fp32, bf16 and fp16, the same for all, got {dtypes}"
    if len({one.device for one in tensors}) > 1:
        return f"all must lie on one device, got {x.device} and {weight.device}"
    if not all(type(one) in (Tensor, Parameter) and not is_wrapped(one) for one in tensors):
        return "it takes tensors that have memory of their own, of no class but torch's"
    if needs_torch(x, weight, bias):
        return "it has no gradients"
    return None


def linears_of_a_row(x: Tensor, *layers: Layer) -> list[Tensor] | None:
    """`linear` by layers that take the same row, in one launch of the Triton kernel.

    Args:
        x: `[..., K]`, one row.
        layers: weights and biases, up to three.

    Returns:
        `[..., N]` of each, in the same bits as of each alone; None for what the kernel or one
        launch does not take.
    """
    if (
        not x.ndim
        or x.numel() != x.shape[-1]  # asked first: prompts are short of time for Python
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
        or importlib.util.find_spec("triton") is None
        or any(row_problem(x, *layer) for layer in layers)
    ):
        return None
    from moe_runtime.kernels.linear.kernel import can_share_a_launch, launch_linear_row

    if len(layers) > 1 and not can_share_a_launch(layers):
        return None
    out_1N = launch_linear_row(x.reshape(1, -1).contiguous(), layers)
    widths = [len(weight) for weight, _ in layers]
    return [part.view(*x.shape[:-1], -1) for part in out_1N.split(widths, dim=1)]


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of one row by the Triton kernel.

    Raises:
        ValueError: The kernel cannot take the input.
        TritonUnavailableError: Triton is not installed.
    """
    require_triton(x.device)
    found = linears_of_a_row(x, (weight, bias))
    if found is None:
        problem = row_problem(x, weight, bias) or "it is traced, or under autocast"
        raise ValueError(f"impl='triton' cannot compute this: {problem}")
    return found[0]
