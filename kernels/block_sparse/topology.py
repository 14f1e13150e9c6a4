"""Which blocks of a matrix are stored, listed by rows and by columns, in device memory.

The matrix is cut along its rows and along its columns into strips that need not be full: the last
strip of an expert's rows, or of its columns, is as short as it is, so neither tokens nor widths are
padded in any dense matrix. A block is where two strips cross; those that exist are stored one after
the other by rows, and a second list names the same blocks by columns, so that a product with the
transposed matrix moves no values. That is the hybrid of blocked CSR and COO with transposed indices
of MegaBlocks (Gale et al., 2022), with strips of any length in place of padding.

Shape suffixes: R rows, N columns, E experts, G strips of rows, C strips of columns, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology_lists import (
    Lists,
    Sizes,
    lists_from_mask,
    lists_from_offsets,
)
from moe_runtime.kernels.grouped_gemm.columns import ExpertColumns, check_block
from moe_runtime.kernels.triton_support import resolve_impl

IMPLS = ("auto", "triton", "torch")


class Strips(NamedTuple):
    """The strips of one side, and the blocks in each.

    Attributes:
        first: First row (or column) of each strip, int64.
        end: The one after its last, int64.
        offsets: Strip g has places `offsets[g]` to `offsets[g + 1]` of the lists below; int32.
        block: Where the block of each place is stored, int32; None if in the same place.
        first_across: First column (row) of the block of each place, int64.
        end_across: The one after its last, int64.
    """

    first: Tensor
    end: Tensor
    offsets: Tensor
    block: Tensor | None
    first_across: Tensor
    end_across: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTopology:
    """The blocks of an `[R, N]` matrix that exist. Values are `[B, block_rows, block_columns]`.

    Attributes:
        num_rows: R.
        num_columns: N.
        block_rows: Most rows of a strip.
        block_columns: Most columns of a strip.
        has_full_columns: Whether every strip of columns is full.
        rows: Strips of rows; block i of the list is stored in place i.
        columns: Strips of columns.
        row_of_block_B: Strip of rows of each stored block, int32; -1 for room that no block needs.
        launch_order_B: The blocks in an order that reuses what both operands bring to the cache.
    """

    num_rows: int
    num_columns: int
    block_rows: int
    block_columns: int
    has_full_columns: bool
    rows: Strips
    columns: Strips
    row_of_block_B: Tensor
    launch_order_B: Tensor

    @property
    def num_blocks(self) -> int:
        """Stored blocks, those that no entry of the matrix needs among them."""
        return len(self.row_of_block_B)

    @property
    def device(self) -> torch.device:
        return self.row_of_block_B.device

    @property
    def values_shape(self) -> tuple[int, int, int]:
        return self.num_blocks, self.block_rows, self.block_columns

    def trimmed(self) -> BlockTopology:
        """The same blocks without room for more. Waits for the device to learn how many there are.

        Without it there is room for the worst case, every row on the widest expert.
        """
        num_blocks = int(self.rows.offsets[-1])
        rows, columns = (
            strips._replace(
                block=None if strips.block is None else strips.block[:num_blocks],
                first_across=strips.first_across[:num_blocks],
                end_across=strips.end_across[:num_blocks],
            )
            for strips in (self.rows, self.columns)
        )
        return replace(
            self,
            rows=rows,
            columns=columns,
            row_of_block_B=self.row_of_block_B[:num_blocks],
            launch_order_B=self.launch_order_B[:num_blocks],
        )


def expert_topology(
    offsets_E1: Tensor,
    columns: ExpertColumns,
    *,
    num_rows: int,
    block_rows: int = 128,
    impl: str = "auto",
) -> BlockTopology:
    """The blocks of rows sorted by expert: each expert's rows times its own columns.

    Made on the device from the token counts; the host learns nothing and does not wait.

    Args:
        offsets_E1: `[E + 1]` int64 first row of each expert, as `token_sort` gives them.
        columns: The experts' columns.
        num_rows: R; rows from the last offset on have no block.
        block_rows: Most rows of a strip.
        impl: `triton` (one launch), `torch` (any device), or `auto`: by the device.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `impl` cannot run here.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
    """
    chosen = resolve_impl(impl, offsets_E1.device, IMPLS)
    check_block("block_rows", block_rows)
    num_experts = len(columns.widths)
    if tuple(offsets_E1.shape) != (num_experts + 1,) or offsets_E1.dtype != torch.int64:
        raise ValueError(
            f"offsets must be [{num_experts + 1}] of int64 for {num_experts} widths, got "
            f"{list(offsets_E1.shape)} of {offsets_E1.dtype}"
        )
    if offsets_E1.device != columns.first.device:
        raise ValueError(f"offsets are on {offsets_E1.device}, columns on {columns.first.device}")
    # Every expert may end with a short strip, and so may the rows without an expert.
    num_strips = min(num_rows, num_rows // block_rows + num_experts + 1)
    num_blocks = columns.most_blocks(num_rows, block_rows)
    make = lists_from_offsets
    if chosen == "triton":
        from moe_runtime.kernels.block_sparse.topology_kernel import lists_from_offsets_triton

        make = lists_from_offsets_triton
    lists = make(
        offsets_E1,
        columns.starts_E1,
        columns.strips_E,
        sizes=Sizes(
            num_rows=num_rows,
            row_strips=num_strips,
            column_strips=len(columns.first),
            num_blocks=num_blocks,
            block_rows=block_rows,
            block_columns=columns.block_columns,
        ),
    )
    return _topology(
        lists,
        columns.first,
        columns.end,
        num_rows=num_rows,
        num_columns=columns.num_columns,
        block_rows=block_rows,
        block_columns=columns.block_columns,
        has_full_columns=columns.is_full,
    )


def mask_topology(
    mask_GC: Tensor, num_rows: int, num_columns: int, *, block_rows: int, block_columns: int
) -> BlockTopology:
    """The blocks where a mask is true. Waits for the device; meant for patterns that stay.

    Args:
        mask_GC: `[G, C]` bool: strip g holds rows `g * block_rows` on, strip c columns likewise.
        num_rows: R; the last strip may be short.
        num_columns: N.
        block_rows: Rows of a strip.
        block_columns: Columns of a strip.

    Raises:
        ValueError: The mask does not have a place for each block of such a matrix.
    """
    check_block("block_rows", block_rows)
    check_block("block_columns", block_columns)
    shape = (-(-num_rows // block_rows), -(-num_columns // block_columns))
    if tuple(mask_GC.shape) != shape or mask_GC.dtype != torch.bool:
        raise ValueError(
            f"mask must be {list(shape)} of bool for {num_rows} x {num_columns} in blocks of "
            f"{block_rows} x {block_columns}, got {list(mask_GC.shape)} of {mask_GC.dtype}"
        )
    first, end = _even_strips(num_columns, block_columns, mask_GC.device)
    lists = lists_from_mask(
        mask_GC, *_even_strips(num_rows, block_rows, mask_GC.device), first, end
    )
    return _topology(
        lists,
        first,
        end,
        num_rows=num_rows,
        num_columns=num_columns,
        block_rows=block_rows,
        block_columns=block_columns,
        has_full_columns=num_columns % block_columns == 0,
    )


def _even_strips(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, length, size, device=device)
    return first, (first + size).clamp(max=length)


def _topology(
    lists: Lists, column_first: Tensor, column_end: Tensor, **sizes: Any
) -> BlockTopology:
    return BlockTopology(
        rows=Strips(
            lists.row_first,
            lists.row_end,
            lists.row_offsets,
            None,
            lists.column_first_B,
            lists.column_end_B,
        ),
        columns=Strips(
            column_first,
            column_end,
            lists.column_offsets,
            lists.by_column_B,
            lists.row_first_B,
            lists.row_end_B,
        ),
        row_of_block_B=lists.row_of_block_B,
        launch_order_B=lists.launch_order_B,
        **sizes,
    )
