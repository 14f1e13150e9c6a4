"""Quantised matrices as the C kernels read them."""

from __future__ import annotations

from array import array

from torch import Tensor

from moe_runtime.kernels.quantized.matrix import QuantizedMatrix

_CODE_NUMBERS = {"e2m1": 0, "e4m3": 1, "uint4": 2, "uint8": 3, "int8": 4}
_SCALE_NUMBERS = {"e8m0": 0, "e4m3": 1, "bf16": 2, "f16": 3, "f32": 4}
_GLOBAL_NUMBERS = {"none": 0, "multiply": 1, "divide": 2}
MOST_COLS = 2**17
"""Columns up to which the kernels hold a row's values and scales on a thread's stack."""
LARGEST_ZERO = 255
"""The largest constant zero point with which every code is exact in bf16."""


def native_matrix(matrix: QuantizedMatrix) -> tuple[list[int], array[int]] | None:
    """The four words of the C struct `Matrix`, and what they point at, which has to be kept.

    Returns:
        None for what the kernels cannot take: other memory than a CPU's, rows with gaps in them.
    """
    kind = matrix.format
    parts = (matrix.codes, matrix.scales, matrix.zero_points, matrix.global_scale)
    if any(part is not None and not part.is_cpu for part in parts):
        return None
    if any(part is not None and _has_gaps(part) for part in parts):
        return None
    if matrix.num_cols > MOST_COLS or not 0 <= kind.zero <= LARGEST_ZERO:
        return None
    described = array(
        "q",
        (
            _CODE_NUMBERS[kind.codes],
            _SCALE_NUMBERS[kind.scales],
            kind.group_rows,
            kind.group_cols,
            kind.zero,
            _GLOBAL_NUMBERS[kind.global_scale],
            *_address_and_stride(matrix.scales),
            *_address_and_stride(matrix.zero_points),
            0 if matrix.global_scale is None else matrix.global_scale.data_ptr(),
        ),
    )
    return [*_address_and_stride(matrix.codes), described.buffer_info()[0], 0], described


def _has_gaps(part: Tensor) -> bool:
    return part.ndim > 0 and part.stride(-1) != 1 and part.shape[-1] > 1


def _address_and_stride(part: Tensor | None) -> tuple[int, int]:
    return (0, 0) if part is None else (part.data_ptr(), part.stride(0) * part.element_size())
