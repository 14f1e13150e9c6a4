"""Where the rows of each expert are, and the table of tiles that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.kernel import tile_map
from moe_runtime.kernels.triton_support import launch


class TileMap(NamedTuple):
    """Expert (-1: none) and first row of each tile, in device memory.

    Attributes:
        expert: int32.
        first_row: int64.
    """

    expert: Tensor
    first_row: Tensor


@dataclass(slots=True)
class Groups:
    """Sorted rows of the experts of one layer call.

    Attributes:
        offsets_E1: `[E + 1]` int64: first row of each expert.
        num_rows: R, the most rows there can be.
        slot_of_expert: `[E]` or None; below 0 where an expert takes no part.
        order_R: `[R]` slot of each row, `t * K + k`; None where nothing is gathered or scattered.
        num_choices: K.
    """

    offsets_E1: Tensor
    num_rows: int
    slot_of_expert: Tensor | None = None
    order_R: Tensor | None = None
    num_choices: int = 1
    _maps: dict[int, TileMap] = field(default_factory=dict, repr=False)

    @property
    def num_experts(self) -> int:
        return len(self.offsets_E1) - 1

    @property
    def slots(self) -> Tensor:
        """The slot table, or any tensor where there is none and nobody looks."""
        return self.offsets_E1 if self.slot_of_expert is None else self.slot_of_expert

    @property
    def order(self) -> Tensor:
        """The order, or any tensor where there is none and nobody looks."""
        return self.offsets_E1 if self.order_R is None else self.order_R

    def tiles(self, block_m: int) -> TileMap:
        """The tiles of `block_m` rows, computed once for each size.

        As many entries as there can be: every expert's last tile may be nearly empty.
        """
        if block_m not in self._maps:
            num_experts = self.num_experts
            num_tiles = min(self.num_rows, self.num_rows // block_m + num_experts)
            device = self.offsets_E1.device
            tiles = TileMap(
                torch.empty(num_tiles, dtype=torch.int32, device=device),
                torch.empty(num_tiles, dtype=torch.int64, device=device),
            )
            launch(
                tile_map,
                (num_experts + 1,),
                offsets_ptr=self.offsets_E1,
                slots_ptr=self.slots,
                tile_expert_ptr=tiles.expert,
                tile_row_ptr=tiles.first_row,
                num_experts=num_experts,
                num_tiles=num_tiles,
                HAS_SLOTS=self.slot_of_expert is not None,
                BLOCK_M=block_m,
                BLOCK_E=triton.next_power_of_2(num_experts),
                BLOCK_TILES=64,
            )
            self._maps[block_m] = tiles
        return self._maps[block_m]
