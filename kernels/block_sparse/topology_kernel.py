"""The lists of a block topology in one launch: a program an expert, and one for what remains."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology_lists import BAND, Lists, Sizes
from moe_runtime.kernels.triton_support import launch


@triton.jit
def expert_blocks(
    offsets_ptr,
    starts_ptr,
    strips_ptr,
    row_first_ptr,
    row_end_ptr,
    row_offsets_ptr,
    column_offsets_ptr,
    column_first_ptr,
    column_end_ptr,
    row_of_block_ptr,
    by_column_ptr,
    block_row_first_ptr,
    block_row_end_ptr,
    launch_order_ptr,
    num_experts,
    num_rows,
    row_strips,
    column_strips,
    num_blocks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e lists the strips and blocks of expert e.

    The program after the last one lists the strips of rows without an expert, and marks the room
    that nobody needs.
    """
    expert = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < num_experts
    begins = tl.load(offsets_ptr + offs_e, mask=mask_e, other=0)
    ends = tl.load(offsets_ptr + offs_e + 1, mask=mask_e, other=0)
    strips = tl.load(strips_ptr + offs_e, mask=mask_e, other=0)
    tiles = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    is_before = offs_e < expert
    first_tile = tl.sum(tl.where(is_before, tiles, 0), axis=0)
    first_strip = tl.sum(tl.where(is_before, strips, 0), axis=0)
    first_block = tl.sum(tl.where(is_before, tiles * strips, 0), axis=0)
    begin = tl.load(offsets_ptr + expert)
    offs = tl.arange(0, CHUNK)
    if expert == num_experts:
        for i in range(0, row_strips - first_tile, CHUNK):
            mask = i + offs < row_strips - first_tile
            first = begin + (i + offs).to(tl.int64) * BLOCK_ROWS
            is_used = first < num_rows
            place = first_tile + i + offs
            tl.store(row_first_ptr + place, tl.where(is_used, first, 0), mask=mask)
            last = tl.where(is_used, tl.minimum(first + BLOCK_ROWS, num_rows), 0)
            tl.store(row_end_ptr + place, last, mask=mask)
            tl.store(row_offsets_ptr + place, first_block.to(tl.int32), mask=mask)
        tl.store(row_offsets_ptr + row_strips, first_block.to(tl.int32))
        tl.store(column_offsets_ptr + column_strips, first_block.to(tl.int32))
        zeros = tl.zeros([CHUNK], dtype=tl.int64)
        for i in range(0, num_blocks - first_block, CHUNK):
            place = first_block + i + offs
            mask = place < num_blocks
            tl.store(row_of_block_ptr + place, (zeros - 1).to(tl.int32), mask=mask)
            tl.store(by_column_ptr + place, place.to(tl.int32), mask=mask)
            tl.store(launch_order_ptr + place, place.to(tl.int32), mask=mask)
            tl.store(column_first_ptr + place, zeros, mask=mask)
            tl.store(column_end_ptr + place, zeros, mask=mask)
            tl.store(block_row_first_ptr + place, zeros, mask=mask)
            tl.store(block_row_end_ptr + place, zeros, mask=mask)
        return

    end = tl.load(offsets_ptr + expert + 1)
    start = tl.load(starts_ptr + expert)
    end_column = tl.load(starts_ptr + expert + 1)
    own_strips = tl.load(strips_ptr + expert)
    own_tiles = (end - begin + BLOCK_ROWS - 1) // BLOCK_ROWS
    for i in range(0, own_tiles, CHUNK):
        tile = i + offs
        mask = tile < own_tiles
        first = begin + tile.to(tl.int64) * BLOCK_ROWS
        tl.store(row_first_ptr + first_tile + tile, first, mask=mask)
        tl.store(row_end_ptr + first_tile + tile, tl.minimum(first + BLOCK_ROWS, end), mask=mask)
        offset = first_block + tile * own_strips
        tl.store(row_offsets_ptr + first_tile + tile, offset.to(tl.int32), mask=mask)
    for i in range(0, own_strips, CHUNK):
        strip = i + offs
        offset = first_block + strip * own_tiles
        place = first_strip + strip
        tl.store(column_offsets_ptr + place, offset.to(tl.int32), mask=strip < own_strips)
    for i in range(0, own_tiles * own_strips, CHUNK):
        nth = i + offs
        mask = nth < own_tiles * own_strips
        place = first_block + nth
        tl.store(row_of_block_ptr + place, (first_tile + nth // own_strips).to(tl.int32), mask=mask)
        column = start + (nth % own_strips) * BLOCK_COLUMNS
        tl.store(column_first_ptr + place, column, mask=mask)
        tl.store(column_end_ptr + place, tl.minimum(column + BLOCK_COLUMNS, end_column), mask=mask)
        # The same places once more, the blocks in order of columns.
        tile = nth % own_tiles
        block = first_block + tile * own_strips + nth // own_tiles
        tl.store(by_column_ptr + place, block.to(tl.int32), mask=mask)
        row = begin + tile * BLOCK_ROWS
        tl.store(block_row_first_ptr + place, row, mask=mask)
        tl.store(block_row_end_ptr + place, tl.minimum(row + BLOCK_ROWS, end), mask=mask)
        # And in the order of the launch: some strips of rows over one of columns, then the next.
        band = nth // (BAND * own_strips)
        nth -= band * BAND * own_strips
        in_band = tl.minimum(own_tiles - band * BAND, BAND)
        block = first_block + (band * BAND + nth % in_band) * own_strips + nth // in_band
        tl.store(launch_order_ptr + place, block.to(tl.int32), mask=mask)


def lists_from_offsets_triton(
    offsets_E1: Tensor, starts_E1: Tensor, strips_E: Tensor, *, sizes: Sizes
) -> Lists:
    """As `lists_from_offsets`, which is its specification."""
    num_experts = len(strips_E)

    def empty(length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype, device=offsets_E1.device)

    blocks, strips = sizes.num_blocks, sizes.row_strips
    lists = Lists(
        row_first=empty(strips, torch.int64),
        row_end=empty(strips, torch.int64),
        row_offsets=empty(strips + 1, torch.int32),
        column_offsets=empty(sizes.column_strips + 1, torch.int32),
        column_first_B=empty(blocks, torch.int64),
        column_end_B=empty(blocks, torch.int64),
        row_of_block_B=empty(blocks, torch.int32),
        by_column_B=empty(blocks, torch.int32),
        row_first_B=empty(blocks, torch.int64),
        row_end_B=empty(blocks, torch.int64),
        launch_order_B=empty(blocks, torch.int32),
    )
    launch(
        expert_blocks,
        (num_experts + 1,),
        offsets_ptr=offsets_E1,
        starts_ptr=starts_E1,
        strips_ptr=strips_E,
        row_first_ptr=lists.row_first,
        row_end_ptr=lists.row_end,
        row_offsets_ptr=lists.row_offsets,
        column_offsets_ptr=lists.column_offsets,
        column_first_ptr=lists.column_first_B,
        column_end_ptr=lists.column_end_B,
        row_of_block_ptr=lists.row_of_block_B,
        by_column_ptr=lists.by_column_B,
        block_row_first_ptr=lists.row_first_B,
        block_row_end_ptr=lists.row_end_B,
        launch_order_ptr=lists.launch_order_B,
        num_experts=num_experts,
        num_rows=sizes.num_rows,
        row_strips=strips,
        column_strips=sizes.column_strips,
        num_blocks=blocks,
        BLOCK_ROWS=sizes.block_rows,
        BLOCK_COLUMNS=sizes.block_columns,
        BAND=BAND,
        BLOCK_E=triton.next_power_of_2(num_experts),
        CHUNK=128,
    )
    return lists
