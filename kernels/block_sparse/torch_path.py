"""The block-sparse products on a CPU: one matrix product for every rectangle of blocks.

Neighbouring strips with the same columns are taken together, so that a layer of experts is one
product an expert, whatever the block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather
from moe_runtime.kernels.operands import precise_dtype


class Rectangle(NamedTuple):
    """Blocks that lie side by side in the matrix and one after the other in memory.

    Attributes:
        rows, columns: Where in the matrix.
        blocks: Where in the values.
        row_strips: Strips of rows.
    """

    rows: slice
    columns: slice
    blocks: slice
    row_strips: int

    def gathered(self, values: Tensor) -> Tensor:
        """The rectangle as a dense matrix."""
        tiles = values[self.blocks].unflatten(0, (self.row_strips, -1)).transpose(1, 2)
        dense = tiles.flatten(0, 1).flatten(1)
        return dense[: self.rows.stop - self.rows.start, : self.columns.stop - self.columns.start]

    def scattered(self, dense: Tensor, values: Tensor) -> None:
        """Writes a dense rectangle to its blocks, with zeros past the ends of strips."""
        _, block_rows, block_columns = values.shape
        tiles = values[self.blocks].unflatten(0, (self.row_strips, -1))
        height, width = self.row_strips * block_rows, tiles.shape[1] * block_columns
        missing = (0, width - dense.shape[1], 0, height - dense.shape[0])
        padded = torch.nn.functional.pad(dense, missing) if any(missing) else dense
        tiles.copy_(padded.view(self.row_strips, block_rows, -1, block_columns).transpose(1, 2))


def rectangles(topology: BlockTopology) -> list[Rectangle]:
    """The rectangles of a topology, from top to bottom; copies its lists to the host."""
    found: list[Rectangle] = []
    for new in _runs(topology):
        last = found[-1] if found else None
        if (
            last is not None
            and last.columns == new.columns
            and last.rows.stop == new.rows.start
            and (last.rows.stop - last.rows.start) % topology.block_rows == 0
            and last.blocks.stop == new.blocks.start
        ):
            found[-1] = Rectangle(
                slice(last.rows.start, new.rows.stop),
                new.columns,
                slice(last.blocks.start, new.blocks.stop),
                last.row_strips + 1,
            )
        else:
            found.append(new)
    return found


def _runs(topology: BlockTopology) -> Iterator[Rectangle]:
    """The blocks of each strip of rows, cut where the next one is not beside the one before."""
    strips = topology.rows
    lists = (strips.first, strips.end, strips.offsets[:-1], strips.offsets[1:])
    first_column, end_column = strips.first_across.tolist(), strips.end_across.tolist()
    for first, end, begin, stop in zip(*(x.tolist() for x in lists), strict=True):
        start = begin
        for place in range(begin, stop):
            # Only a full strip of columns may have a neighbour in the same dense row.
            continues = (
                place + 1 < stop
                and first_column[place] + topology.block_columns == end_column[place]
                and end_column[place] == first_column[place + 1]
            )
            if not continues:
                columns = slice(first_column[start], end_column[place])
                yield Rectangle(slice(first, end), columns, slice(start, place + 1), 1)
                start = place + 1


def sdd_torch(
    a: Tensor, b_KN: Tensor, topology: BlockTopology, gather: Gather | None = None
) -> Tensor:
    """The blocks of `a @ b` in the dtype of `a`, whose rows may be gathered."""
    values = a.new_zeros(topology.values_shape)
    tokens_R = None if gather is None else gather.tokens_R
    for part in rectangles(topology):
        rows = a[part.rows] if tokens_R is None else a[tokens_R[part.rows]]
        part.scattered(rows @ b_KN[:, part.columns], values)
    return values


def dsd_torch(
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool,
    gather: Gather | None = None,
) -> Tensor:
    """`s @ b` or `s.T @ b` in the dtype of the values; parts of a sum are added in fp32."""
    num_rows = topology.num_columns if is_transposed else topology.num_rows
    out = values.new_zeros(num_rows, b.shape[1], dtype=precise_dtype(values))
    tokens_R = None if gather is None else gather.tokens_R
    for part in rectangles(topology):
        dense = part.gathered(values)
        if is_transposed:
            rows = b[part.rows] if tokens_R is None else b[tokens_R[part.rows]]
            out[part.columns] += dense.T @ rows
        else:
            out[part.rows] += dense @ b[part.columns]
    return out.to(values.dtype)
