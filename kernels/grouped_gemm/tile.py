"""The shape of one program's work, and what it must fit in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ProductKind = Literal["plain", "gated", "down_act_backward", "dw"]
# A program needs some shared memory for more than its operands.
_RESERVED_BYTES = 2 * 1024


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a tile must fit in; the defaults are Hopper's.

    Attributes:
        shared_bytes: Shared memory a program can have.
        has_wide_accumulators: Whether 128 x 256 sums fit beside the operands: the matrix units of
            Hopper and of Blackwell's servers read these from shared memory, others through
            registers. Those have descriptors of tensors, too.
        num_multiprocessors: Programs that run at once, at one each.
    """

    shared_bytes: int = 227 * 1024
    has_wide_accumulators: bool = True
    num_multiprocessors: int = 132


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
        is_persistent: Whether programs stay for tile after tile and load by TMA, where a product
            can be computed so; see `persistent.py`.
        max_registers: Of a thread, so that programs share a multiprocessor; 0 is what it takes.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    is_persistent: bool = False
    max_registers: int = 0

    def options(self, *, num_stages: int | None = None) -> dict[str, int]:
        """What the compiler is told; `num_stages` instead of the tile's."""
        options = {"num_warps": self.num_warps, "num_stages": num_stages or self.num_stages}
        return {**options, "maxnreg": self.max_registers} if self.max_registers else options

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the operands in flight."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages * element_bytes

    def for_widths(self) -> Tile:
        """The tile for experts that differ in width, whose addresses take registers of the sums."""
        if self.block_m * self.block_n < 128 * 128:
            return self
        return replace(self, block_n=self.block_n // 2)

    def fitted(self, element_bytes: int, device: GpuLimits) -> Tile:
        """The tile as this device can hold it: narrower, then fewer stages, then less depth."""
        tile = self
        if tile.block_m * tile.block_n > 128 * 128 and not device.has_wide_accumulators:
            tile = replace(tile, block_n=tile.block_n // 2)
        if tile.is_persistent and not device.has_wide_accumulators:
            tile = replace(tile, is_persistent=False)
        if tile.block_m * tile.block_n >= 128 * 128 and not device.has_wide_accumulators:
            # operands go through registers, and four warps have none left beside the sums
            tile = replace(tile, num_warps=max(8, tile.num_warps))
        limit = device.shared_bytes - _RESERVED_BYTES
        while tile.shared_bytes(element_bytes) > limit and tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        while tile.shared_bytes(element_bytes) > limit and tile.block_k > 16:
            tile = replace(tile, block_k=tile.block_k // 2)
        return tile
