"""The folder in which a new checkpoint grows, and what an interrupted run left in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.strict_json import parse_object

STAGING_SUFFIX = ".packing"
PROGRESS_NAME = "packing_progress.json"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of experts that is whole.

    Attributes:
        file: its name.
        pieces: begin, bytes and digest of what it holds, the header too.
        notes: for each expert what its writer wants to know again: the rooms of its escapes, or the
            squares of its errors.
    """

    file: str
    pieces: list[list[int]]
    notes: list[list[Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, which lie behind the header."""
        return sum(size for begin, size, _ in self.pieces if begin)


def staging_of(folder: Path) -> Path:
    """Where a new checkpoint grows until it takes its place."""
    place = Path(os.path.realpath(folder))
    return place.with_name(place.name + STAGING_SUFFIX)


def read_progress(staging: Path) -> dict[str, Any] | None:
    """What an interrupted run says that it has written; None where it wrote nothing.

    Raises:
        ValueError: the folder is none that a run left, or what it says is damaged.
    """
    if not os.path.lexists(staging):
        return None
    advice = "is in the way of what is packed; move or remove it"
    if staging.is_symlink() or not staging.is_dir():
        raise ValueError(f"{staging} {advice}")
    path = staging / PROGRESS_NAME
    if not path.exists():
        if all(left.name.startswith(PROGRESS_NAME) for left in staging.iterdir()):
            return None
        raise ValueError(f"{staging} {advice}: it holds something else")
    try:
        values = parse_object(path.read_bytes())
        origin, shards = values["origin"], [_values_of(shard) for shard in values["shards"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} cannot be read; {staging} {advice}") from None
    if any(left.is_dir() for left in staging.iterdir()):
        raise ValueError(f"{staging} {advice}: it holds folders, which no run makes")
    return {"origin": origin, "shards": shards}


def _values_of(shard: Any) -> dict[str, Any]:
    """The values of a `WrittenFile` as JSON has them.

    Raises:
        KeyError, TypeError, ValueError: they are none.
    """
    kinds = {"file": str, "pieces": list, "notes": list}
    values = {name: shard[name] for name in kinds}
    if any(type(values[name]) is not kind for name, kind in kinds.items()):
        raise ValueError(f"expected a file and its experts, found {shard}")
    for piece in values["pieces"]:
        if len(piece) != 3 or any(type(part) is not int for part in piece):
            raise ValueError(f"expected begin, bytes and digest of a piece, found {piece}")
    if any(begin < 0 or size < 1 for begin, size, _ in values["pieces"] or [(0, 0, 0)]):
        raise ValueError(f"expected pieces of {shard['file']}, found {values['pieces']}")
    return values


def header_of(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], multiple_of: int = 8
) -> tuple[dict[str, int], bytes]:
    """Where tensors of some bytes lie behind a header of safetensors, and the header."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, dtype, shape, size in tensors:
        offsets[name] = end
        fields[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple_of)
    return offsets, len(text).to_bytes(8, "little") + text


def link_or_move(path: Path, target: Path) -> None:
    """Gives a file a second name, or, where the filesystem has none, another one."""
    try:
        os.link(path, target)
    except OSError:
        os.rename(path, target)
