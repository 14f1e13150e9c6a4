"""The Triton kernels of `linear` in inference: one row, or any rows of packed weights."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.nn import Parameter

from moe_runtime.kernels.native import DTYPE_CODES, needs_torch
from moe_runtime.kernels.triton_support import require_triton

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat

Layer = tuple[Tensor, Tensor | None]  # a weight `[N, K]` and a bias `[N]` or None


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
    """`linear` by up to three layers that take the same row `[..., K]`, in one Triton launch.

    Returns `[..., N]` of each, with the bits of single calls; None if one launch cannot take them.
    """
    if (
        not x.ndim
        or x.numel() != x.shape[-1]  # first, as it is the usual reason
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


def packed_problem(x_RK: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the Triton kernels cannot multiply these rows by packed weights, or None."""
    if x_RK.ndim != 2 or x_RK.shape[1] != weight.num_cols:
        return f"x must be [R, {weight.num_cols}], got {list(x_RK.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be [{weight.shape[0]}], got {list(bias.shape)}"
    if not reads_packed(weight.format):
        return f"they cannot read {weight.format}"
    if x_RK.dtype not in DTYPE_CODES or x_RK.device != weight.device:
        return f"x must be fp32, bf16 or fp16 on {weight.device}, got {x_RK.dtype} on {x_RK.device}"
    if needs_torch(x_RK, bias):
        return "they have no gradients"
    return None


def reads_packed(kind: WeightFormat) -> bool:
    """Whether `packed_linear` reads weights of this format."""
    if importlib.util.find_spec("triton") is None or kind.int8_activations:
        return False
    from moe_runtime.kernels.grouped_gemm.packed import takes_format

    return takes_format(kind)


def packed_linear(x_RK: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of packed weights, `[R, N]`, for arguments without a `packed_problem`.

    One row takes a kernel without matrix units, more rows the grouped product of one expert.
    """
    from moe_runtime.kernels.grouped_gemm.forward import plain_product
    from moe_runtime.kernels.grouped_gemm.groups import Groups
    from moe_runtime.kernels.grouped_gemm.packed import has_word_rows
    from moe_runtime.kernels.linear.kernel import launch_packed_row

    num_rows, num_out = len(x_RK), weight.shape[0]
    x_RK, bias = x_RK.contiguous(), None if bias is None else bias.contiguous()
    stack = weight.stacked()
    if num_rows == 1 and num_out and has_word_rows(stack) and x_RK.data_ptr() % 4 == 0:
        return launch_packed_row(x_RK, stack, bias)
    out_RN = x_RK.new_empty((num_rows, num_out))
    if not out_RN.numel():
        return out_RN
    offsets = torch.arange(0, num_rows + 1, num_rows, device=x_RK.device)
    groups = Groups(offsets, num_rows)
    bias_1N = None if bias is None else bias[None]
    return plain_product(x_RK, stack, groups, out=out_RN, bias_SN=bias_1N)
