"""The numbers that codes and scales represent, in plain torch.

Shape suffixes: N rows, R rows of activations, K columns, B bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.quantized.formats import INT8_GROUP


def code_values(codes_NB: Tensor, kind: str, num_cols: int) -> Tensor:
    """The numbers of codes of a kind of `CODES`, without zero point and scale: fp32, exact."""
    if kind == "e4m3":
        return codes_NB.contiguous().view(torch.float8_e4m3fn).float()
    if kind == "int8":
        return codes_NB.contiguous().view(torch.int8).float()
    if kind == "uint8":
        return codes_NB.float()
    nibbles_NK = torch.stack((codes_NB & 15, codes_NB >> 4), dim=-1).flatten(1)[:, :num_cols]
    if kind == "uint4":
        return nibbles_NK.float()
    # e2m1: sign, two exponent bits with bias 1, one of mantissa; exponent 0 is subnormal. A table
    # would be copied to the device at every call.
    exponents, odd = nibbles_NK >> 1 & 3, nibbles_NK & 1
    doubled = torch.where(exponents == 0, odd, (odd + 2) << exponents >> 1)
    return doubled.float() * (0.5 - (nibbles_NK >> 3).float())


def scale_values(scales: Tensor, kind: str) -> Tensor:
    """The numbers of scales of a kind of `SCALES`: fp32, exact."""
    if kind != "e8m0":
        return scales.float()
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 1 << 22, bits)  # 2 ** -127 is subnormal in fp32
    values = bits.view(torch.float32)
    return torch.where(scales == 255, torch.nan, values)


def int8_values(x_RK: Tensor) -> Tensor:
    """The values `fp32 [R, K]` of rows rounded to int8 with a scale per `INT8_GROUP`, as in ggml's
    q8_0.

    The largest magnitude of a group becomes 127; below `2 ** -100` it counts as zero. A group with
    an infinity or a NaN is NaN.
    """
    num_cols = x_RK.shape[1]
    padded = torch.nn.functional.pad(x_RK.float(), (0, -num_cols % INT8_GROUP))
    groups = padded.unflatten(1, (-1, INT8_GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    is_nothing = largest < 2.0**-100
    most = torch.full_like(largest, 127)  # a tensor: a number is multiplied by the reciprocal
    inverse = torch.where(is_nothing, 0, most / largest)
    scale = torch.where(is_nothing, 0, largest / most)
    values = (groups * inverse).round() * torch.where(largest.isfinite(), scale, torch.nan)
    return values.flatten(1)[:, :num_cols]
