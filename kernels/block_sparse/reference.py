"""The specification of the block-sparse products: dense products in plain torch, differentiable.

Shape suffixes: R rows, N columns, B stored blocks, M and J rows and columns of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology
from moe_runtime.kernels.operands import precise_dtype


def to_dense(values_BMJ: Tensor, topology: BlockTopology) -> Tensor:
    """The matrix `[R, N]` of these values, zero where no block is stored."""
    rows_BM, columns_BJ = _indices(topology)
    dense = values_BMJ.new_zeros(topology.num_rows + 1, topology.num_columns + 1)
    places = (rows_BM[:, :, None], columns_BJ[:, None, :])
    # Only the row and the column of padding are written more than once.
    return dense.index_put(places, values_BMJ)[:-1, :-1]


def from_dense(dense_RN: Tensor, topology: BlockTopology) -> Tensor:
    """The stored blocks of a matrix, zero past the ends of strips and in blocks that are unused."""
    rows_BM, columns_BJ = _indices(topology)
    padded = torch.nn.functional.pad(dense_RN, (0, 1, 0, 1))
    return padded[rows_BM[:, :, None], columns_BJ[:, None, :]]


def sdd_reference(a_RK: Tensor, b_KN: Tensor, topology: BlockTopology) -> Tensor:
    """`a @ b` in fp32 (fp64 for fp64), sampled at the blocks and rounded once."""
    precise = precise_dtype(a_RK)
    return from_dense(a_RK.to(precise) @ b_KN.to(precise), topology).to(a_RK.dtype)


def dsd_reference(
    values: Tensor, b: Tensor, topology: BlockTopology, *, is_transposed: bool
) -> Tensor:
    """`s @ b` or `s.T @ b` in fp32 (fp64 for fp64), rounded once."""
    precise = precise_dtype(values)
    sparse = to_dense(values.to(precise), topology)
    return ((sparse.T if is_transposed else sparse) @ b.to(precise)).to(values.dtype)


def _indices(topology: BlockTopology) -> tuple[Tensor, Tensor]:
    """Rows `[B, M]` and columns `[B, J]` of each block; R and N where there is none."""
    is_block = topology.row_of_block_B >= 0
    strip_B = topology.row_of_block_B.clamp(min=0).long()
    rows = topology.rows
    row_ranges = (rows.first[strip_B], rows.end[strip_B], topology.block_rows, topology.num_rows)
    column_ranges = (
        rows.first_across,
        rows.end_across,
        topology.block_columns,
        topology.num_columns,
    )
    found = []
    for first_B, end_B, size, outside in (row_ranges, column_ranges):
        index = first_B[:, None] + torch.arange(size, device=first_B.device)
        inside = (index < end_B[:, None]) & is_block[:, None]
        found.append(torch.where(inside, index, outside))
    return found[0], found[1]
