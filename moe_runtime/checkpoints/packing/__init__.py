"""A checkpoint written again with its experts packed, in the lossless code, or quantised."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packing.manifest import CODES, Code, read_manifest
from moe_runtime.checkpoints.packing.packed_writer import PackedWriter
from moe_runtime.checkpoints.packing.quantized_writer import (
    MatrixError,
    QuantizedWriter,
    read_report,
)
from moe_runtime.checkpoints.packing.schemes import SCHEMES, Scheme
from moe_runtime.checkpoints.packing.staging import read_progress, staging_of
from moe_runtime.checkpoints.packing.writer import Progress, write_checkpoint
from moe_runtime.checkpoints.plain import require_plain
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.errors import CheckpointError
from moe_runtime.files import check_output_folder, require_replaceable


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """What was written.

    Attributes:
        folder: of the new checkpoint.
        code: how matrices are written that lost nothing; None where they are quantised.
        quantize: how they are quantised; None where they are not.
        expert_bytes: bytes of all experts as they were.
        packed_bytes: as they are now.
        num_experts: how many there are.
        kept_files: files of experts that an earlier, interrupted run had written.
        errors: of quantised matrices, for each layer and each of its matrices.
    """

    folder: Path
    code: Code | None
    quantize: Scheme | None
    expert_bytes: int
    packed_bytes: int
    num_experts: int
    kept_files: int
    errors: tuple[MatrixError, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes now to bytes before."""
        return self.packed_bytes / self.expert_bytes


def pack_checkpoint(
    path_or_id: str | Path,
    folder: str | Path,
    code: Code | None = None,
    quantize: Scheme | None = None,
    *,
    io_threads: int = 4,
    progress: Progress | None = None,
) -> PackSummary:
    """Writes a checkpoint again, its experts in fewer bytes.

    Args:
        path_or_id: the folder of a checkpoint, or the name of a repository on the hub.
        folder: of the new one; replaced once the new one is whole.
        code: for experts that lose nothing, each in one run of bytes that begins at a whole block:
            `planes`, the default, writes bf16 matrices in a lossless code; `none` as they are.
        quantize: for experts that do lose, written as compressed-tensors or gpt-oss has them:
            `mxfp4`, `int4` or `int8` in groups, `fp8` with a scale for each row.
        io_threads: reads in flight at once.
        progress: called with what is being done, the bytes done and the bytes in all.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or incomplete, or the folder cannot be.
        UnsupportedModelError: it has no experts that the form is for, or they have one already.
        CapacityError: the disk has no room.
        ValueError: a name is unknown, both are given, or the folder is the checkpoint's own.
        OSError: it cannot be written. What is whole stays in `staging_of(folder)`.
    """
    if code is not None and quantize is not None:
        raise ValueError(
            f"code {code} loses nothing and quantize {quantize} does; name only one of them"
        )
    if code not in (None, *CODES):
        raise ValueError(f"code must be {' or '.join(CODES)}, got {code!r}")
    if quantize not in (None, *SCHEMES):
        raise ValueError(f"quantize must be {' or '.join(SCHEMES)}, got {quantize!r}")
    checkpoint = open_checkpoint(path_or_id, "auto", progress=progress)
    require_plain(checkpoint, "packing" if quantize is None else "quantising")
    way = f"--code {code or 'planes'}" if quantize is None else f"--quantize {quantize}"
    _require_ours(Path(folder), checkpoint.folder, way)
    check_output_folder(folder, "packed checkpoint")
    require_replaceable(Path(os.path.realpath(folder)))
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    if quantize is None:
        code = code or "planes"
        writer = PackedWriter(checkpoint, experts, code)
    else:
        writer = QuantizedWriter(checkpoint, experts, quantize)
    written, kept = write_checkpoint(writer, Path(folder), io_threads=io_threads, progress=progress)
    return PackSummary(
        folder=Path(folder),
        code=code,
        quantize=quantize,
        expert_bytes=writer.expert_bytes,
        packed_bytes=sum(file.num_bytes for file in written),
        num_experts=len(experts.layouts),
        kept_files=kept,
        errors=tuple(writer.errors) if isinstance(writer, QuantizedWriter) else (),
    )


def _require_ours(folder: Path, source: Path, way: str) -> None:
    """Refuses a folder whose content is none that a packed checkpoint may replace.

    Args:
        folder: of the new checkpoint.
        source: of the one that is packed.
        way: the option that says how it is written.

    Raises:
        ValueError: it is or holds the checkpoint's own, or holds something else, such as another
            model, or this one written in another way.
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
    was, files = _written_earlier(place)
    other = {path.name for path in place.iterdir()} - files
    if other:
        raise ValueError(
            f"{folder} holds {min(other)}, which is no part of a packed checkpoint; name another "
            "folder"
        )
    if was != way:
        raise ValueError(
            f"{folder} was written with {was}, and would be replaced by one with {way}; name "
            "another folder, or remove this one"
        )
    if _model_of(place) != _model_of(source):
        raise ValueError(
            f"{folder} holds a packed checkpoint of another model, as its config.json says; name "
            "another folder, or remove this one"
        )


def _written_earlier(folder: Path) -> tuple[str | None, set[str]]:
    """How a folder was packed, as the option says it, and its files; None where it was not."""
    if report := read_report(folder):
        return f"--quantize {report.scheme}", set(report.files)
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(folder)
        return f"--code {manifest.code}", set(manifest.files)
    return None, set()


def _model_of(folder: Path) -> dict[str, Any]:
    """What `config.json` says of a model, but for how its weights are written."""
    try:
        config = parse_object((folder / "config.json").read_bytes(), has_infinity=True)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if key != "quantization_config"}


__all__ = [
    "CODES",
    "SCHEMES",
    "MatrixError",
    "PackSummary",
    "pack_checkpoint",
    "staging_of",
]
