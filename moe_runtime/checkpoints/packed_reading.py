"""Quantised weights as a checkpoint's files have them, in memory: their codes, or their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_runtime.memory.layout import TensorRange
from moe_runtime.memory.slab import aligned_bytes

if TYPE_CHECKING:
    from moe_runtime.checkpoints.dense_weights import DenseReader
    from moe_runtime.checkpoints.formats import PackedWeight
    from moe_runtime.kernels.quantized import QuantizedMatrix

_ELEMENTS_AT_ONCE = 2**16
"""Elements of a quantised weight that are dequantised at once: a few megabytes on the way."""


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
