"""Packed checkpoints: each expert in one run of whole blocks, in the lossless code if asked."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packing.manifest import CODES, Code, read_manifest
from moe_runtime.checkpoints.packing.staging import read_progress, staging_of
from moe_runtime.checkpoints.packing.writer import (
    PackSummary,
    Progress,
    write_packed,
)
from moe_runtime.errors import CheckpointError
from moe_runtime.files import check_output_folder
from moe_runtime.places import require_replaceable

__all__ = ["CODES", "PackSummary", "pack_checkpoint", "staging_of"]


def pack_checkpoint(
    path_or_id: str | Path,
    folder: str | Path,
    code: Code = "planes",
    *,
    io_threads: int = 4,
    progress: Progress | None = None,
) -> PackSummary:
    """Writes a checkpoint again, each expert in one run of bytes that begins at a whole block.

    Args:
        path_or_id: the folder of a checkpoint, or the name of a repository on the hub.
        folder: of the packed one; replaced once the new one is whole.
        code: `planes` writes bf16 matrices in a code that loses nothing; `none` as they are.
        io_threads: reads in flight at once.
        progress: called with what is being done, the bytes done and the bytes in all.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or incomplete, or the folder cannot be.
        UnsupportedModelError: it has no experts that the code is for, or is packed already.
        CapacityError: the disk has no room.
        ValueError: the code is unknown, or the folder is the checkpoint's own.
        OSError: it cannot be written. What is whole stays in `staging_of(folder)`.
    """
    if code not in CODES:
        raise ValueError(f"code must be {' or '.join(CODES)}, got {code!r}")
    checkpoint = open_checkpoint(path_or_id, "auto")
    checkpoint.require_plain("packing")
    _require_ours(Path(folder), checkpoint.folder)
    check_output_folder(folder, "packed checkpoint")
    require_replaceable(Path(os.path.realpath(folder)))
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    return write_packed(
        checkpoint, experts, Path(folder), code, io_threads=io_threads, progress=progress
    )


def _require_ours(folder: Path, source: Path) -> None:
    """Refuses a folder whose content is none that a packed checkpoint may replace.

    Raises:
        ValueError: it is or holds the checkpoint's own, or holds something else.
    """
    place, staging = Path(os.path.realpath(folder)), staging_of(folder)
    if Path(os.path.realpath(source)).is_relative_to(place):
        raise ValueError(f"{folder} is the checkpoint to be packed, or holds it; name another one")
    if Path(os.path.realpath(source)).is_relative_to(staging):
        raise ValueError(
            f"{folder} grows in {staging}, where the checkpoint lies; name another one"
        )
    read_progress(staging)
    if not place.is_dir() or not any(place.iterdir()):
        return
    other = {path.name for path in place.iterdir()}
    with contextlib.suppress(CheckpointError):
        other -= set(read_manifest(place).files)
    if other:
        raise ValueError(
            f"{folder} holds {min(other)}, which is no part of a packed checkpoint; name another "
            "folder"
        )
