"""Which tile each product is computed in: a measured one where there is a table, else a rule.

The rule is data: for each kind of product the tiles in order of the rows an expert has on average.
A tile that does not fit in a device's shared memory gives up stages first, then summed depth. Every
tile listed here is compiled for every architecture in the tests. Nothing is measured at run time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_runtime.kernels.grouped_gemm.packed import scales_tile
from moe_runtime.kernels.grouped_gemm.table import measured_tiles, tile_key
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, ProductKind, Tile
from moe_runtime.kernels.quantized import WeightFormat

# Rows an expert has on average, up to which a tile is used. With few rows the weights are read once
# and nothing is reused: narrow tiles keep many loads in flight. From 64 rows on a warp group's
# matrix instruction is filled; 128 x 256 is where the loads of a tile stay below its arithmetic.
_UNBOUNDED = 1 << 62
TILES_16_BIT: dict[ProductKind, tuple[tuple[int, Tile], ...]] = {
    "plain": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 128, 4, 4)),
        (192, Tile(64, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 256, 64, 8, 4, is_persistent=True)),
    ),
    "gated": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 128, 4, 4)),
        (192, Tile(64, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 256, 64, 8, 4, is_persistent=True)),
    ),
    "down_act_backward": (
        (24, Tile(16, 64, 128, 4, 4)),
        (192, Tile(64, 64, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 128, 64, 8, 4)),
    ),
    "dw": (
        (64, Tile(128, 128, 32, 8, 4)),
        # Two programs share a multiprocessor: sums over an expert's rows are short.
        (_UNBOUNDED, Tile(128, 128, 64, 4, 3, group_m=1)),
    ),
}
TILES_32_BIT: dict[ProductKind, tuple[tuple[int, Tile], ...]] = {
    "plain": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "gated": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "down_act_backward": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "dw": ((_UNBOUNDED, Tile(64, 64, 32, 4, 3)),),
}
# Decoded codes take registers beside the sums, and a group's sums take as many again where scales
# multiply these. A step is no deeper than a group then.
TILES_PACKED: dict[str, tuple[tuple[int, Tile], ...]] = {
    "scaled codes": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 128, 4, 4)),
        (192, Tile(64, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 128, 64, 8, 4)),
    ),
    "scaled sums": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(64, 128, 64, 4, 4)),
    ),
    # decoding takes registers: wider tiles spill
    "blocks": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 64, 4, 4)),
        (_UNBOUNDED, Tile(64, 64, 64, 4, 4)),
    ),
    "32-bit rows": ((24, Tile(16, 64, 64, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 8, 3))),
}


def choose_tile(
    kind: ProductKind,
    *,
    num_rows: int,
    num_experts: int,
    dim_n: int,
    dim_k: int,
    dtype: torch.dtype,
    device: torch.device,
    packed: WeightFormat | None = None,
) -> Tile:
    """The tile of a product, from what the host knows without asking the device.

    Args:
        kind: Which kernel.
        num_rows: Sorted rows of all experts.
        num_experts: Experts that share them.
        dim_n: Columns of the product, gate and up counted separately.
        dim_k: The summed dimension; of a weight gradient, its rows.
        dtype: Of the operands.
        device: Where it runs.
        packed: How the weights are written, if they are codes.
    """
    room = describe_device(device)
    if packed is not None:
        table = TILES_PACKED[packed_table(packed, dtype)]
        return _first_fit(table, num_rows / max(1, num_experts), dim_n).fitted(dtype.itemsize, room)
    sizes = {"num_rows": num_rows, "num_experts": num_experts, "dim_n": dim_n}
    if device.type == "cuda":
        key = tile_key(kind, **sizes, dim_k=dim_k, dtype=dtype)
        measured = measured_tiles(torch.cuda.get_device_name(device)).get(key)
        if measured is not None:
            return measured.fitted(dtype.itemsize, room)
    return tile_by_rule(kind, **sizes, dtype=dtype).fitted(dtype.itemsize, room)


def tile_by_rule(
    kind: ProductKind, *, num_rows: int, num_experts: int, dim_n: int, dtype: torch.dtype
) -> Tile:
    """The rule's tile, whatever the device can hold; arguments as in `choose_tile`."""
    tables = TILES_32_BIT if dtype == torch.float32 else TILES_16_BIT
    return _first_fit(tables[kind], num_rows / max(1, num_experts), dim_n)


def packed_table(kind: WeightFormat, dtype: torch.dtype) -> str:
    """The name of the table in `TILES_PACKED` for weights of a format and rows of a dtype."""
    if dtype == torch.float32:
        return "32-bit rows"
    if kind.block_codes:
        return "blocks"
    return "scaled codes" if scales_tile(kind, dtype) else "scaled sums"


def _first_fit(table: tuple[tuple[int, Tile], ...], rows_per_expert: float, dim_n: int) -> Tile:
    tile = next(tile for limit, tile in table if rows_per_expert <= limit)
    while tile.block_n > 64 and tile.block_n >= 2 * dim_n:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def describe_device(device: torch.device) -> GpuLimits:
    """What a tile must fit in; Hopper's limits where there is no GPU."""
    if device.type != "cuda":
        return GpuLimits()
    found = torch.cuda.get_device_properties(device)
    # Not sm_120: Blackwell's desktop cards multiply from registers, as Ampere's do.
    is_wide = torch.version.hip is None and found.major in (9, 10, 11)
    return GpuLimits(found.shared_memory_per_block_optin, is_wide, found.multi_processor_count)
