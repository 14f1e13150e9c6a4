"""Quantised weights: views of codes, scales and zero points, wherever they lie."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_runtime.kernels.quantized.formats import BLOCKS, SCALES, WeightFormat
from moe_runtime.kernels.quantized.reference import code_values, scale_values

_CODE_NUMBERS = {"e2m1": 0, "e4m3": 1, "uint4": 2, "uint8": 3, "int8": 4}
_FIRST_BLOCK_NUMBER = 32
_SCALE_NUMBERS = {"e8m0": 0, "e4m3": 1, "bf16": 2, "f16": 3, "f32": 4}
_GLOBAL_NUMBERS = {"none": 0, "multiply": 1, "divide": 2}
MOST_COLS = 2**17  # of a row, whose values and scales the kernels hold on the stack
LARGEST_ZERO = 255  # with which every code is exact in bf16


def _parts(
    weight: QuantizedMatrix | QuantizedStack, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Every part of a weight after a change; None for parts that it lacks."""
    names = ("codes", "scales", "zero_points", "global_scale")
    parts = {name: getattr(weight, name) for name in names}
    return {name: None if part is None else change(part) for name, part in parts.items()}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A row-major weight `[N, K]`. Rows of codes and scales may lie at any distance.

    Attributes:
        num_cols: K.
        codes: `uint8 [N, ceil(K * bits / 8)]`, unit stride along its last dimension.
        scales: `[groups of rows, groups of columns]`, unit stride along its last dimension, of the
            dtype that `SCALES` names; None for blocks.
        zero_points: `uint8`, shaped as the scales, or None.
        global_scale: `fp32 [1]`, or None.
    """

    format: WeightFormat
    num_cols: int
    codes: Tensor
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the parts do not fit together."""
        kind = self.format
        row_bytes = kind.row_bytes(self.num_cols)
        if self.codes.dtype != torch.uint8 or self.codes.shape[1:] != (row_bytes,):
            raise ValueError(f"codes must be uint8 [N, {row_bytes}], got {_described(self.codes)}")
        groups = kind.scales_shape(len(self.codes), self.num_cols)
        expected = "none" if kind.scales == "none" else f"{SCALES[kind.scales]} {[*groups]}"
        if _described(self.scales) != expected:
            raise ValueError(f"scales must be {expected}, got {_described(self.scales)}")
        zeros = self.zero_points
        if (zeros is not None) != kind.has_zero_points:
            raise ValueError(f"zero points: the format says {kind.has_zero_points}")
        if zeros is not None and (zeros.dtype != torch.uint8 or zeros.shape != groups):
            raise ValueError(f"zero points must be uint8 {list(groups)}, got {_described(zeros)}")
        factor = self.global_scale
        if (factor is not None) != (kind.global_scale != "none"):
            raise ValueError(f"global scale: the format says {kind.global_scale}")
        if factor is not None and (factor.dtype != torch.float32 or factor.numel() != 1):
            raise ValueError(f"the global scale must be one fp32 number, got {_described(factor)}")

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        return len(self.codes), self.num_cols

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zero_points, self.global_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def part(self, first: int, end: int) -> QuantizedMatrix:
        """Rows as views, for formats without a global scale; whole groups, or up to N."""
        group = self.format.group_rows
        groups = slice(first // group, -(-end // group))
        others = (
            None if other is None else other[groups] for other in (self.scales, self.zero_points)
        )
        return QuantizedMatrix(self.format, self.num_cols, self.codes[first:end], *others)

    def to(self, device: torch.device) -> QuantizedMatrix:
        return replace(self, **_parts(self, lambda part: part.to(device)))

    def stacked(self) -> QuantizedStack:
        """A stack of this matrix only, as views."""
        return QuantizedStack(self.format, self.num_cols, **_parts(self, lambda part: part[None]))

    def native_struct(self) -> tuple[list[int], array[int]] | None:
        """The four words of the C struct `Matrix`, and the memory they point at, which must be
        kept.

        None if the kernels cannot read it: rows with gaps, or not in a CPU's memory.
        """
        kind = self.format
        parts = (self.codes, self.scales, self.zero_points, self.global_scale)
        if any(part is not None and not _can_be_read(part) for part in parts):
            return None
        if self.num_cols > MOST_COLS or not 0 <= kind.zero <= LARGEST_ZERO:
            return None
        factor = self.global_scale
        words = (
            _code_number(kind), _SCALE_NUMBERS.get(kind.scales, 0), kind.group_rows,
            kind.group_cols, kind.zero, _GLOBAL_NUMBERS[kind.global_scale],
            *_address_and_stride(self.scales), 0 if self.scales is None else len(self.scales),
            *_address_and_stride(self.zero_points), 0 if factor is None else factor.data_ptr(),
            kind.int8_activations,
        )  # fmt: skip
        described = array("q", words)
        return [*_address_and_stride(self.codes), described.buffer_info()[0], 0], described

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `[N, K]`: the specification of every kernel.

        Codes and scales are exact in fp32; their product is rounded to fp32 once, and then to
        `dtype`.
        """
        if self.scales is None:
            # few models have such blocks
            from moe_runtime.kernels.quantized.block_reference import block_values

            name = self.format.codes
            return block_values(self.codes, name, BLOCKS[name].num_bytes).to(dtype)
        values = code_values(self.codes, self.format.codes, self.num_cols)
        scales = scale_values(self.scales, self.format.scales)
        if self.global_scale is not None:
            is_factor = self.format.global_scale == "multiply"
            scales = scales * self.global_scale if is_factor else scales / self.global_scale
        if self.zero_points is not None:
            values = values - self._spread(self.zero_points.float())
        elif self.format.zero:
            values = values - self.format.zero
        return (values * self._spread(scales)).to(dtype)

    def _spread(self, groups: Tensor) -> Tensor:
        """Expands a number of each group to its elements: `[N, K]`."""
        rows, cols = self.format.group_rows, self.format.group_cols
        for dim, (group, size) in enumerate(((rows, len(self.codes)), (cols, self.num_cols))):
            place = torch.arange(size, device=groups.device)
            place = torch.zeros_like(place) if group == 0 else place // group
            groups = groups.index_select(dim, place)
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedStack:
    """Row-major weights `[S, N, K]` of one format. Slots and rows may lie at any distance.

    Attributes as in `QuantizedMatrix`, with a first dimension of S slots; `global_scale` is
    `fp32 [S, 1]` with any stride, or None.
    """

    format: WeightFormat
    num_cols: int
    codes: Tensor
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the parts do not fit together."""
        parts = {"codes": self.codes, "scales": self.scales, "zero points": self.zero_points}
        for name, part in parts.items():
            if part is None:
                continue
            if part.ndim != 3 or len(part) != len(self.codes) or part.device != self.device:
                raise ValueError(
                    f"{name} must have three dimensions, {len(self.codes)} slots on {self.device} "
                    f"like the codes, got {list(part.shape)} on {part.device}"
                )
            if part.stride(2) != 1 and part.shape[2] > 1:
                raise ValueError(f"{name} must have unit stride in a row, got {part.stride()}")
        factors = self.global_scale
        if factors is not None and (
            factors.shape != (len(self.codes), 1) or factors.device != self.device
        ):
            raise ValueError(
                f"global scales must be {[len(self.codes), 1]} on {self.device}, got "
                f"{list(factors.shape)} on {factors.device}"
            )
        if len(self.codes):
            self.matrix(0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(S, N, K)`."""
        return self.codes.shape[0], self.codes.shape[1], self.num_cols

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def matrix(self, slot: int) -> QuantizedMatrix:
        """Views of one slot."""
        return QuantizedMatrix(self.format, self.num_cols, **_parts(self, lambda part: part[slot]))

    def dequantize(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of some slots, `[len(slots), N, K]`: the specification of every kernel."""
        some, num_rows = self.select(slots), self.shape[1]
        is_apart = self.global_scale is not None
        if is_apart or not self.format.group_rows or num_rows % self.format.group_rows:
            # each matrix has its own global scale, or groups of rows end with it
            values = [some.matrix(i).dequantize(dtype) for i in range(len(slots))]
            return torch.stack(values) if values else some.codes.new_empty(some.shape, dtype=dtype)
        parts = _parts(some, lambda part: part.flatten(0, 1))
        flat = QuantizedMatrix(self.format, self.num_cols, **parts)
        return flat.dequantize(dtype).view(some.shape)

    def select(self, slots: Tensor) -> QuantizedStack:
        """A copy of some slots."""
        return replace(self, **_parts(self, lambda part: part[slots]))

    def halves(self) -> tuple[QuantizedStack, QuantizedStack]:
        """The upper and the lower rows, as views; scales that cover both are repeated."""
        size = self.shape[1] // 2
        group = self.format.group_rows
        finest = math.gcd(size, group)
        repeats = group // finest if group else 1
        kind = replace(self.format, group_rows=finest if group else 0)

        def half(part: Tensor | None, rows: slice) -> Tensor | None:
            if part is None or not group:
                return part
            part = part if repeats == 1 else part.repeat_interleave(repeats, dim=1)
            return part[:, rows]

        def cut(first: int) -> QuantizedStack:
            groups = slice(first // max(1, finest), (first + size) // max(1, finest))
            return QuantizedStack(
                kind,
                self.num_cols,
                self.codes[:, first : first + size],
                half(self.scales, groups),
                half(self.zero_points, groups),
                self.global_scale,
            )

        return cut(0), cut(size)

    def alternating(self) -> tuple[QuantizedStack, QuantizedStack]:
        """The even and the odd rows, as views; ValueError if rows share scales."""
        if self.format.group_rows != 1:
            raise ValueError("rows that lie in turn must have scales of their own")
        own = {"global_scale": self.global_scale}
        even = replace(self, **_parts(self, lambda part: part[:, 0::2]) | own)
        return even, replace(self, **_parts(self, lambda part: part[:, 1::2]) | own)


def _code_number(kind: WeightFormat) -> int:
    if kind.codes in BLOCKS:
        return _FIRST_BLOCK_NUMBER + [*BLOCKS].index(kind.codes)
    return _CODE_NUMBERS[kind.codes]


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _can_be_read(part: Tensor) -> bool:
    has_gaps = part.ndim > 0 and part.stride(-1) != 1 and part.shape[-1] > 1
    return part.is_cpu and not isinstance(part, FakeTensor) and not has_gaps


def _address_and_stride(part: Tensor | None) -> tuple[int, int]:
    return (0, 0) if part is None else (part.data_ptr(), part.stride(0) * part.element_size())
