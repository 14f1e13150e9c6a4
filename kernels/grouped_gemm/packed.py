"""Weights of a grouped product, packed or not, as kernel arguments."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moe_runtime.kernels.quantized import QuantizedStack, WeightFormat
from moe_runtime.kernels.quantized.matrix import LARGEST_ZERO

Weights: TypeAlias = "Tensor | QuantizedStack"

_LEAST_DEPTH = 16  # summed elements of a matrix instruction
BLOCKS_READ = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "mxfp4_block")
"""Blocks that the kernels decode."""


def takes_format(kind: WeightFormat) -> bool:
    """Whether the Triton products read packed weights of this format."""
    if kind.block_codes:
        return kind.codes in BLOCKS_READ
    if kind.global_scale != "none" and not scales_tile(kind, torch.float16):
        return False
    return kind.group_cols % _LEAST_DEPTH == 0 and 0 <= kind.zero <= LARGEST_ZERO


def scales_tile(kind: WeightFormat, dtype: torch.dtype) -> bool:
    """Whether decoded weights times their scales are exact in the dtype of the rows.

    fp4 times a power of two is exact in dtypes with the exponents of fp32; fp4 times fp8 (six bits,
    at least 2 ** -10) is exact in all.
    """
    if kind.codes != "e2m1" or kind.group_rows != 1:
        return False
    if kind.scales == "e4m3":
        return kind.group_cols in (16, 32)
    is_wide = dtype in (torch.bfloat16, torch.float32)
    return kind.scales == "e8m0" and kind.group_cols == 32 and is_wide


def depth_of(kind: WeightFormat, dtype: torch.dtype, block_k: int, dim_k: int) -> int:
    """Summed columns of a step: of one group if scales multiply sums, else about `block_k`.

    Half of it if that divides `dim_k` and all of it does not, so that nothing is masked.
    """
    if kind.block_codes:
        return 16 if kind.codes == "q6_k" else 32
    if not scales_tile(kind, dtype) and kind.group_cols:
        return math.gcd(block_k, kind.group_cols)
    is_half = dim_k % block_k == block_k // 2
    return max(block_k // 2 if is_half else block_k, 32)


_ROW_BYTES = 16  # of codes that a thread loads at once, for one row
_ROWS_EACH = 8  # rows of weights per thread, which share the row's values
_MOST_IDLE = 1.15
_MOST_LANES = 8  # threads side by side along K: together they load a cache line of a row


def has_word_rows(weight: Weights) -> bool:
    """Whether the kernels of one row can read these codes, 16 bytes at a time."""
    assert not isinstance(weight, Tensor)
    kind, codes = weight.format, weight.codes
    if any(place % _ROW_BYTES for place in (codes.data_ptr(), codes.stride(0), codes.stride(1))):
        return False
    if kind.block_codes:
        return kind.codes == "q4_k"
    most = _ROW_BYTES * 8 // kind.bits
    unit = min(kind.group_cols or most, most)
    return weight.num_cols % most == 0 and kind.group_cols % unit == 0


def packed_row_block(
    kind: WeightFormat, dim_k: int, num_warps: int, num_matrices: int
) -> tuple[int, int]:
    """Output columns and summed elements of a step for one row.

    Threads of a warp lie side by side along K, as many as are not idle.
    """
    codes = 32 if kind.block_codes else _ROW_BYTES * 8 // kind.bits
    lanes = _MOST_LANES
    while lanes > 1 and -(-dim_k // (lanes * codes)) * lanes * codes > _MOST_IDLE * dim_k:
        lanes //= 2
    return 32 * num_warps // lanes * (_ROWS_EACH // num_matrices), lanes * codes


def stages_of(weight: Weights, num_stages: int, block_k: int, depth: int) -> int:
    """Steps in flight: twice as many if a group is shallower than the tile."""
    return num_stages * (1 if isinstance(weight, Tensor) or depth >= block_k else 2)


def codes_of(weight: Weights) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.codes


def packed_arguments(weight: Weights, up: Weights | None, x: Tensor) -> dict[str, Any]:
    """Kernel arguments for scales and zero points; placeholders for plain weights.

    A separate `up` has the format of `weight`, the gate's.
    """
    if isinstance(weight, Tensor):
        return {
            "scales_ptr": weight, "zeros_ptr": weight,
            "stride_ss": 0, "stride_sn": 0, "stride_s_up": 0,
            "stride_zs": 0, "stride_zn": 0, "stride_z_up": 0,
            "global_ptr": weight, "stride_gs": 0, "stride_g_up": 0, "HAS_GLOBAL": False,
            "FORMAT": None, "SCALES_TILE": False,
        }  # fmt: skip
    other = weight if up is None else up
    assert not isinstance(other, Tensor), "gate and up have one format"
    scales, to_scales = _part(weight.scales, other.scales, weight)
    zeros, to_zeros = _part(weight.zero_points, other.zero_points, weight)
    factors, to_factor = _part(weight.global_scale, other.global_scale, weight)
    if scales.dtype == torch.float8_e4m3fn:
        # not every GPU knows the type
        scales = scales.view(torch.uint8)
    return {
        "scales_ptr": scales, "zeros_ptr": zeros,
        "stride_ss": scales.stride(0), "stride_sn": scales.stride(1), "stride_s_up": to_scales,
        "stride_zs": zeros.stride(0), "stride_zn": zeros.stride(1), "stride_z_up": to_zeros,
        "global_ptr": factors, "stride_gs": factors.stride(0), "stride_g_up": to_factor,
        "HAS_GLOBAL": weight.global_scale is not None,
        "FORMAT": weight.format, "SCALES_TILE": scales_tile(weight.format, x.dtype),
    }  # fmt: skip


def _part(own: Tensor | None, of_up: Tensor | None, weight: QuantizedStack) -> tuple[Tensor, int]:
    """A part of the weights, and the distance to that of up; the codes if there is none."""
    if own is None:
        return weight.codes, 0
    return own, 0 if of_up is None else distance(own, of_up)


def distance(first: Tensor, second: Tensor) -> int:
    """Elements between the starts of two tensors: a kernel reads both from one address."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()
