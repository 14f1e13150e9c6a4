"""The folder in which a packed checkpoint grows, and what an interrupted run left in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.strict_json import parse_object

STAGING_SUFFIX = ".packing"
PROGRESS_NAME = "packing_progress.json"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of experts that is whole: its name, and rooms, digests and bytes of each expert."""

    file: str
    rooms: list[list[int]]
    digests: list[int]
    sizes: list[int]


def staging_of(folder: Path) -> Path:
    """Where a packed checkpoint grows until it takes its place."""
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
    kinds = {"file": str, "rooms": list, "digests": list, "sizes": list}
    values = {name: shard[name] for name in kinds}
    sizes = [len(values[name]) for name in ("rooms", "digests", "sizes")]
    if any(type(values[name]) is not kind for name, kind in kinds.items()) or len(set(sizes)) > 1:
        raise ValueError(f"expected a file and its experts, found {shard}")
    if any(type(size) is not int or size < 1 for size in values["sizes"]):
        raise ValueError(f"expected bytes of experts, found {values['sizes']}")
    return values
