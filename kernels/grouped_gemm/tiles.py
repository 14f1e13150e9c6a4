"""Which tile each product is computed in: a rule by shape, nothing measured at run time.

The rule is data: for each kind of product the tiles in order of the rows an expert has on average.
A tile that does not fit in a device's shared memory gives up stages first, then summed depth. Every
tile listed here is compiled for every architecture in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

ProductKind = Literal["plain", "gated", "dact", "dw"]
# A program needs some shared memory for more than its operands.
_RESERVED_BYTES = 2 * 1024


@dataclass(frozen=True, slots=True)
class Device:
    """What a tile must fit in; the defaults are Hopper's.

    Attributes:
        shared_bytes: Shared memory a program can have.
        has_wide_accumulators: Whether 128 x 256 sums fit beside the operands: from Hopper on the
            matrix units read these from shared memory, before it through registers.
    """

    shared_bytes: int = 227 * 1024
    has_wide_accumulators: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work.

    Attributes:
        block_m: Rows of the tile.
        block_n: Columns of the tile.
        block_k: Summed elements loaded at a time.
        num_warps: Warps of a program.
        num_stages: Loads in flight, counted in steps of `block_k`.
        group_m: Row tiles that share a column tile while it is cached.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the operands in flight."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages * element_bytes

    def fitted(self, element_bytes: int, device: Device) -> Tile:
        """The tile as this device can hold it: narrower, then fewer stages, then less depth."""
        tile = self
        if tile.block_m * tile.block_n > 128 * 128 and not device.has_wide_accumulators:
            tile = replace(tile, block_n=tile.block_n // 2)
        limit = device.shared_bytes - _RESERVED_BYTES
        while tile.shared_bytes(element_bytes) > limit and tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        while tile.shared_bytes(element_bytes) > limit and tile.block_k > 16:
            tile = replace(tile, block_k=tile.block_k // 2)
        return tile


# Rows an expert has on average, up to which a tile is used. With few rows the weights are read once
# and nothing is reused: narrow tiles keep many loads in flight. From 64 rows on a warp group's
# matrix instruction is filled; 128 x 256 is where the loads of a tile stay below its arithmetic.
_UNBOUNDED = 1 << 62
TILES_16_BIT: dict[ProductKind, tuple[tuple[int, Tile], ...]] = {
    "plain": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 128, 4, 4)),
        (192, Tile(64, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 256, 64, 8, 4)),
    ),
    "gated": (
        (24, Tile(16, 64, 128, 4, 4)),
        (48, Tile(32, 64, 128, 4, 4)),
        (192, Tile(64, 128, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 256, 64, 8, 4)),
    ),
    "dact": (
        (24, Tile(16, 64, 128, 4, 4)),
        (192, Tile(64, 64, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 128, 64, 8, 4)),
    ),
    "dw": (
        (64, Tile(128, 128, 32, 8, 4)),
        (_UNBOUNDED, Tile(128, 256, 64, 8, 4)),
    ),
}
TILES_32_BIT: dict[ProductKind, tuple[tuple[int, Tile], ...]] = {
    "plain": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "gated": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "dact": ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3))),
    "dw": ((_UNBOUNDED, Tile(64, 64, 32, 4, 3)),),
}


def choose_tile(
    kind: ProductKind,
    *,
    num_rows: int,
    num_experts: int,
    dim_n: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tile:
    """The tile of a product, from what the host knows without asking the device.

    Args:
        kind: Which kernel.
        num_rows: Sorted rows of all experts.
        num_experts: Experts that share them.
        dim_n: Columns of the product, gate and up counted separately.
        dtype: Of the operands.
        device: Where it runs.
    """
    tables = TILES_32_BIT if dtype == torch.float32 else TILES_16_BIT
    rows_per_expert = num_rows / max(1, num_experts)
    tile = next(tile for limit, tile in tables[kind] if rows_per_expert <= limit)
    while tile.block_n > 64 and tile.block_n >= 2 * dim_n:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile.fitted(dtype.itemsize, describe_device(device))


def describe_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    is_wide = torch.version.hip is None and properties.major >= 9
    return Device(properties.shared_memory_per_block_optin, is_wide)
