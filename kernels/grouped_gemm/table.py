"""Tiles that were measured on a GPU, in a file that every later run reads.

A table is JSON, one file a GPU model. Nobody has to have one: a product that is in no table gets
the rule's tile. The user's own table, written by `moe-runtime bench kernels --tune`, comes before
one that ships with the package.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast, get_args

import platformdirs
import torch

from moe_runtime.files import make_folders, write_text
from moe_runtime.kernels.grouped_gemm.tile import ProductKind, Tile

FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"


class TileKey(NamedTuple):
    """What a tile was measured for.

    Attributes:
        kind: Which kernel.
        bits: Of an element.
        dim_n: Columns of the product.
        dim_k: The summed dimension; for weight gradients, which sum over rows, their rows.
        rows: Rows an expert has on average, rounded up to a power of two.
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
    """The key of a product; arguments as in `choose_tile`."""
    mean = max(1, -(-num_rows // max(1, num_experts)))
    return TileKey(kind, dtype.itemsize * 8, dim_n, dim_k, 1 << (mean - 1).bit_length())


def cache_folder() -> Path:
    """Where tables of this user lie."""
    return platformdirs.user_cache_path("moe_runtime") / "tiles"


def table_path(gpu: str, folder: Path | None = None) -> Path:
    """The file of a GPU model in a folder; the user's own when omitted."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return (folder or cache_folder()) / f"{name}.json"


@cache
def measured_tiles(gpu: str) -> Mapping[TileKey, Tile]:
    """Every tile measured for a GPU model. Read once in a process.

    A table of the user's that cannot be read is said once and counts as none: no product needs one.
    """
    shipped = read_table(table_path(gpu, SHIPPED))
    try:
        return {**shipped, **read_table(table_path(gpu))}
    except (OSError, ValueError) as error:
        warnings.warn(f"tiles are not those that were measured here: {error}", stacklevel=2)
        return shipped


def read_table(path: Path) -> dict[TileKey, Tile]:
    """The tiles of a file; none where there is no file.

    Raises:
        ValueError: The file is damaged, or of another format.
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
            f"{path} is no table of tiles ({error!r}): delete it, or write it again with "
            "`moe-runtime bench kernels --tune`"
        ) from error


def write_table(path: Path, gpu: str, tiles: Mapping[TileKey, Tile]) -> None:
    """Adds tiles to a file, replacing what it said of the same products, in one step.

    Raises:
        ValueError: There is a file already and it is no table.
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
    # What tables called this kind until November 2026.
    kind = "down_act_backward" if entry["kind"] == "dact" else entry["kind"]
    if kind not in get_args(ProductKind):
        raise ValueError(f"unknown kind {kind!r}")
    numbers = [int(cast(int, entry[name])) for name in TileKey._fields[1:]]
    return TileKey(cast(ProductKind, kind), *numbers)


def _tile(numbers: Sequence[int]) -> Tile:
    sizes = list(map(int, numbers))
    return Tile(*sizes[:6], *map(bool, sizes[6:7]), *sizes[7:])  # type: ignore[arg-type]
