"""Where each matrix of an expert lies in the files, once its parameter's origin is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.checkpoints.opening import TORCH_DTYPES
from moe_runtime.checkpoints.provenance import Provenance
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.memory.layout import TensorRange

if TYPE_CHECKING:
    from moe_runtime.checkpoints.formats import PackedWeight, Packing, Weight


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """Where one matrix of one expert lies.

    Attributes:
        name: of the weight that it is in.
        ranges: its parts by name, or itself under None.
        packing: how it is quantised, if it is.
    """

    name: str
    ranges: Mapping[str | None, TensorRange]
    packing: Packing | None = None

    @property
    def described(self) -> str:
        """Its type, for messages."""
        if self.packing is not None:
            return self.packing.described
        return str(self.ranges[None].dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """A matrix of every expert as rows of a parameter: ``start``, ``start + step`` and so on."""

    parameter: str
    start: int
    step: int
    count: int
    out_dim: int


def expert_rows(
    module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, MatrixRows]]:
    """Says which rows of which parameter are an expert's gate, up and down, from the flags."""
    for parameter, tensor in parameters.items():
        is_bias = parameter.endswith("_bias")
        suffix = "_bias" if is_bias else ""
        out_dim = 1 if is_bias or not module.is_transposed else 2
        count = tensor.shape[out_dim]
        if not parameter.startswith("gate_up"):
            matrix = "up" if parameter.startswith("up") else "down"
            yield matrix + suffix, MatrixRows(parameter, 0, 1, count, out_dim)
        elif module.is_concatenated:
            yield "gate" + suffix, MatrixRows(parameter, 0, 1, count // 2, out_dim)
            yield "up" + suffix, MatrixRows(parameter, count // 2, 1, count // 2, out_dim)
        else:
            yield "gate" + suffix, MatrixRows(parameter, 0, 2, count // 2, out_dim)
            yield "up" + suffix, MatrixRows(parameter, 1, 2, count // 2, out_dim)


def place_matrix(
    name: str,
    rows: MatrixRows,
    parameters: Mapping[str, torch.Tensor],
    provenance: Provenance,
    entries: Sequence[Weight],
) -> list[PlacedMatrix]:
    """Where one matrix of each expert lies, as rows of one weight of the checkpoint."""
    tensor = parameters[rows.parameter]
    stride = tensor.stride()
    first = int(tensor.storage_offset()) + np.arange(tensor.shape[0])[:, None] * stride[0]
    starts = first + (rows.start + rows.step * np.arange(rows.count)) * stride[rows.out_dim]
    width = 1
    if tensor.dim() == 3:
        in_dim = 3 - rows.out_dim
        width = tensor.shape[in_dim]
        ends = starts + (width - 1) * stride[in_dim]
        seconds = starts + min(1, width - 1) * stride[in_dim]
        source, offset = provenance.locate(tensor, starts)
        _, second = provenance.locate(tensor, seconds)
        end_source, end = provenance.locate(tensor, ends)
        step = second - offset
        regular = (source == end_source) & (end == offset + step * (width - 1))
    else:
        source, offset = provenance.locate(tensor, starts)
        step, regular = np.ones_like(offset), np.ones_like(offset, dtype=bool)
    row_step = np.diff(offset, axis=1)
    regular &= (source == source[:, :1]) & (step == step[:, :1]) & (step >= 0)
    if not regular.all() or (row_step != row_step[:, :1]).any() or (row_step < 0).any():
        raise UnsupportedModelError(
            f"{entries[int(source[0, 0])].name}: the {name} weights of an expert are scattered "
            "over the file; such checkpoints are not supported yet"
        )
    found = []
    for expert in range(tensor.shape[0]):
        entry = entries[int(source[expert, 0])]
        shape = (rows.count, width) if tensor.dim() == 3 else (rows.count,)
        between = int(row_step[expert, 0]) if rows.count > 1 else width
        strides = (between, int(step[expert, 0])) if tensor.dim() == 3 else (between,)
        place = int(offset[expert, 0])
        if isinstance(entry, TensorEntry):
            found.append(PlacedMatrix(entry.name, {None: _range(entry, place, shape, strides)}))
        else:
            found.append(_packed_rows(entry, place, shape, strides))
    return found


def _range(
    entry: TensorEntry, position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRange:
    dtype = TORCH_DTYPES[entry.dtype]
    offset = entry.offset + position * dtype.itemsize
    return TensorRange.of(entry.file, entry.name, offset, dtype, shape, stride)


def _packed_rows(
    weight: PackedWeight, position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> PlacedMatrix:
    """The parts of a matrix of quantised rows, which must be whole."""
    first, column = divmod(position, weight.num_cols)
    step, odd = divmod(stride[0], weight.num_cols)
    if len(shape) != 2 or column or odd or shape[1] != weight.num_cols or stride[1] != 1:
        raise UnsupportedModelError(
            f"{weight.name}: the weights of an expert are cut along its columns, or transposed; "
            "quantised checkpoints of this kind are not supported yet"
        )
    return PlacedMatrix(weight.name, {**weight.ranges(first, step, shape[0])}, weight.packing)
