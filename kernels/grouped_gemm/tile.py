"""The tile of each product: a measured one if there is a table, else a rule.

The rule is data: for each kind of product, tiles by the mean number of rows per expert. The tests
compile every tile for every architecture. A table is a JSON file per GPU model; the user's own,
written by `moe-runtime bench kernels --tune`, takes precedence over the shipped one.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import platformdirs
import torch

from moe_runtime.files import make_folders, write_text
from moe_runtime.kernels.grouped_gemm.packed import scales_tile
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.triton_support import dependent_launch

ProductKind = Literal["plain", "gated", "down_act_backward", "dw"]
_RESERVED_BYTES = 2 * 1024  # of shared memory, for other uses than operands


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The limits of a GPU that tiles must respect; defaults are Hopper's.

    Attributes:
        shared_bytes: Shared memory per program.
        has_wide_accumulators: Whether 128 x 256 sums fit and tensor descriptors exist: matrix units
            of Hopper and server Blackwell read operands from shared memory, others through
            registers.
        num_multiprocessors: Programs that run at once, at one each.
        chains_launches: Whether a kernel may start while the one before it ends
            (`dependent_launch`).
        converts_fp8: Whether there are instructions for it, as from sm_89 on.
    """

    shared_bytes: int = 227 * 1024
    has_wide_accumulators: bool = True
    num_multiprocessors: int = 132
    chains_launches: bool = True
    converts_fp8: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work.

    Attributes:
        block_m: Rows.
        block_n: Columns.
        block_k: Summed elements per step.
        num_stages: Steps in flight.
        group_m: Row tiles that share a cached column tile.
        is_persistent: Whether programs process tile after tile and load by TMA, where possible.
        max_registers: Per thread, so that programs share a multiprocessor; 0: no limit.
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
        """The compiler's options; `num_stages` overrides the tile's."""
        options = {"num_warps": self.num_warps, "num_stages": num_stages or self.num_stages}
        return {**options, "maxnreg": self.max_registers} if self.max_registers else options

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the operands in flight."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages * element_bytes

    def for_widths(self) -> Tile:
        """The tile for experts that differ in width, whose addresses need registers."""
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
            # operands go through registers, and four warps have none left next to the sums
            tile = replace(tile, num_warps=max(8, tile.num_warps))
        limit = device.shared_bytes - _RESERVED_BYTES
        while tile.shared_bytes(element_bytes) > limit and tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        while tile.shared_bytes(element_bytes) > limit and tile.block_k > 16:
            tile = replace(tile, block_k=tile.block_k // 2)
        return tile


FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"


class TileKey(NamedTuple):
    """The product that a tile was measured for.

    Attributes:
        bits: Of an element.
        dim_n: Columns of the product.
        dim_k: The summed dimension; for weight gradients, which sum over rows, their rows.
        rows: Mean rows per expert, rounded up to a power of two.
    """

    kind: ProductKind
    bits: int
    dim_n: int
    dim_k: int
    rows: int


def tile_key(
    kind: ProductKind,
    *,
    num_rows: int,
    num_experts: int,
    dim_n: int,
    dim_k: int,
    dtype: torch.dtype,
) -> TileKey:
    mean = max(1, -(-num_rows // max(1, num_experts)))
    return TileKey(kind, dtype.itemsize * 8, dim_n, dim_k, 1 << (mean - 1).bit_length())


def cache_folder() -> Path:
    """The folder of this user's tables."""
    return platformdirs.user_cache_path("moe_runtime") / "tiles"


def table_path(gpu: str, folder: Path | None = None) -> Path:
    """The file of a GPU model in a folder (default: the user's)."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return (folder or cache_folder()) / f"{name}.json"


@cache
def measured_tiles(gpu: str) -> Mapping[TileKey, Tile]:
    """Every tile measured for a GPU model, read once per process.

    A damaged table of the user causes one warning and counts as empty.
    """
    shipped = read_table(table_path(gpu, SHIPPED))
    try:
        return {**shipped, **read_table(table_path(gpu))}
    except (OSError, ValueError) as error:
        warnings.warn(f"tiles are not those that were measured here: {error}", stacklevel=2)
        return shipped


def read_table(path: Path) -> dict[TileKey, Tile]:
    """The tiles of a file; empty if it does not exist.

    Raises:
        ValueError: The file is damaged, or has another format.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']}, expected {FORMAT}")
        return {_key(entry): _tile(entry["tile"]) for entry in table["tiles"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of tiles ({error!r}): delete it, or write it again with "
            "`moe-runtime bench kernels --tune`"
        ) from error


def write_table(path: Path, gpu: str, tiles: Mapping[TileKey, Tile]) -> None:
    """Adds tiles to a file atomically, replacing those of the same products.

    Raises:
        ValueError: The file exists and is not a table.
    """
    merged = {**read_table(path), **tiles}
    entries = [
        {**key._asdict(), "tile": list(map(int, astuple(merged[key])))} for key in sorted(merged)
    ]
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    text = f'{{\n "format": {FORMAT},\n "gpu": {json.dumps(gpu)},\n "tiles": [\n{lines}\n ]\n}}\n'
    make_folders(path.parent)
    write_text(path, text)
    measured_tiles.cache_clear()


def _key(entry: Mapping[str, object]) -> TileKey:
    # the name of this kind in tables until November 2026
    kind = "down_act_backward" if entry["kind"] == "dact" else entry["kind"]
    if kind not in get_args(ProductKind):
        raise ValueError(f"unknown kind {kind!r}")
    numbers = [int(cast(int, entry[name])) for name in TileKey._fields[1:]]
    return TileKey(cast(ProductKind, kind), *numbers)


def _tile(numbers: Sequence[int]) -> Tile:
    sizes = list(map(int, numbers))
    return Tile(*sizes[:6], *map(bool, sizes[6:7]), *sizes[7:])  # type: ignore[arg-type]


# The mean rows per expert up to which a tile is used. With few rows the weights are read once and
# nothing is reused: narrow tiles keep many loads in flight. From 64 rows on a warp group's matrix
# instruction is filled; at 128 x 256 the loads of a tile stay below its arithmetic.
_UNBOUNDED = 1 << 62
TileRule = tuple[tuple[int, Tile], ...]
_FORWARD_16_BIT: TileRule = (
    (24, Tile(16, 64, 128, 4, 4)),
    (48, Tile(32, 64, 128, 4, 4)),
    (192, Tile(64, 128, 64, 4, 4)),
    (_UNBOUNDED, Tile(128, 256, 64, 8, 4, is_persistent=True)),
)
TILES_16_BIT: dict[ProductKind, TileRule] = {
    "plain": _FORWARD_16_BIT,
    "gated": _FORWARD_16_BIT,
    "down_act_backward": (
        (24, Tile(16, 64, 128, 4, 4)),
        (192, Tile(64, 64, 64, 4, 4)),
        (_UNBOUNDED, Tile(128, 128, 64, 8, 4)),
    ),
    "dw": (
        (64, Tile(128, 128, 32, 8, 4)),
        # two programs share a multiprocessor: sums over an expert's rows are short
        (_UNBOUNDED, Tile(128, 128, 64, 4, 3, group_m=1)),
    ),
}
_ROWS_32_BIT: TileRule = ((24, Tile(16, 64, 32, 4, 3)), (_UNBOUNDED, Tile(64, 64, 32, 4, 3)))
TILES_32_BIT: dict[ProductKind, TileRule] = {
    **dict.fromkeys(("plain", "gated", "down_act_backward"), _ROWS_32_BIT),
    "dw": _ROWS_32_BIT[1:],
}
# Decoded codes take registers, and so do a group's sums if scales multiply them; then a step is no
# deeper than a group.
TILES_PACKED: dict[str, TileRule] = {
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
    """The tile of a product, from numbers that the host knows without asking the device.

    `dim_n` counts gate and up separately; `dim_k` is the summed dimension, rows for weight
    gradients; `packed` is the format of codes.
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
    """The rule's tile, whatever the device can hold."""
    tables = TILES_32_BIT if dtype == torch.float32 else TILES_16_BIT
    return _first_fit(tables[kind], num_rows / max(1, num_experts), dim_n)


def packed_table(kind: WeightFormat, dtype: torch.dtype) -> str:
    """The name of the table in `TILES_PACKED`."""
    if dtype == torch.float32:
        return "32-bit rows"
    if kind.block_codes:
        return "blocks"
    return "scaled codes" if scales_tile(kind, dtype) else "scaled sums"


def _first_fit(table: TileRule, rows_per_expert: float, dim_n: int) -> Tile:
    tile = next(tile for limit, tile in table if rows_per_expert <= limit)
    while tile.block_n > 64 and tile.block_n >= 2 * dim_n:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def describe_device(device: torch.device) -> GpuLimits:
    """The limits of a device; Hopper's if it is not a GPU."""
    if device.type != "cuda":
        return GpuLimits()
    found = torch.cuda.get_device_properties(device)
    # not sm_120: Blackwell's desktop cards multiply from registers, like Ampere
    is_wide = torch.version.hip is None and found.major in (9, 10, 11)
    chains = dependent_launch(device)["IS_CHAINED"]
    shared, count = found.shared_memory_per_block_optin, found.multi_processor_count
    converts = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return GpuLimits(shared, is_wide, count, chains, converts)


def casts_codes(kind: WeightFormat, device: GpuLimits) -> bool:
    """Whether the kernels of one row use the GPU's own fp8 conversion."""
    return kind.codes == "e4m3" and device.converts_fp8
