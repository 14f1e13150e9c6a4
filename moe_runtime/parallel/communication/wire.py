"""How rows are encoded while they travel between ranks.

`exact` is the default. `bf16` and `fp8` are lossy; only rows that leave their rank are rounded.
With `fp8`, dispatched rows travel as e4m3 with one fp32 scale for every 128 columns (DeepSeek-V3).
Outputs and gradients, which are summed afterwards, travel as bf16.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

WireName = Literal["exact", "bf16", "fp8"]
GROUP_COLUMNS = 128
_E4M3_MAX = 448.0


class Wire(Protocol):
    """A way to write rows."""

    def encode(self, rows_RD: Tensor) -> Tensor:
        """`[R, anything]`: the encoded rows."""
        ...

    def decode(self, sent: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """`[R, width]` in `dtype`, from encoded rows."""
        ...


class CastWire:
    """Rows as they are, or rounded to a type."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def encode(self, rows_RD: Tensor) -> Tensor:
        return rows_RD.to(self._dtype or rows_RD.dtype)

    def decode(self, sent: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        return sent.to(dtype)


EXACT = CastWire()


class Fp8Wire:
    """Rows as e4m3, with a scale for each group of `GROUP_COLUMNS` columns after them."""

    def encode(self, rows_RD: Tensor) -> Tensor:
        num_rows, width = rows_RD.shape
        num_groups = -(-width // GROUP_COLUMNS)
        padded = torch.nn.functional.pad(
            rows_RD.to(torch.float32), (0, num_groups * GROUP_COLUMNS - width)
        ).view(num_rows, num_groups, GROUP_COLUMNS)
        scale_RG1 = padded.abs().amax(dim=2, keepdim=True) / _E4M3_MAX
        # A group of zeros keeps its zeros whatever its scale.
        scale_RG1 = torch.where(scale_RG1 > 0, scale_RG1, 1.0)
        quantised = (padded / scale_RG1).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        values = quantised.flatten(1)[:, :width].contiguous().view(torch.uint8)
        scales = scale_RG1.reshape(num_rows, num_groups).contiguous().view(torch.uint8)
        return torch.cat([values, scales.view(num_rows, 4 * num_groups)], dim=1)

    def decode(self, sent: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        values = sent[:, :width].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        # a copy even where the columns are contiguous, as one row's are: they may begin at any byte
        scales = sent[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (values * scales.repeat_interleave(GROUP_COLUMNS, dim=1)[:, :width]).to(dtype)


def wires(name: WireName) -> tuple[Wire, Wire]:
    """How dispatched rows are encoded, and how outputs and gradients are."""
    bf16 = CastWire(torch.bfloat16)
    found = {"exact": (EXACT, EXACT), "bf16": (bf16, bf16), "fp8": (Fp8Wire(), bf16)}
    if name not in found:
        raise ValueError(f"wire must be exact, bf16 or fp8, got {name!r}")
    return found[name]
