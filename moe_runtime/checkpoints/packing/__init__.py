"""Writes a checkpoint with its experts packed, losslessly coded, or quantised."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import QUANT_METHOD, Checkpoint, Progress, require_plain
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packed_experts import (
    CODES,
    MANIFEST_NAME,
    PART_ALIGNMENT,
    Code,
    Manifest,
    PackedLayer,
    Part,
    aligned,
    lay_out_parts,
    read_manifest,
    tensor_name,
)
from moe_runtime.checkpoints.packing.quantized_writer import (
    SCHEMES,
    MatrixError,
    QuantizedWriter,
    Scheme,
    read_report,
)
from moe_runtime.checkpoints.packing.writer import (
    CheckpointWriter,
    Experts,
    GrowingFile,
    read_progress,
    staging_of,
)
from moe_runtime.checkpoints.safetensors_index import PACKED_INDEX_NAME, header_of
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.errors import CheckpointError
from moe_runtime.files import check_output_folder, require_replaceable
from moe_runtime.kernels.lossless import PlanesMatrix, decode_planes, encode_planes
from moe_runtime.memory.source import BLOCK_BYTES, aligned_bytes, host_view
from moe_runtime.types import ExpertKey

_ROOM_SHARE = 1024
"""Escape room grows in steps of this share of a matrix, so that few sizes occur."""
_LEAST_RATIO = {"planes": 0.65, "none": 1.0}
"""Trained weights never get smaller than this share, by the entropy of their code."""


class PackedWriter(CheckpointWriter):
    stage = "packing experts"
    index_name = PACKED_INDEX_NAME
    report_name = MANIFEST_NAME

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap, code: Code) -> None:
        super().__init__(checkpoint, experts)
        self._code: Code = code
        self._forms = [self._forms_of(layer) for layer in range(len(experts.modules))]
        self.settings = {"code": code}
        self.replaced = TensorFinder(checkpoint.entries.values()).of_experts(experts)
        self.expert_bytes = sum(layout.tensor_bytes for layout in experts.layouts.values())

    def units(self) -> Iterable[list[ExpertKey]]:
        return ([key] for key in sorted(self.experts.layouts))

    def file_name(self, number: int, num_files: int) -> str:
        if number == num_files:
            return "dense.safetensors"
        return f"experts-{number + 1:05}-of-{num_files:05}.safetensors"

    def tensors_of(self, keys: Sequence[ExpertKey]) -> Iterable[str]:
        return [tensor_name(key.layer, key.expert) for key in keys]

    def least_bytes(self, keys: Sequence[ExpertKey]) -> int:
        size = sum(self.experts.layouts[key].tensor_bytes for key in keys)
        return int(size * _LEAST_RATIO[self._code])

    def write_file(self, file: GrowingFile, keys: Sequence[ExpertKey], experts: Experts) -> None:
        """Writes the experts, and then the header into the space before them."""
        layouts, names = self.experts.layouts, [*self.tensors_of(keys)]
        most = sum(2 * layouts[key].slot_bytes + BLOCK_BYTES for key in keys)
        _, header = header_of([(name, "U8", (most,), most) for name in names], BLOCK_BYTES)
        lead = end = len(header)
        for key, views in experts:
            content, rooms = _packed(self._forms[key.layer], views, self._code, file.pool)
            file.put(host_view(content), end)
            file.notes.append(rooms)
            end += len(content)
        sizes = [size for _, size, _ in file.pieces]
        tensors = zip(names, sizes, strict=True)
        # its numbers are at most as long as those that the space was computed for
        _, header = header_of([(name, "U8", (size,), size) for name, size in tensors], lead)
        file.put(header, 0)

    def quantization(self) -> Mapping[str, Any]:
        return {"quant_method": QUANT_METHOD, "code": self._code}

    def report(self, notes: Mapping[ExpertKey, list[Any]], files: list[str]) -> str:
        layers = []
        for layer, module in enumerate(self.experts.modules):
            keys = [ExpertKey(layer, expert) for expert in range(module.num_experts)]
            rooms = [tuple(notes[key]) for key in keys]
            layers.append(PackedLayer(module.name, self._forms[layer], rooms))
        return Manifest(self._code, tuple(layers), files).to_json()

    def _forms_of(self, layer: int) -> tuple[Part, ...]:
        layout = self.experts.layouts[ExpertKey(layer, 0)]
        pairs = zip(self.experts.matrices[layer], layout.tensors, strict=True)
        return tuple(Part(name, found.dtype, tuple(found.shape)) for name, found in pairs)


def _packed(
    forms: Sequence[Part], views: Mapping[str, Tensor], code: Code, pool: ThreadPoolExecutor
) -> tuple[Tensor, list[int]]:
    """The bytes of an expert, and the rooms for its escapes."""
    coded = [form for form in forms if form.is_coded(code)]
    matrices = [*pool.map(_coded, coded, (views[form.name] for form in coded))]
    found = {form.name: matrix for form, matrix in zip(coded, matrices, strict=True)}
    rooms = []
    for matrix in matrices:
        step = aligned(max(1, math.prod(matrix.shape) // _ROOM_SHARE), PART_ALIGNMENT)
        rooms.append(aligned(len(matrix.escapes), step))
    parts, num_bytes = lay_out_parts(forms, rooms, code)
    content = aligned_bytes(num_bytes)
    for part in parts:
        into = content[part.offset : part.offset + part.num_bytes].view(part.dtype)
        matrix, _, kind = part.name.partition(".")
        if not kind:
            into.view(part.shape).copy_(views[matrix])
            continue
        values = getattr(found[matrix], kind).flatten()
        into[: len(values)].copy_(values)
    return content, rooms


def _coded(form: Part, view: Tensor) -> PlanesMatrix:
    matrix = encode_planes(view if view.stride(-1) == 1 else view.contiguous())
    if not torch.equal(decode_planes(matrix).view(torch.int16), view.view(torch.int16)):
        raise CheckpointError(f"{form.name} does not come back from the lossless code")
    return matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """The result of packing."""

    folder: Path
    code: Code | None  # the lossless code; None if quantised
    quantize: Scheme | None  # the scheme; None if not quantised
    expert_bytes: int  # bytes of all experts before
    packed_bytes: int
    num_experts: int
    kept_files: int  # expert files from an earlier, interrupted run
    errors: tuple[MatrixError, ...] = ()  # errors of quantised matrices by layer

    @property
    def ratio(self) -> float:
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
        OSError: it cannot be written. Complete files stay in `staging_of(folder)`.
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
    _require_own_content(Path(folder), checkpoint.folder, way)
    check_output_folder(folder, "packed checkpoint")
    require_replaceable(Path(os.path.realpath(folder)))
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    if quantize is None:
        code = code or "planes"
        writer = PackedWriter(checkpoint, experts, code)
    else:
        writer = QuantizedWriter(checkpoint, experts, quantize)
    writer.write(Path(folder), io_threads=io_threads, progress=progress)
    return PackSummary(
        folder=Path(folder),
        code=code,
        quantize=quantize,
        expert_bytes=writer.expert_bytes,
        packed_bytes=sum(file.num_bytes for file in writer.done),
        num_experts=len(experts.layouts),
        kept_files=writer.num_kept,
        errors=tuple(writer.errors) if isinstance(writer, QuantizedWriter) else (),
    )


def _require_own_content(folder: Path, source: Path, way: str) -> None:
    """Refuses a folder with content that a packed checkpoint must not replace."""
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
    was, files = _earlier_packing(place)
    other = {path.name for path in place.iterdir()} - files
    if other:
        raise ValueError(
            f"{folder} holds {min(other)}, which is not part of a packed checkpoint; name another "
            "folder"
        )
    if was != way:
        raise ValueError(
            f"{folder} was written with {was}, and would be replaced by one with {way}; name "
            "another folder, or remove this one"
        )
    if _model_settings(place) != _model_settings(source):
        raise ValueError(
            f"{folder} holds a packed checkpoint of another model, as its config.json says; name "
            "another folder, or remove this one"
        )


def _earlier_packing(folder: Path) -> tuple[str | None, set[str]]:
    """The option that a folder was packed with, and its files; None if it was not packed."""
    if report := read_report(folder):
        return f"--quantize {report.scheme}", set(report.files)
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(folder)
        return f"--code {manifest.code}", set(manifest.files)
    return None, set()


def _model_settings(folder: Path) -> dict[str, Any]:
    try:
        config = parse_object((folder / "config.json").read_bytes(), has_infinity=True)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if key != "quantization_config"}


__all__ = ["CODES", "SCHEMES", "MatrixError", "PackSummary", "pack_checkpoint", "staging_of"]
