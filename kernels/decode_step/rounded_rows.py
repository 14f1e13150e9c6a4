"""Keys and values in int8 with an fp16 scale per 32 values: blocks of ggml's q8_0.

R in shape suffixes is bytes per row; leading dimensions are those of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.linear.quantized import write_values
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.formats import BLOCKS

GROUP, _GROUP_BYTES = BLOCKS["q8_0"]
_LARGEST, _LARGEST_SCALE = 127, 65504.0


def row_bytes(dim: int) -> int:
    """Bytes of a row of `dim` values; ValueError if `dim` is not a multiple of 32."""
    if dim % GROUP:
        raise ValueError(f"rows are rounded in groups of {GROUP} values, got {dim} values")
    return dim // GROUP * _GROUP_BYTES


def width_of(rows: Tensor) -> int:
    """Values per row; rows of bytes are rounded ones."""
    width = rows.shape[-1]
    return width // _GROUP_BYTES * GROUP if rows.dtype is torch.uint8 else width


def round_rows(x: Tensor) -> Tensor:
    """Rounds rows `[..., D]`, D a multiple of 32, to `uint8 [..., R]`.

    The error is at most half a scale: 1/254 of the largest of 32 values, if that is between 0.01
    (smaller scales lose bits in fp16) and 8.3e6 (larger ones are clamped). A NaN spoils its group.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / _LARGEST).clamp(max=_LARGEST_SCALE).half()
    wide = scales.float()
    codes = torch.where(wide == 0, 0, groups / wide).round().clamp(-_LARGEST, _LARGEST)
    parts = scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)
    return torch.cat(parts, dim=-1).flatten(-2)


def widen_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values `[..., S, D]` of rounded rows `[..., S, R]`, each rounded to `dtype` once."""
    kind, width = WeightFormat("q8_0"), width_of(rows)
    out = rows.new_empty((*rows.shape[:-1], width), dtype=dtype)
    each = zip(rows.flatten(0, -3), out.flatten(0, -3), strict=True)
    for codes_SR, values_SD in each:
        found = write_values(QuantizedMatrix(kind, width, codes_SR), dtype, values_SD)
        if found is not values_SD:  # computed by torch
            values_SD.copy_(found)
    return out
