"""Launches of the products of one token with weights as they are, found once for each layer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from moe_runtime.kernels.expert_mlp.decode.decode_launches import (
    MOST_PREPARED,
    DecodeRows,
    Strides,
    chain,
    rows_of_gate_and_up,
)
from moe_runtime.kernels.expert_mlp.decode.decode_row_kernel import decode_down_row, decode_up_row
from moe_runtime.kernels.grouped_gemm.packed import Weights
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits
from moe_runtime.kernels.triton_support import PreparedLaunch, cdiv, power_of_2

if TYPE_CHECKING:
    from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout

# Weights of a program at a time, of each of gate and up and of down: the best for the layers of
# OLMoE and Qwen3-30B-A3B on an H200, of blocks of 2,048 to 16,384.
_BLOCK_UP, _BLOCK_DOWN = 4096, 2048
_BLOCK_K = 256
_NUM_WARPS = 4


def takes_row(x_TD: Tensor, weight: Weights) -> bool:
    """Whether these kernels compute a product: one token, and weights whose rows are whole."""
    if len(x_TD) > 1 or not isinstance(weight, Tensor):
        return False
    return weight.stride(2) == 1 and weight.shape[2] > 0


@lru_cache(maxsize=MOST_PREPARED)
def prepare_up_row(
    rows: DecodeRows,
    device: GpuLimits,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
    spec: ActivationSpec,
    layout: GateLayout,
) -> PreparedLaunch:
    """The first product with the activation; arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    step, to_up = rows_of_gate_and_up(layout, dim_f)
    block_n, block_k = _block(dim_d, _BLOCK_UP)
    return PreparedLaunch(
        decode_up_row, (rows.num_slots, cdiv(dim_f, block_n)),
        dim_n=dim_f, dim_k=dim_d,
        stride_ws=stride_w[0], stride_wn=stride_w[1] * step, stride_w_up=stride_w[1] * to_up,
        stride_bs=stride_b[0], stride_bn=stride_b[1] * step, stride_b_up=stride_b[1] * to_up,
        IS_GATED=layout.has_gate, HAS_BIAS=has_bias, ACTIVATION=spec,
        BLOCK_T=1, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=dim_d % block_k == 0,
        num_warps=_NUM_WARPS, **chain(device), **rows.arguments(),
    )  # fmt: skip


@lru_cache(maxsize=MOST_PREPARED)
def prepare_down_row(
    rows: DecodeRows,
    device: GpuLimits,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
) -> PreparedLaunch:
    """The second product, in one part; arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    block_n, block_k = _block(dim_f, _BLOCK_DOWN)
    return PreparedLaunch(
        decode_down_row, (rows.num_slots, cdiv(dim_d, block_n)),
        dim_n=dim_d, dim_k=dim_f, stride_ws=stride_w[0], stride_wn=stride_w[1],
        stride_bs=stride_b[0], stride_bn=stride_b[1], HAS_BIAS=has_bias,
        BLOCK_T=1, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=dim_f % block_k == 0,
        num_warps=_NUM_WARPS, **chain(device), **rows.arguments(),
    )  # fmt: skip


def _block(dim_k: int, num_weights: int) -> tuple[int, int]:
    """Columns of the output and summed elements of a program's step."""
    block_k = min(_BLOCK_K, power_of_2(dim_k))
    return min(16, num_weights // block_k), block_k
