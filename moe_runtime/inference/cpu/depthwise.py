"""Depthwise convolutions along a sequence, of linear attention, Mamba and short convolutions.

On a CPU without instructions for half precision torch computes one tiny product for each channel
and position. Here as many products as there are taps are summed over all channels and positions.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.native import needs_torch

MAX_TAPS = 8
"""Of more taps torch's way was never compared."""
PORTION = 2**16
"""Values of the output that are summed at once: a prompt needs little memory beside the output."""


def use_shifted_products(layer: torch.nn.Conv1d) -> None:
    """Gives a depthwise layer a weight with which calls of ``conv1d`` are sums of shifted products.

    The layer, its forward pass and its parameters' names stay. Other layers are left alone.
    """
    is_depthwise = layer.groups == layer.in_channels == layer.out_channels
    if is_depthwise and type(layer.weight) is torch.nn.Parameter and _slow_types():
        layer.weight = _DepthwiseWeight.of(layer.weight)


def shifted_products(x_BCL: Tensor, taps_C1K: Tensor, bias_C: Tensor | None, pad: int) -> Tensor:
    """A depthwise convolution with sums in fp32, which are rounded once.

    Products of two values in half precision are exact in fp32, so that a position has the same
    bits whatever the others are.

    Args:
        x_BCL: `[B, C, L]`, in bf16 or fp16.
        taps_C1K: `[C, 1, K]` in the same type, of no more taps than padded positions.
        bias_C: `[C]`, or None.
        pad: zeros before the first position and after the last, fewer than taps.

    Returns:
        `[B, C, L + 2 * pad - K + 1]` in the type of `x`, laid out as it where that is by position.
    """
    batch, channels, length = x_BCL.shape
    taps_KC1 = taps_C1K.float().permute(2, 0, 1).contiguous()
    bias_C1 = None if bias_C is None else bias_C.float()[:, None]
    size = length + 2 * pad - len(taps_KC1) + 1
    portion = max(1, PORTION // max(1, batch * channels))
    if size <= portion or needs_torch(x_BCL, taps_C1K, bias_C):
        return _outputs(x_BCL, taps_KC1, bias_C1, pad, 0, size)
    if x_BCL.stride(1) == 1:
        y_BCN = x_BCL.new_empty(batch, size, channels).transpose(1, 2)
    else:
        y_BCN = x_BCL.new_empty(batch, channels, size)
    for first in range(0, size, portion):
        last = min(first + portion, size)
        y_BCN[..., first:last] = _outputs(x_BCL, taps_KC1, bias_C1, pad, first, last)
    return y_BCN


def _outputs(
    x_BCL: Tensor, taps_KC1: Tensor, bias_C1: Tensor | None, pad: int, first: int, last: int
) -> Tensor:
    """Positions `first` to `last` of the output."""
    begin, end = first - pad, last - pad + len(taps_KC1) - 1
    length, size = x_BCL.shape[-1], last - first
    wide = x_BCL[..., max(begin, 0) : min(end, length)].float()
    if begin < 0 or end > length:
        wide = F.pad(wide, (max(-begin, 0), max(end - length, 0)))
    if bias_C1 is None:
        sums = wide[..., :size] * taps_KC1[0]
    else:
        sums = torch.addcmul(bias_C1, wide[..., :size], taps_KC1[0])
    for tap in range(1, len(taps_KC1)):
        sums.addcmul_(wide[..., tap : tap + size], taps_KC1[tap])
    return sums.to(x_BCL.dtype)


class _DepthwiseWeight(torch.nn.Parameter):
    """Taps that somebody gives to ``torch.nn.functional.conv1d``: a layer, or a model's own code.

    Families take the dimension of size one away and put it back on the way there.
    """

    @staticmethod
    def of(weight: Tensor) -> torch.nn.Parameter:
        own = weight.detach().as_subclass(cast(Any, _DepthwiseWeight))
        return cast(torch.nn.Parameter, own.requires_grad_(weight.requires_grad))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # torch's own way to leave subclasses aside: no exception can leave it switched on
        call = torch._C._disabled_torch_function_impl
        if func is F.conv1d:
            return call(_conv1d, types, args, kwargs)
        result = call(func, types, args, kwargs)
        if func is Tensor.squeeze or func is Tensor.unsqueeze:
            return result.as_subclass(cast(Any, cls))
        return result


def _conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv1d``."""
    pad = padding[0] if isinstance(padding, tuple) else padding
    if (
        weight.dtype not in _slow_types()
        or {input.dtype, weight.dtype if bias is None else bias.dtype} != {weight.dtype}
        or (input.ndim, weight.ndim) != (3, 3)
        or weight.shape[:2] != (input.shape[1], 1)
        or not isinstance(pad, int)
        or not 0 <= pad < weight.shape[2] <= min(MAX_TAPS, input.shape[2] + 2 * pad)
        or {*_sizes(stride), *_sizes(dilation)} != {1}
        or groups != len(weight)
        or not (input.is_cpu and weight.is_cpu)
        or torch.is_autocast_enabled("cpu")
    ):
        return F.conv1d(input, weight, bias, stride, padding, dilation, groups)
    return shifted_products(input, weight, bias, pad)


def _sizes(size: Any) -> Any:
    return (size,) if isinstance(size, int) else size


@functools.cache
def _slow_types() -> frozenset[torch.dtype]:
    """Those for which oneDNN has no convolutions on this processor."""
    if not torch.backends.mkldnn.is_available():
        return frozenset((torch.bfloat16, torch.float16))
    ops = torch.ops.mkldnn
    fast = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_fast in fast.items() if not is_fast)
