"""The Triton kernel of `linear` for one row: one program for a few output columns.

Reading weights takes all the time, so no matrix unit is needed, and every thread has its own loads
in flight. Up to three layers that take the same row are one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from moe_runtime.kernels.grouped_gemm.packed import packed_arguments, packed_row_block
from moe_runtime.kernels.grouped_gemm.packed_row_kernel import packed_rows
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, casts_codes, describe_device
from moe_runtime.kernels.linear.gpu import Layer
from moe_runtime.kernels.triton_support import PreparedLaunch, cdiv, dependent_launch, power_of_2

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized import QuantizedStack, WeightFormat

MOST_LAYERS = 3
_BLOCK_N = 4
_BLOCK_K = 2048
_NUM_WARPS = 4
_MOST_PREPARED = 256  # layer sizes


@triton.jit
def _weights(ptrs, mask_n, mask_k, IS_WHOLE: tl.constexpr):
    """Weights `[n, k]` of a step, in fp32."""
    if IS_WHOLE:
        return tl.load(ptrs).to(tl.float32)
    return tl.load(ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0).to(tl.float32)


@triton.jit
def linear_row_fwd(
    x_ptr, weight0_ptr, weight1_ptr, weight2_ptr, bias0_ptr, bias1_ptr, bias2_ptr, out_ptr,
    dim_k, end0, end1, end2, stride0, stride1, stride2,
    NUM_LAYERS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`out[n] = x @ weight[n] + bias[n]`, n over the columns of one layer after the other.

    Blocks divide the columns of each layer, unless there is one. IS_WHOLE: and K. IS_EARLY: no
    earlier kernel wrote the weights, so they are read while it runs.
    """
    first_n = tl.program_id(0) * BLOCK_N
    weight_ptr, bias_ptr, stride, begin = weight0_ptr, bias0_ptr, stride0, 0
    if NUM_LAYERS > 1:
        begin = tl.where(first_n < end0, 0, tl.where(first_n < end1, end0, end1))
        stride = tl.where(first_n < end0, stride0, tl.where(first_n < end1, stride1, stride2))
        if first_n >= end1:
            weight_ptr, bias_ptr = weight2_ptr, bias2_ptr
        elif first_n >= end0:
            weight_ptr, bias_ptr = weight1_ptr, bias1_ptr
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + (offs_n - begin).to(tl.int64)[:, None] * stride + offs_k[None, :]
    mask_n = offs_n < end2
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        if not IS_EARLY:
            tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    weight = _weights(weight_ptrs, mask_n, offs_k < dim_k, IS_WHOLE)
    if IS_CHAINED and IS_EARLY:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    x = tl.load(x_ptr + offs_k, mask=offs_k < dim_k, other=0.0)
    products = weight * x.to(tl.float32)[None, :]
    for first_k in range(BLOCK_K, dim_k, BLOCK_K):
        mask_k = first_k + offs_k < dim_k
        weight = _weights(weight_ptrs + first_k, mask_n, mask_k, IS_WHOLE)
        x = tl.load(x_ptr + first_k + offs_k, mask=mask_k, other=0.0)
        products += weight * x.to(tl.float32)[None, :]
    sums = tl.sum(products, axis=1)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + (offs_n - begin), mask=mask_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, sums, mask=mask_n)


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare(
    dim_k: int,
    widths: tuple[int, ...],
    strides: tuple[int, ...],
    has_bias: bool,
    is_early: bool,
    device: torch.device,
) -> PreparedLaunch:
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    ends += ends[-1:] * (MOST_LAYERS - len(ends))
    strides = (*strides, *strides[-1:] * (MOST_LAYERS - len(strides)))
    block_k = min(_BLOCK_K, power_of_2(dim_k))
    return PreparedLaunch(
        linear_row_fwd, (cdiv(ends[-1], _BLOCK_N),),
        dim_k=dim_k, end0=ends[0], end1=ends[1], end2=ends[2],
        stride0=strides[0], stride1=strides[1], stride2=strides[2],
        NUM_LAYERS=len(widths), HAS_BIAS=has_bias, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
        IS_WHOLE=dim_k % block_k == 0 and all(width % _BLOCK_N == 0 for width in widths),
        IS_EARLY=is_early, num_warps=_NUM_WARPS, **dependent_launch(device),
    )  # fmt: skip


def can_share_a_launch(layers: Sequence[Layer]) -> bool:
    """Whether one launch can take these layers, each of which the kernel can take."""
    has_bias = {bias is not None for _, bias in layers}
    is_even = all(len(weight) % _BLOCK_N == 0 for weight, _ in layers)
    # alignment decides the compiler's loads per thread, and so the order of a sum
    places = {(weight.stride(0) % 16, weight.data_ptr() % 16) for weight, _ in layers}
    return len(layers) <= MOST_LAYERS and is_even and len(has_bias) == len(places) == 1


def _are_parameters(weights: Sequence[Tensor]) -> bool:
    return weights[0].is_cuda and all(type(weight) is Parameter for weight in weights)


def _is_recorded() -> bool:
    return torch.cuda.is_current_stream_capturing()


def launch_linear_row(x_1K: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The outputs of layers for one row, side by side: `[1, N]`, for checked arguments.

    In a CUDA graph parameters are read early: they are written before a replay, not by its kernels.
    """
    weights = [weight for weight, _ in layers]
    numbers = (
        x_1K.shape[1],
        tuple(map(len, weights)),
        tuple(weight.stride(0) for weight in weights),
        layers[0][1] is not None,
    )
    ways = [False]
    if _are_parameters(weights):
        early = _prepare(*numbers, True, x_1K.device)
        if _is_recorded():
            ways = [True]
        elif not early.is_compiled:  # now, as no kernel should be loaded during a recording
            ways = [True, False]
    out_1N = x_1K.new_empty((1, sum(map(len, weights))))
    weights += weights[-1:] * (MOST_LAYERS - len(weights))
    biases = [weight if bias is None else bias for weight, bias in layers]
    biases += biases[-1:] * (MOST_LAYERS - len(biases))
    for is_early in ways:  # the last one writes the result
        prepared = _prepare(*numbers, is_early, x_1K.device)
        prepared(
            x_ptr=x_1K, weight0_ptr=weights[0], weight1_ptr=weights[1], weight2_ptr=weights[2],
            bias0_ptr=biases[0], bias1_ptr=biases[1], bias2_ptr=biases[2], out_ptr=out_1N,
        )  # fmt: skip
    return out_1N


@triton.jit
def packed_linear_row_fwd(
    x_ptr, codes_ptr, bias_ptr, out_ptr, scales_ptr, zeros_ptr, global_ptr,
    dim_n, dim_k, stride_wn, stride_sn, stride_zn,
    FORMAT: tl.constexpr, CASTS: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`out[n] = x @ weight[n] + bias[n]` of packed weights."""
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < dim_n
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    _, sums = packed_rows(
        x_ptr, codes_ptr + offs_n.to(tl.int64) * stride_wn, scales_ptr, zeros_ptr, global_ptr,
        first_n, offs_n, mask_n, dim_k, 0, stride_sn, 0, stride_zn, 0, 0,
        False, FORMAT, CASTS, HAS_GLOBAL, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,  # type: ignore[arg-type]
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, sums, mask=mask_n)


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare_packed(
    kind: WeightFormat,
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    has_bias: bool,
    device: torch.device,
    limits: GpuLimits | None,
) -> PreparedLaunch:
    (dim_n, dim_k), (stride_wn, stride_sn, stride_zn) = shape, strides
    block_n, block_k = packed_row_block(kind, dim_k, _NUM_WARPS, 1)
    return PreparedLaunch(
        packed_linear_row_fwd, (cdiv(dim_n, block_n),),
        dim_n=dim_n, dim_k=dim_k, stride_wn=stride_wn, stride_sn=stride_sn, stride_zn=stride_zn,
        FORMAT=kind, CASTS=casts_codes(kind, limits or describe_device(device)),
        HAS_GLOBAL=kind.global_scale != "none", HAS_BIAS=has_bias,
        EVEN_N=dim_n % block_n == 0, EVEN_K=dim_k % block_k == 0, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=_NUM_WARPS, **dependent_launch(device),
    )  # fmt: skip


def launch_packed_row(
    x_1K: Tensor, weight: QuantizedStack, bias_N: Tensor | None, limits: GpuLimits | None = None
) -> Tensor:
    """The output `[1, N]` for one row and a stack of one matrix that `has_word_rows`.

    `limits` overrides those of the GPU.
    """
    given = packed_arguments(weight, None, x_1K)
    strides = weight.codes.stride(1), given["stride_sn"], given["stride_zn"]
    shape, has_bias = weight.shape[1:], bias_N is not None
    prepared = _prepare_packed(weight.format, shape, strides, has_bias, x_1K.device, limits)
    out_1N = x_1K.new_empty((1, shape[0]))
    prepared(
        x_ptr=x_1K, codes_ptr=weight.codes, bias_ptr=x_1K if bias_N is None else bias_N,
        out_ptr=out_1N, scales_ptr=given["scales_ptr"], zeros_ptr=given["zeros_ptr"],
        global_ptr=given["global_ptr"],
    )  # fmt: skip
    return out_1N
