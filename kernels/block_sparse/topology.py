"""The stored blocks of a matrix, listed by rows and by columns, on the device.

Rows and columns are cut into strips; an expert's last strip is as short as it must be, so no dense
matrix is padded. A block is where two strips cross. Blocks are stored by rows, and a second list
names them by columns, so that a transposed product moves no values: the hybrid blocked CSR and COO
with transposed indices of MegaBlocks (Gale et al., 2022).

Shape suffixes: R rows, N columns, E experts, G strips of rows, C strips of columns, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.columns import ExpertColumns, check_block
from moe_runtime.kernels.token_sort import SortedTokens

_BAND = 8  # strips of rows that use a strip of columns while it is cached


class Strips(NamedTuple):
    """The strips of one side, and the blocks in each.

    Attributes:
        first: First row (or column) of each strip, int64; `end`: the one after its last.
        offsets: Strip g has places `offsets[g]` to `offsets[g + 1]` of the lists below; int32.
        block: Stored block of each place, int32; None if they are the same.
        first_across: First column (row) of the block of each place, int64, and `end_across`.
    """

    first: Tensor
    end: Tensor
    offsets: Tensor
    block: Tensor | None
    first_across: Tensor
    end_across: Tensor


class Gather(NamedTuple):
    """Row r of the sparse matrix belongs to row `order[r] // num_choices` of the operand."""

    sorted_tokens: SortedTokens
    num_choices: int

    @property
    def tokens_R(self) -> Tensor:
        return self.sorted_tokens.order_R // self.num_choices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTopology:
    """The stored blocks of an `[R, N]` matrix. Values are `[B, block_rows, block_columns]`.

    Attributes:
        block_rows: Most rows of a strip.
        block_columns: Most columns of a strip.
        has_full_columns: Whether every strip of columns is full.
        rows: Strips of rows; block i of the list is stored in place i.
        columns: Strips of columns.
        row_of_block_B: Strip of rows of each stored block, int32; -1 for unused room.
        launch_order_B: The blocks in an order that reuses cached operands.
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
        """Stored blocks, including unused room."""
        return len(self.row_of_block_B)

    @property
    def device(self) -> torch.device:
        return self.row_of_block_B.device

    @property
    def values_shape(self) -> tuple[int, int, int]:
        return self.num_blocks, self.block_rows, self.block_columns

    def trimmed(self) -> BlockTopology:
        """The same blocks without unused room; waits for the device to learn their number.

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
    offsets_E1: Tensor, columns: ExpertColumns, *, num_rows: int, block_rows: int = 128
) -> BlockTopology:
    """The blocks of rows sorted by expert: each expert's rows times its own columns.

    Made on the device from the token counts; the host does not wait.

    Args:
        offsets_E1: int64 first row of each expert, as `token_sort` gives them.
        num_rows: R; rows from the last offset on have no block.
        block_rows: Most rows of a strip.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_block("block_rows", block_rows)
    num_experts, device = len(columns.widths), offsets_E1.device
    if tuple(offsets_E1.shape) != (num_experts + 1,) or offsets_E1.dtype != torch.int64:
        raise ValueError(
            f"offsets must be [{num_experts + 1}] of int64 for {num_experts} widths, got "
            f"{list(offsets_E1.shape)} of {offsets_E1.dtype}"
        )
    if device != columns.first.device:
        raise ValueError(f"offsets are on {device}, columns on {columns.first.device}")
    # rows without an expert form one more expert, with no columns
    row_ends = torch.cat([offsets_E1[1:], offsets_E1.new_full((1,), num_rows)])
    row_begins = torch.cat([offsets_E1[:-1], offsets_E1[-1:]])
    tiles = (row_ends - row_begins + block_rows - 1) // block_rows
    last_tile = tiles.cumsum(0)

    # every expert may end with a short strip, and so may the rows without an expert
    strip_G = torch.arange(min(num_rows, num_rows // block_rows + num_experts + 1), device=device)
    expert_G = torch.searchsorted(last_tile, strip_G, right=True)
    is_used = expert_G <= num_experts
    expert_G = expert_G.clamp(max=num_experts)
    nth_G = strip_G - (last_tile - tiles)[expert_G]
    row_first = torch.where(is_used, row_begins[expert_G] + nth_G * block_rows, 0)
    row_end = torch.where(is_used, torch.minimum(row_first + block_rows, row_ends[expert_G]), 0)
    across = torch.nn.functional.pad(columns.strips_E, (0, 1))
    tiles_of_column = tiles[:-1].repeat_interleave(columns.strips_E, output_size=len(columns.first))

    # both orders keep an expert's blocks together, at the same places
    blocks = tiles[:-1] * columns.strips_E
    last_block = blocks.cumsum(0)
    place_B = torch.arange(columns.most_blocks(num_rows, block_rows), device=device)
    expert_B = torch.searchsorted(last_block, place_B, right=True)
    is_block = expert_B < num_experts
    expert_B = expert_B.clamp(max=num_experts - 1)
    base_B = (last_block - blocks)[expert_B]
    nth_B = torch.where(is_block, place_B - base_B, 0)
    tiles_B, strips_B = tiles[expert_B].clamp(min=1), columns.strips_E[expert_B]
    tile_B, strip_B = nth_B // strips_B, nth_B % strips_B
    column_first_B = columns.starts_E1[expert_B] + strip_B * columns.block_columns
    column_end_B = torch.minimum(
        column_first_B + columns.block_columns, columns.starts_E1[expert_B + 1]
    )
    row_of_block_B = torch.where(is_block, (last_tile - tiles)[expert_B] + tile_B, -1)

    tile_B, strip_B = nth_B % tiles_B, nth_B // tiles_B
    by_column_B = torch.where(is_block, base_B + tile_B * strips_B + strip_B, place_B)
    row_first_B = row_begins[expert_B] + tile_B * block_rows
    row_end_B = torch.minimum(row_first_B + block_rows, row_ends[expert_B])

    band_B = nth_B // (_BAND * strips_B)
    tiles_in_band = (tiles_B - band_B * _BAND).clamp(max=_BAND)
    nth_B = nth_B - band_B * _BAND * strips_B
    tile_B, strip_B = band_B * _BAND + nth_B % tiles_in_band, nth_B // tiles_in_band
    launch_B = torch.where(is_block, base_B + tile_B * strips_B + strip_B, place_B)
    return BlockTopology(
        num_rows=num_rows,
        num_columns=columns.num_columns,
        block_rows=block_rows,
        block_columns=columns.block_columns,
        has_full_columns=columns.is_full,
        rows=Strips(
            row_first,
            row_end,
            _offsets(torch.where(is_used, across[expert_G], 0)),
            None,
            torch.where(is_block, column_first_B, 0),
            torch.where(is_block, column_end_B, 0),
        ),
        columns=Strips(
            columns.first,
            columns.end,
            _offsets(tiles_of_column),
            by_column_B.int(),
            torch.where(is_block, row_first_B, 0),
            torch.where(is_block, row_end_B, 0),
        ),
        row_of_block_B=row_of_block_B.int(),
        launch_order_B=launch_B.int(),
    )


def _offsets(counts: Tensor) -> Tensor:
    """Where each strip's blocks begin, and how many there are, int32."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
