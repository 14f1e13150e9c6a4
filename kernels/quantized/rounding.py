"""Rounds weights to codes and scales, by the rules of compressed-tensors.

Shape suffixes: N rows, K columns, G groups of columns, B bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.quantized.formats import SCALES, WeightFormat
from moe_runtime.kernels.quantized.matrix import QuantizedMatrix
from moe_runtime.kernels.quantized.reference import scale_values

# the largest magnitude of a group becomes this: half the range of the codes
_LARGEST = {"uint4": 7.5, "uint8": 127.5, "e4m3": 448.0}
_SCALE_OF_ZEROS = 2.0**-23
_E2M1_EXPONENT = 2  # of the largest e2m1 code, 6


def quantize(weight_NK: Tensor, kind: WeightFormat) -> QuantizedMatrix:
    """The codes nearest to a weight, with a scale for each group of a row's columns.

    Args:
        weight_NK: fp32, bf16 or fp16.
        kind: `uint4` or `uint8` with their middle as zero, `e4m3`, or `e2m1` with e8m0 scales;
            groups of one row whose columns divide K.

    Raises:
        ValueError: A weight is infinite or NaN, or K is not a multiple of the group.
    """
    num_cols = weight_NK.shape[1]
    group = kind.group_cols or num_cols
    if num_cols % group:
        raise ValueError(f"expected columns in groups of {group}, got {num_cols}")
    groups_NGK = weight_NK.float().unflatten(1, (-1, group))
    most_NG = groups_NGK.abs().amax(-1)
    if not most_NG.isfinite().all():
        raise ValueError("expected finite weights, found infinite ones or NaN")
    if kind.scales == "e8m0":
        scales_NG = _exponents(most_NG)
    else:
        scales_NG = (most_NG / _LARGEST[kind.codes]).to(SCALES[kind.scales])
        scales_NG = torch.where(scales_NG == 0, _SCALE_OF_ZEROS, scales_NG)
    scaled_NK = (groups_NGK / scale_values(scales_NG, kind.scales)[..., None]).flatten(1)
    return QuantizedMatrix(kind, num_cols, _codes(scaled_NK, kind), scales_NG)


def _exponents(most: Tensor) -> Tensor:
    """The e8m0 scales of groups with these largest magnitudes.

    A magnitude with a mantissa of 1.75 or more counts as the next power of two: the largest of a
    group is 4 to 7 times the scale, and numbers over 6 become 6.
    """
    rounded = most.view(torch.int32) + (1 << 21)
    return ((rounded >> 23) - _E2M1_EXPONENT).clamp(0, 254).to(torch.uint8)


def _codes(scaled_NK: Tensor, kind: WeightFormat) -> Tensor:
    if kind.codes == "e4m3":
        largest = _LARGEST["e4m3"]
        codes = scaled_NK.clamp(-largest, largest).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8)
    if kind.codes == "e2m1":
        codes = _e2m1(scaled_NK)
    else:
        codes = (scaled_NK.round().clamp(-kind.zero, kind.zero - 1) + kind.zero).to(torch.uint8)
    return codes if kind.bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def _e2m1(scaled: Tensor) -> Tensor:
    """The nearest e2m1 code of each number; of two equally near, the even one."""
    most = scaled.abs()
    steps = torch.where(most < 2, 2 * most, torch.where(most < 4, 2 + most, 4 + most / 2))
    return (steps.round().clamp(max=7) + 8 * (scaled < 0)).to(torch.uint8)
