"""The rows of each expert, and the table of tiles for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.columns import ExpertColumns
from moe_runtime.kernels.grouped_gemm.kernel import tile_map
from moe_runtime.kernels.grouped_gemm.packed import Weights
from moe_runtime.kernels.grouped_gemm.tile import ProductKind, Tile, choose_tile
from moe_runtime.kernels.quantized import QuantizedStack
from moe_runtime.kernels.triton_support import launch, power_of_2


class TileMap(NamedTuple):
    """Expert (-1: none) and first row of each tile, on the device; the `num_used` tiles with an
    expert come first.
    """

    expert: Tensor
    first_row: Tensor
    num_used: Tensor


@dataclass(slots=True)
class Groups:
    """Sorted rows of the experts of one layer call.

    Attributes:
        offsets_E1: int64: first row of each expert.
        num_rows: R, the most rows there can be.
        slot_of_expert: `[E]` or None; negative if an expert takes no part.
        order_R: Slot of each row, `t * K + k`; None if nothing is gathered or scattered.
        num_choices: K.
        columns: Of experts that differ in width, or None.
        values_E1: int64: where the hidden values of such experts start.
    """

    offsets_E1: Tensor
    num_rows: int
    slot_of_expert: Tensor | None = None
    order_R: Tensor | None = None
    num_choices: int = 1
    columns: ExpertColumns | None = None
    values_E1: Tensor = field(init=False)
    _maps: dict[int, TileMap] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        columns, offsets_E1 = self.columns, self.offsets_E1
        self.values_E1 = offsets_E1 if columns is None else columns.value_offsets(offsets_E1)

    @property
    def num_experts(self) -> int:
        return len(self.offsets_E1) - 1

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments for the rows; absent tensors are replaced by any tensor."""
        order_R, slots_E = self.order_R, self.slot_of_expert
        return {
            "offsets_ptr": self.offsets_E1,
            "order_ptr": self.offsets_E1 if order_R is None else order_R,
            "slots_ptr": self.offsets_E1 if slots_E is None else slots_E,
            "HAS_SLOTS": slots_E is not None,
        }

    def width_arguments(self) -> dict[str, Any]:
        """Kernel arguments for the experts' own widths."""
        columns = self.columns
        return {
            "starts_ptr": self.offsets_E1 if columns is None else columns.starts_E1,
            "values_ptr": self.values_E1,
            "WIDTH_MULTIPLE": 0 if columns is None else columns.multiple,
        }

    def width_of(self, dim: int) -> int:
        """F: of the widest expert if they differ, else `dim`."""
        return dim if self.columns is None else max(self.columns.widths)

    def are_even(self, dim: int, block: int, *, is_width: bool) -> bool:
        """Whether blocks divide a dimension, or every expert's width if it `is_width`."""
        if self.columns is None or not is_width:
            return dim % block == 0
        return all(width % block == 0 for width in self.columns.widths)

    def choose_tile(
        self, kind: ProductKind, x: Tensor, dim_n: int, dim_k: int, weight: Weights | None = None
    ) -> Tile:
        tile = choose_tile(
            kind,
            num_rows=self.num_rows,
            num_experts=self.num_experts,
            dim_n=dim_n,
            dim_k=dim_k,
            dtype=x.dtype,
            device=x.device,
            packed=weight.format if isinstance(weight, QuantizedStack) else None,
        )
        return tile if self.columns is None else tile.for_widths()

    def tiles(self, block_m: int) -> TileMap:
        """The tiles of `block_m` rows, computed once for each size.

        There are as many entries as could be needed: every expert's last tile may be nearly empty.
        """
        if block_m not in self._maps:
            num_experts = self.num_experts
            num_tiles = min(self.num_rows, self.num_rows // block_m + num_experts)
            device = self.offsets_E1.device
            tiles = TileMap(
                torch.empty(num_tiles, dtype=torch.int32, device=device),
                torch.empty(num_tiles, dtype=torch.int64, device=device),
                torch.empty(1, dtype=torch.int32, device=device),
            )
            rows = self.arguments()
            del rows["order_ptr"]
            launch(
                tile_map, (num_experts + 1,),
                **rows,
                tile_expert_ptr=tiles.expert, tile_row_ptr=tiles.first_row,
                num_used_ptr=tiles.num_used, num_experts=num_experts, num_tiles=num_tiles,
                BLOCK_M=block_m, BLOCK_E=power_of_2(num_experts), BLOCK_TILES=64,
            )  # fmt: skip
            self._maps[block_m] = tiles
        return self._maps[block_m]
