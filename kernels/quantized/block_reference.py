"""Values of blocks that hold codes and scales together, in plain torch.

Layouts: ggml's `block_*` structures, as in GGUF files. Every function takes `uint8 [M, B]`, M
blocks of B bytes, and gives their V values, `fp32 [M, V]`, each rounded once at most. Of two codes
in a byte the low one belongs to the first half of a run, unlike in rows of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

NONLINEAR_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of the sixteen codes of `iq4_nl` and `iq4_xs`, before the scale."""

DOUBLED_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1, as integers: there is no -0."""


def _half(bytes_M2: Tensor) -> Tensor:
    """An fp16 number of each block, `fp32 [M, 1]`."""
    return bytes_M2.contiguous().view(torch.float16).float()


def _float(bytes_M4: Tensor) -> Tensor:
    return bytes_M4.contiguous().view(torch.float32)


def _nibbles(bytes_MB: Tensor, run: int) -> Tensor:
    """Codes of 4 bits: in each run of bytes all low ones, then all high ones."""
    runs = bytes_MB.unflatten(1, (-1, 1, run))
    shifts = torch.tensor([[0], [4]], dtype=torch.uint8, device=runs.device)
    return ((runs >> shifts) & 15).flatten(1)


def _fields(bytes_MB: Tensor, run: int, width: int, count: int) -> Tensor:
    """Codes of `width` bits: in each run of bytes all lowest ones, then all second ones, and on."""
    runs = bytes_MB.unflatten(1, (-1, 1, run))
    shifts = torch.arange(count, device=runs.device)[:, None].to(torch.uint8) * width
    return ((runs >> shifts) & (2**width - 1)).flatten(1)


def _bits(bytes_M4: Tensor) -> Tensor:
    """32 bits of each block, the lowest first."""
    return _fields(bytes_M4, 1, 1, 8)


def _grouped(codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """`code * scale - minimum`, with a scale and a minimum for each of equal runs of codes."""
    values = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return (values if minima is None else values - minima[..., None]).flatten(1)


def _looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:], 16).float() - 8) * _half(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return (codes.float() - 16) * _half(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return codes.float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


def _q2_k(blocks: Tensor) -> Tensor:
    packed, codes = blocks[:, :16], _fields(blocks[:, 16:80], 32, 2, 4)
    scales, minima = (packed & 15).float(), (packed >> 4).float()
    return _grouped(codes, scales * _half(blocks[:, 80:82]), minima * _half(blocks[:, 82:84]))


def _q3_k(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, :32], 32, 1, 8)
    codes = (_fields(blocks[:, 32:96], 32, 2, 4) | high << 2).float() - 4
    scales = _fields(blocks[:, 96:104], 8, 4, 2) | _fields(blocks[:, 104:108], 4, 2, 4) << 4
    return _grouped(codes, (scales.float() - 32) * _half(blocks[:, 108:110]))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits from 12 bytes."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (low & 15) | (first >> 6) << 4), 1)
    minima = torch.cat((second & 63, (low >> 4) | (second >> 6) << 4), 1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:], 32)
    return _grouped(codes, scales * _half(blocks[:, :2]), minima * _half(blocks[:, 2:4]))


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:], 32) | _fields(blocks[:, 16:48], 32, 1, 8) << 4
    return _grouped(codes, scales * _half(blocks[:, :2]), minima * _half(blocks[:, 2:4]))


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 32, 2, 4) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _grouped(codes.float() - 32, scales * _half(blocks[:, 208:]))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up(NONLINEAR_VALUES, _nibbles(blocks[:, 2:], 16)) * _half(blocks[:, :2])


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _fields(blocks[:, 4:8], 1, 4, 2) | _fields(blocks[:, 2:4], 1, 2, 4) << 4
    codes = _looked_up(NONLINEAR_VALUES, _nibbles(blocks[:, 8:], 16))
    return _grouped(codes, (scales.float() - 32) * _half(blocks[:, :2]))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    # half of 2 ** (exponent - 127), as the values are doubled: below 2 it is subnormal
    bits = torch.where(exponents < 2, 1 << (21 + exponents.clamp(max=1)), (exponents - 1) << 23)
    return _looked_up(DOUBLED_E2M1_VALUES, _nibbles(blocks[:, 1:], 16)) * bits.view(torch.float32)


_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        **{"q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0},
        **{"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k},
        **{"iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4_block": _mxfp4},
        **{"f16_block": _half, "f32_block": _float},
    }
)


def block_values(blocks_NB: Tensor, kind: str, block_bytes: int) -> Tensor:
    """The values `fp32 [N, K]` of rows of whole blocks, `uint8 [N, B]`, of a kind of `BLOCKS`."""
    values = _VALUES[kind](blocks_NB.reshape(-1, block_bytes))
    return values.reshape(len(blocks_NB), -1)
