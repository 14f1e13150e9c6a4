"""How the two moments of AdamW are stored: as they are, in bf16, or in fp8.

A step decodes the moments of some elements, updates them in the parameters' dtype, and encodes them
again. What is stored after a step is the whole state: the steps of an expert without tokens, made
up for later, pass through the format one by one as well, so that tiers change no bit.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest

MomentStorage = Literal["full", "bf16", "fp8"]

CHUNK_ELEMENTS = 2**18
"""Elements that are decoded at once: they stay in the cache. A multiple of `GROUP_ELEMENTS`."""

GROUP_ELEMENTS = 128
"""Neighbours that share an exponent and a scale in fp8."""

_E4M3_MAX = 448.0
_E4M3_RANGE = _E4M3_MAX / 2.0**-9
_MOST_EXPANSION = 16.0


class MomentCodec(ABC):
    """Moments as bytes.

    Attributes:
        is_exact: decoding gives views of what is stored; encoding does nothing.
    """

    is_exact = False

    @abstractmethod
    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of one moment of so many elements; `dtype` is that of the parameters."""

    @abstractmethod
    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements `[start, stop)`, in `dtype`; `start` is a multiple of `CHUNK_ELEMENTS`."""

    @abstractmethod
    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        """Stores elements from `start` on.

        Args:
            stored: all bytes of the moment.
            step: number of the optimizer step, which decides how ties and fractions are rounded.
        """


class FullMoments(MomentCodec):
    """Moments in the dtype of the parameters, in place."""

    is_exact = True

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return stored.view(dtype)[start:stop]

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        """They were updated where they lie."""


class Bf16Moments(MomentCodec):
    """bf16 with unbiased rounding: up or down with the chance that the dropped bits say.

    Rounding to the nearest would freeze a second moment: with `beta2 = 0.999` a step moves it by a
    thousandth, and neighbours in bf16 are up to 1/128 apart. The chances come from a hash of the
    element's place and the step, so a run repeats to the bit.
    """

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return stored.view(torch.bfloat16)[start:stop].to(dtype)

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        halves = stored.view(torch.int16)
        for begin in range(0, len(values), CHUNK_ELEMENTS):
            some = values[begin : begin + CHUNK_ELEMENTS].float()
            bits = some.view(torch.int32) + _dice(step, salt, some)
            place = start + begin
            halves[place : place + len(some)] = (bits >> 16).to(torch.int16)


class Fp8Moments(MomentCodec):
    """E4M3 with COAT's dynamic range expansion, in groups of 128 elements.

    A group stores `sign(x) (|x| / max)^k`, scaled to E4M3's largest number, with `k` such that its
    own range fills that of the format; and `max` and `k` in fp32. Zeros do not count for the range,
    `k` is at most 16. Where COAT never goes below `k = 1`, here a group that is wider than the
    format is compressed: a second moment that underflows to zero would divide a step by `eps`.

    Source: Xi et al., "COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8
    Training" (2024).
    """

    _ROW_BYTES = GROUP_ELEMENTS + 8

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return -(-elements // GROUP_ELEMENTS) * self._ROW_BYTES

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        codes_GN, scales_G2 = self._rows(stored, start, stop - start)
        largest_G1, power_G1 = scales_G2[:, :1], scales_G2[:, 1:]
        codes = codes_GN.float() / _E4M3_MAX
        values = codes.abs().log2_().div_(power_G1).exp2_().mul_(largest_G1).copysign_(codes)
        return values.view(-1)[: stop - start].to(dtype)

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        codes_GN, scales_G2 = self._rows(stored, start, len(values))
        padded = torch.nn.functional.pad(values.float(), (0, codes_GN.numel() - len(values)))
        x_GN = padded.view(-1, GROUP_ELEMENTS)
        sizes = x_GN.abs()
        largest_G1 = sizes.amax(1, keepdim=True)
        is_zero = sizes == 0
        smallest_G1 = sizes.masked_fill(is_zero, math.inf).amin(1, keepdim=True)
        logs = sizes.log2_().sub_(largest_G1.log2())
        power_G1 = math.log2(_E4M3_RANGE) / (largest_G1.log2() - smallest_G1.log2())
        power_G1 = power_G1.nan_to_num_(nan=1.0).clamp_(max=_MOST_EXPANSION)
        # a group of zeros has no range and no logarithm
        power_G1.masked_fill_(largest_G1 == 0, 1.0)
        expanded = logs.mul_(power_G1).exp2_().masked_fill_(is_zero, 0).mul_(_E4M3_MAX)
        codes_GN.copy_(expanded.copysign_(x_GN).to(torch.float8_e4m3fn))
        scales_G2[:, :1], scales_G2[:, 1:] = largest_G1, power_G1

    def _rows(self, stored: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Codes `[G, 128]` and scales `[G, 2]` of the groups that hold some elements."""
        first, groups = start // GROUP_ELEMENTS, -(-length // GROUP_ELEMENTS)
        rows = stored[first * self._ROW_BYTES : (first + groups) * self._ROW_BYTES]
        rows = rows.view(groups, self._ROW_BYTES)
        codes = rows[:, :GROUP_ELEMENTS].view(torch.float8_e4m3fn)
        return codes, rows[:, GROUP_ELEMENTS:].view(torch.float32)


_CODECS = {"full": FullMoments, "bf16": Bf16Moments, "fp8": Fp8Moments}


def moment_codec(storage: MomentStorage) -> MomentCodec:
    """The format of a name.

    Raises:
        ValueError: there is none of that name; says which is nearest.
    """
    if storage not in _CODECS:
        raise ValueError(
            f"moments is {storage!r}; {nearest(str(storage), get_args(MomentStorage))}"
        )
    return _CODECS[storage]()


def _dice(step: int, salt: int, like: Tensor) -> Tensor:
    """A number in [0, 2**16) for each element of a chunk (``int32``), on its device."""
    factor = _mix(2 * step + salt) | 1
    # as a signed number, which is what torch multiplies
    factor = factor - 2**32 if factor >= 2**31 else factor
    return (_hashed_places(like.device)[: len(like)] * factor >> 16) & 0xFFFF


@functools.cache
def _hashed_places(device: torch.device) -> Tensor:
    places = torch.arange(CHUNK_ELEMENTS, dtype=torch.int64, device=device)
    for shift in (16, 15, 16):
        places = ((places ^ (places >> shift)) * 0x45D9F3B + 0x9E3779B9) & 0xFFFFFFFF
    return torch.where(places >= 2**31, places - 2**32, places).to(torch.int32)


def _mix(number: int) -> int:
    """A hash of 32 bits (the finaliser of MurmurHash3)."""
    number = (number + 0x9E3779B9) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        number = ((number ^ (number >> shift)) * factor) & 0xFFFFFFFF
    return number
