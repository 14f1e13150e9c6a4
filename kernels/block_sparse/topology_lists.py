"""The lists of a block topology in plain torch, without a step that waits for the device.

Shape suffixes: E experts, G strips of rows, C strips of columns, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Strips of rows that go over a strip of columns while its operand lies in the cache.
BAND = 8


class Sizes(NamedTuple):
    """How much room there is, which the host knows without asking the device.

    Attributes:
        num_rows: Rows, those without an expert among them.
        row_strips: Strips of rows there could be.
        column_strips: Strips of columns.
        num_blocks: Blocks there could be.
        block_rows: Most rows of a strip.
        block_columns: Most columns of a strip.
    """

    num_rows: int
    row_strips: int
    column_strips: int
    num_blocks: int
    block_rows: int
    block_columns: int


class Lists(NamedTuple):
    """What a topology is made of; see `Strips` and `BlockTopology` for the meaning.

    Attributes:
        row_first, row_end: `[G]` int64; both 0 for strips that are not used.
        row_offsets, column_offsets: `[G + 1]` and `[C + 1]` int32.
        column_first_B, column_end_B: `[B]` int64, in stored order.
        row_of_block_B: `[B]` int32, -1 for room that no block needs.
        by_column_B: `[B]` int32: the stored place of each block in order of columns.
        row_first_B, row_end_B: `[B]` int64, in order of columns.
        launch_order_B: `[B]` int32, a permutation.
    """

    row_first: Tensor
    row_end: Tensor
    row_offsets: Tensor
    column_offsets: Tensor
    column_first_B: Tensor
    column_end_B: Tensor
    row_of_block_B: Tensor
    by_column_B: Tensor
    row_first_B: Tensor
    row_end_B: Tensor
    launch_order_B: Tensor


def lists_from_offsets(
    offsets_E1: Tensor, starts_E1: Tensor, strips_E: Tensor, *, sizes: Sizes
) -> Lists:
    """Every strip of an expert's rows with every strip of its columns.

    Args:
        offsets_E1: `[E + 1]` int64 first row of each expert.
        starts_E1: `[E + 1]` int64 first column of each expert.
        strips_E: `[E]` int64 strips of columns of each expert.
        sizes: The room.
    """
    device = offsets_E1.device
    num_experts = len(strips_E)
    # The rows without an expert are one more expert, with no columns.
    row_ends = torch.cat([offsets_E1[1:], offsets_E1.new_tensor([sizes.num_rows])])
    row_begins = torch.cat([offsets_E1[:-1], offsets_E1[-1:]])
    across = torch.nn.functional.pad(strips_E, (0, 1))
    tiles = (row_ends - row_begins + sizes.block_rows - 1) // sizes.block_rows
    last_tile = tiles.cumsum(0)

    strip_G = torch.arange(sizes.row_strips, device=device)
    expert_G = torch.searchsorted(last_tile, strip_G, right=True)
    is_used = expert_G <= num_experts
    expert_G = expert_G.clamp(max=num_experts)
    nth_G = strip_G - (last_tile - tiles)[expert_G]
    row_first = torch.where(is_used, row_begins[expert_G] + nth_G * sizes.block_rows, 0)
    row_end = torch.where(
        is_used, torch.minimum(row_first + sizes.block_rows, row_ends[expert_G]), 0
    )
    blocks_of_strip = torch.where(is_used, across[expert_G], 0)
    row_offsets = torch.nn.functional.pad(blocks_of_strip.cumsum(0), (1, 0))
    tiles_of_column = tiles[:-1].repeat_interleave(strips_E, output_size=sizes.column_strips)
    column_offsets = torch.nn.functional.pad(tiles_of_column.cumsum(0), (1, 0))

    # Both orders keep an expert's blocks together: it has the same places in either.
    blocks = tiles[:-1] * strips_E
    last_block = blocks.cumsum(0)
    place_B = torch.arange(sizes.num_blocks, device=device)
    expert_B = torch.searchsorted(last_block, place_B, right=True)
    is_block = expert_B < num_experts
    expert_B = expert_B.clamp(max=num_experts - 1)
    base_B = (last_block - blocks)[expert_B]
    nth_B = torch.where(is_block, place_B - base_B, 0)
    tiles_B, strips_B = tiles[expert_B].clamp(min=1), strips_E[expert_B]
    tile_B, strip_B = nth_B // strips_B, nth_B % strips_B
    column_first_B = starts_E1[expert_B] + strip_B * sizes.block_columns
    column_end_B = torch.minimum(column_first_B + sizes.block_columns, starts_E1[expert_B + 1])
    row_of_block_B = torch.where(is_block, (last_tile - tiles)[expert_B] + tile_B, -1)

    tile_B, strip_B = nth_B % tiles_B, nth_B // tiles_B
    by_column_B = torch.where(is_block, base_B + tile_B * strips_B + strip_B, place_B)
    row_first_B = row_begins[expert_B] + tile_B * sizes.block_rows
    row_end_B = torch.minimum(row_first_B + sizes.block_rows, row_ends[expert_B])

    band_B = nth_B // (BAND * strips_B)
    tiles_in_band = (tiles_B - band_B * BAND).clamp(max=BAND)
    nth_B = nth_B - band_B * BAND * strips_B
    tile_B, strip_B = band_B * BAND + nth_B % tiles_in_band, nth_B // tiles_in_band
    launch_B = torch.where(is_block, base_B + tile_B * strips_B + strip_B, place_B)
    return Lists(
        row_first,
        row_end,
        row_offsets.int(),
        column_offsets.int(),
        torch.where(is_block, column_first_B, 0),
        torch.where(is_block, column_end_B, 0),
        row_of_block_B.int(),
        by_column_B.int(),
        torch.where(is_block, row_first_B, 0),
        torch.where(is_block, row_end_B, 0),
        launch_B.int(),
    )


def lists_from_mask(
    mask_GC: Tensor, row_first: Tensor, row_end: Tensor, column_first: Tensor, column_end: Tensor
) -> Lists:
    """The blocks where a mask is true; asks the device how many those are."""
    row_B, column_B = mask_GC.nonzero(as_tuple=True)
    by_column_B = torch.argsort(column_B, stable=True)
    rows_by_column_B = row_B[by_column_B]
    # Bands of strips of rows, columns within them, rows within those.
    num_columns = mask_GC.shape[1]
    key_B = (row_B // BAND * num_columns + column_B) * BAND + row_B % BAND

    def offsets(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    return Lists(
        row_first,
        row_end,
        offsets(mask_GC.sum(1)),
        offsets(mask_GC.sum(0)),
        column_first[column_B],
        column_end[column_B],
        row_B.int(),
        by_column_B.int(),
        row_first[rows_by_column_B],
        row_end[rows_by_column_B],
        torch.argsort(key_B).int(),
    )
