"""Weights of a checkpoint in memory: their codes, their values, or bf16 in the lossless code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_runtime.errors import CapacityError
from moe_runtime.kernels.lossless import PlanesMatrix, encode_planes
from moe_runtime.kernels.lossless.reference import TAIL_BYTES, coded_row_bytes, num_groups
from moe_runtime.memory.layout import TensorRange
from moe_runtime.memory.slab import aligned_bytes

if TYPE_CHECKING:
    from moe_runtime.checkpoints.dense_weights import DenseReader
    from moe_runtime.checkpoints.formats import PackedWeight
    from moe_runtime.checkpoints.safetensors_index import TensorEntry
    from moe_runtime.kernels.quantized import QuantizedMatrix

_ELEMENTS_AT_ONCE = 2**16
"""Elements of a quantised weight that are dequantised at once: a few megabytes on the way."""
_ROOM_SHARE = 8
"""Escapes of a linear layer have room for one of so many weights; trained ones have a quarter."""


def read_matrix(reader: DenseReader, weight: PackedWeight) -> QuantizedMatrix:
    """The codes of one matrix, put in order, in memory of their own.

    Raises:
        CheckpointError: they cannot be read.
    """
    parts = weight.ranges(0, 1, weight.num_rows)
    matrix = weight.packing.matrix(_parts(reader, weight, parts))
    if weight.convert is not None:
        matrix = dataclasses.replace(matrix, codes=weight.convert(matrix.codes))
    reader.report(weight)
    return matrix


def coded_bytes(num_rows: int, num_cols: int) -> int:
    """The most bytes that a bf16 matrix may take in the lossless code."""
    starts_bytes, book_bytes = 4 * (num_groups(num_rows) + 1), 8
    room = num_rows * num_cols // _ROOM_SHARE + TAIL_BYTES
    return num_rows * coded_row_bytes(num_cols) + starts_bytes + book_bytes + room


def read_coded(reader: DenseReader, entry: TensorEntry) -> PlanesMatrix:
    """A bf16 matrix in the lossless code.

    Raises:
        CheckpointError: it cannot be read.
        CapacityError: it takes more than `coded_bytes`.
    """
    matrix = encode_planes(reader.read(entry))
    if matrix.nbytes > coded_bytes(*matrix.shape):
        raise CapacityError(
            f"{entry.name} does not fit in the lossless code: more than one weight in "
            f"{_ROOM_SHARE} has a rare exponent; load the model with cache_code none"
        )
    return matrix


def read_values(reader: DenseReader, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values of a weight as the model holds it, computed a few rows after the others.

    Raises:
        CheckpointError: they cannot be read.
    """
    memory = aligned_bytes(weight.total_rows * weight.num_cols * dtype.itemsize)
    values_RK = memory.view(dtype).view(weight.total_rows, weight.num_cols)
    for rows, cols, packing, ranges in weight.pieces(_ELEMENTS_AT_ONCE):
        matrix = packing.matrix(_parts(reader, weight, ranges))
        values_RK[rows, cols] = matrix.dequantize(dtype)
    return weight.stand_in(values_RK.view(*weight.lead, weight.num_rows, weight.num_cols))


def _parts(
    reader: DenseReader, weight: PackedWeight, ranges: Mapping[str, TensorRange]
) -> dict[str, Tensor]:
    return {
        name: part.view(reader.bytes_of(weight.name, part.file, part.offset, part.span_bytes))
        for name, part in ranges.items()
    }
