"""A quantised weight: codes, scales and zero points as views of wherever they lie."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_runtime.kernels.quantized.formats import BLOCKS, SCALES, WeightFormat
from moe_runtime.kernels.quantized.reference import code_values, scale_values

_CODE_NUMBERS = {"e2m1": 0, "e4m3": 1, "uint4": 2, "uint8": 3, "int8": 4}
_FIRST_BLOCK_NUMBER = 32
_SCALE_NUMBERS = {"e8m0": 0, "e4m3": 1, "bf16": 2, "f16": 3, "f32": 4}
_GLOBAL_NUMBERS = {"none": 0, "multiply": 1, "divide": 2}
MOST_COLS = 2**17
"""Columns up to which the kernels hold a row's values and scales on a thread's stack."""
LARGEST_ZERO = 255
"""The largest constant zero point with which every code is exact in bf16."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A weight `[N, K]`, row-major. Rows of codes and scales may lie at any distance.

    Attributes:
        format: What the numbers mean.
        num_cols: K.
        codes: `uint8 [N, ceil(K * bits / 8)]`, unit stride along its last dimension.
        scales: `[groups of rows, groups of columns]`, unit stride along its last dimension, of the
            element type that `SCALES` names; None where blocks hold them.
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
        """Checks that the parts belong together.

        Raises:
            ValueError: They do not; says which, what was expected and what came.
        """
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
        """Where its parts are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.codes, self.scales, self.zero_points, self.global_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def part(self, first: int, end: int) -> QuantizedMatrix:
        """Rows in the memory of these, of a format without a global scale.

        Args:
            first: where a group of rows begins that share scales.
            end: where another one does, or N.
        """
        group = self.format.group_rows
        groups = slice(first // group, -(-end // group))
        others = (
            None if other is None else other[groups] for other in (self.scales, self.zero_points)
        )
        return QuantizedMatrix(self.format, self.num_cols, self.codes[first:end], *others)

    def native_record(self) -> tuple[list[int], array[int]] | None:
        """The four words of the C struct `Matrix`, and what they point at, which has to be kept.

        Returns:
            None for what the kernels cannot take: other memory than a CPU's, rows with gaps.
        """
        kind = self.format
        parts = (self.codes, self.scales, self.zero_points, self.global_scale)
        if any(part is not None and not _can_be_read(part) for part in parts):
            return None
        if self.num_cols > MOST_COLS or not 0 <= kind.zero <= LARGEST_ZERO:
            return None
        described = array(
            "q",
            (
                _code_number(kind),
                _SCALE_NUMBERS.get(kind.scales, 0),
                kind.group_rows,
                kind.group_cols,
                kind.zero,
                _GLOBAL_NUMBERS[kind.global_scale],
                *_address_and_stride(self.scales),
                0 if self.scales is None else len(self.scales),
                *_address_and_stride(self.zero_points),
                0 if self.global_scale is None else self.global_scale.data_ptr(),
                kind.int8_activations,
            ),
        )
        return [*_address_and_stride(self.codes), described.buffer_info()[0], 0], described

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `[N, K]`: the specification of every kernel.

        Codes and scales are exact in fp32; their product is rounded to fp32 once, and then to
        `dtype`.
        """
        if self.scales is None:
            return _block_values(self).to(dtype)
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
        """A number of each group for every element that it belongs to: `[N, K]`."""
        rows, cols = self.format.group_rows, self.format.group_cols
        for dim, (group, size) in enumerate(((rows, len(self.codes)), (cols, self.num_cols))):
            place = torch.arange(size, device=groups.device)
            place = torch.zeros_like(place) if group == 0 else place // group
            groups = groups.index_select(dim, place)
        return groups


def _block_values(matrix: QuantizedMatrix) -> Tensor:
    # few models have such blocks
    from moe_runtime.kernels.quantized.block_reference import block_values

    return block_values(matrix.codes, matrix.format.codes, BLOCKS[matrix.format.codes].num_bytes)


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
