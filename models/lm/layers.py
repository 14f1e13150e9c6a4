"""Linear maps and norms of the language model.

Source of the norm: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Torch's own
on a CPU is a chain of elementwise passes, each through memory; forward and backward here take
fewer.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from moe_runtime.kernels.linear import is_faster_widened
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only


def product_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """What operands of `dtype` are multiplied in."""
    if not torch.is_autocast_enabled(device_type):
        return dtype
    narrow = torch.get_autocast_dtype(device_type)
    library = native_library() if device_type == "cpu" else None
    return torch.float32 if library and is_faster_widened(library, narrow) else narrow


class Linear(nn.Linear):
    """`nn.Linear` whose result has autocast's dtype, whatever its products are computed in."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., D]` to `[..., F]`."""
        device_type = input.device.type
        is_autocast = torch.is_autocast_enabled(device_type) and input.dtype != torch.float64
        if not is_autocast or product_dtype(device_type, input.dtype) != torch.float32:
            return super().forward(input)
        with torch.autocast(device_type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            y = F.linear(input.float(), self.weight.float(), bias)
        return y.to(torch.get_autocast_dtype(device_type))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        # A norm is one reduction without the square as a tensor of its own.
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    @first_derivatives_only("this norm has no second derivatives: use torch.nn.functional.rms_norm")
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        normed = x.to(scale.dtype) * scale
        grad = grad_y.to(scale.dtype)
        summed = tuple(range(x.ndim - weight.ndim))
        # as few passes over memory as there can be: that is all these products cost
        both = grad * normed
        grad_weight = both.sum(dim=summed)
        wide_weight = weight.to(both.dtype)
        inner = both @ wide_weight if weight.ndim == 1 else torch.linalg.vecdot(both, wide_weight)
        inner = inner.unsqueeze(-1).div_(x.shape[-1])
        torch.mul(grad, wide_weight, out=both)
        grad_x = both.addcmul_(normed, inner, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the sum in float32 or wider.

    Args:
        x: `[..., D]`.
        weight: `[D]`, or the trailing dimensions of `x`, such as `[heads, D]`.

    Returns:
        `[..., D]`, in the dtype that `x` and `weight` promote to.
    """
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """RMS normalisation with a gain.

    Args:
        size: width of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., D]`."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
