"""Writing a packed checkpoint: expert by expert, whole or not at all, going on after a kill.

The new folder grows as ``NAME.packing`` beside its place, one file of experts after the other. What
is whole in there is listed with its digests; the next run with the same checkpoint and code takes
it as it is, and begins with the file after it. Once all is written, read back and compared, the
folder takes its place in one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.export import INDEX_NAME, copy_tensor, write_at, write_index
from moe_runtime.checkpoints.opening import QUANT_METHOD, Checkpoint
from moe_runtime.checkpoints.packing.encoding import ExpertPacker
from moe_runtime.checkpoints.packing.manifest import (
    MANIFEST_NAME,
    Code,
    Manifest,
    MatrixForm,
    PackedLayer,
    aligned,
    tensor_name,
)
from moe_runtime.checkpoints.packing.staging import (
    PROGRESS_NAME,
    WrittenFile,
    read_progress,
    staging_of,
)
from moe_runtime.checkpoints.safetensors_index import PACKED_INDEX_NAME, TensorEntry
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.files import held, make_folders, sync_folder, write_text
from moe_runtime.folders import replace_folder
from moe_runtime.memory.layout import BLOCK_BYTES
from moe_runtime.memory.slab import aligned_bytes, host_view
from moe_runtime.memory.source import CheckpointFile, ExpertSource, file_version
from moe_runtime.types import ExpertKey

SHARD_BYTES = 2 << 30
"""Bytes of experts, as they were, in a file: what a kill loses at most."""
_DENSE_NAME = "dense.safetensors"
_LEAST_RATIO = {"planes": 0.65, "none": 1.0}
"""No trained weights get smaller than this share of their bytes: the entropy of their code."""
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """What was packed.

    Attributes:
        folder: of the packed checkpoint.
        code: how matrices are written.
        expert_bytes: bytes of all experts as they were.
        packed_bytes: as they are now.
        num_experts: how many there are.
        kept_files: files of experts that an earlier, interrupted run had written.
    """

    folder: Path
    code: Code
    expert_bytes: int
    packed_bytes: int
    num_experts: int
    kept_files: int

    @property
    def ratio(self) -> float:
        """Bytes now to bytes before."""
        return self.packed_bytes / self.expert_bytes


def write_packed(
    checkpoint: Checkpoint,
    experts: ExpertMap,
    folder: Path,
    code: Code,
    *,
    io_threads: int = 4,
    progress: Progress | None = None,
) -> PackSummary:
    """Writes a checkpoint's experts packed, and everything else as it is.

    Args:
        checkpoint: what to pack.
        experts: where its experts lie.
        folder: of the packed checkpoint; replaced once the new one is whole.
        code: `planes` for the lossless code of bf16 matrices; `none` only lays experts out.
        io_threads: reads in flight at once.
        progress: called with what is being done, the bytes done and the bytes in all.

    Raises:
        CapacityError: the disk has no room.
        CheckpointError: an expert cannot be read, or what was written is not what was to be.
        OSError: it cannot be written. What is whole stays for the next run.
    """
    staging = staging_of(folder)
    make_folders(staging.parent)
    read_progress(staging)
    staging.mkdir(exist_ok=True)
    with held(staging, advice=f"remove {staging}"):
        writer = _Writer(checkpoint, experts, staging, code, progress)
        kept = len(writer.done)
        with contextlib.closing(ExpertSource(experts.layouts, io_threads=io_threads)) as source:
            writer.write_experts(source)
        writer.write_rest()
        sizes = sum(sum(shard.sizes) for shard in writer.done)
        with replace_folder(folder) as new:
            for path in sorted(staging.iterdir()):
                if path.name != PROGRESS_NAME:
                    _link_or_move(path, new / path.name)
        shutil.rmtree(staging)
    return PackSummary(
        folder=folder,
        code=code,
        expert_bytes=sum(layout.tensor_bytes for layout in experts.layouts.values()),
        packed_bytes=sizes,
        num_experts=len(experts.layouts),
        kept_files=kept,
    )


class _Writer:
    """The growing folder of one packed checkpoint; held by its caller."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: ExpertMap,
        staging: Path,
        code: Code,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._experts = experts
        self._staging = staging
        self._code: Code = code
        self._progress = progress
        self._forms = [self._forms_of(layer) for layer in range(len(experts.modules))]
        self._plan = [*self._shards()]
        self.done = self._read_done()
        self._write_done()

    def write_experts(self, source: ExpertSource) -> None:
        """Writes the files of experts that are missing, each read back and compared."""
        layouts = self._experts.layouts
        raw = [sum(layouts[key].tensor_bytes for key in keys) for keys in self._plan]
        done, total = sum(raw[: len(self.done)]), sum(raw)
        self._require_room(sum(raw[len(self.done) :]))
        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
            for number in range(len(self.done), len(self._plan)):
                experts = ExpertPacker(self._experts, self._forms, self._code, source, pool)

                def tell(num_bytes: int, before: int = done) -> None:
                    if self._progress is not None:
                        self._progress("packing experts", before + num_bytes, total)

                self.done.append(self._write_shard(number, experts, tell))
                self._write_done()
                done += raw[number]

    def write_rest(self) -> None:
        """Writes what is no expert: dense weights, index, configuration and tokenizer."""
        outside = self._entries_outside()
        path = self._staging / _DENSE_NAME
        offsets, header = _header([(e.name, e.dtype, e.shape, e.num_bytes) for e in outside])
        with _whole_file(path) as descriptor:
            write_at(descriptor, header, 0)
            for entry in outside:
                copy_tensor(entry, descriptor, len(header) + offsets[entry.name])
        file_of = {entry.name: _DENSE_NAME for entry in outside}
        for keys, shard in zip(self._plan, self.done, strict=True):
            file_of |= {tensor_name(key.layer, key.expert): shard.file for key in keys}
        total = sum(entry.num_bytes for entry in outside) + sum(sum(s.sizes) for s in self.done)
        source = self._checkpoint.folder
        for found in sorted(source.iterdir()):
            is_index = found.name == INDEX_NAME
            is_ours = found.name in (PROGRESS_NAME, MANIFEST_NAME)
            if found.is_file() and found.suffix not in _NOT_COPIED and not (is_index or is_ours):
                shutil.copyfile(found, self._staging / found.name)
        write_index(self._staging / PACKED_INDEX_NAME, file_of, {"total_size": total})
        config = parse_object((source / "config.json").read_bytes(), has_infinity=True)
        config["quantization_config"] = {"quant_method": QUANT_METHOD, "code": self._code}
        write_text(self._staging / "config.json", json.dumps(config, indent=2) + "\n")
        files = {path.name for path in self._staging.iterdir()} - {PROGRESS_NAME}
        manifest = self._manifest(sorted(files | {MANIFEST_NAME}))
        write_text(self._staging / MANIFEST_NAME, manifest.to_json())

    def _write_shard(
        self, number: int, experts: ExpertPacker, tell: Callable[[int], None]
    ) -> WrittenFile:
        keys = self._plan[number]
        name = f"experts-{number + 1:05}-of-{len(self._plan):05}.safetensors"
        shard = WrittenFile(name, [], [], [])
        layouts = self._experts.layouts
        most = sum(2 * layouts[key].slot_bytes + BLOCK_BYTES for key in keys)
        names = [tensor_name(key.layer, key.expert) for key in keys]
        lead = len(_header([(name, "U8", (most,), most) for name in names], BLOCK_BYTES)[1])
        with _whole_file(self._staging / name) as descriptor:
            end = raw = 0
            for key, (content, rooms) in zip(keys, experts.of(keys), strict=True):
                view = host_view(content)
                write_at(descriptor, view, lead + end)
                shard.rooms.append(rooms)
                shard.digests.append(zlib.crc32(view))
                shard.sizes.append(len(view))
                end, raw = end + len(view), raw + layouts[key].tensor_bytes
                tell(raw)
            sizes = zip(names, shard.sizes, strict=True)
            # its numbers are no longer than those that room was left for
            _, header = _header([(name, "U8", (size,), size) for name, size in sizes], lead)
            write_at(descriptor, header, 0)
            os.fsync(descriptor)
            self._compare(Path(f"/proc/self/fd/{descriptor}"), shard, lead)
        return shard

    def _compare(self, path: Path, shard: WrittenFile, lead: int) -> None:
        """Reads a file back, past the page cache where that can be."""
        file = CheckpointFile(path)
        try:
            view = host_view(aligned_bytes(aligned(max(shard.sizes), BLOCK_BYTES) + BLOCK_BYTES))
            for size, digest in zip(shard.sizes, shard.digests, strict=True):
                begin = lead // BLOCK_BYTES * BLOCK_BYTES
                lead += size
                file.read(begin, view[: aligned(lead - begin, BLOCK_BYTES)], lead - begin)
                if zlib.crc32(view[lead - size - begin : lead - begin]) != digest:
                    raise CheckpointError(
                        f"{self._staging / shard.file}: what was read back is not what was "
                        "written; the disk is faulty, or somebody else writes to it"
                    )
        finally:
            file.close()

    def _forms_of(self, layer: int) -> tuple[MatrixForm, ...]:
        layout = self._experts.layouts[ExpertKey(layer, 0)]
        pairs = zip(self._experts.matrices[layer], layout.tensors, strict=True)
        return tuple(MatrixForm(name, found.dtype, tuple(found.shape)) for name, found in pairs)

    def _shards(self) -> Iterator[list[ExpertKey]]:
        keys: list[ExpertKey] = []
        size = 0
        for key in sorted(self._experts.layouts):
            size += self._experts.layouts[key].tensor_bytes
            if keys and size > SHARD_BYTES:
                yield keys
                keys, size = [], self._experts.layouts[key].tensor_bytes
            keys.append(key)
        yield keys

    def _manifest(self, files: list[str]) -> Manifest:
        rooms: dict[ExpertKey, tuple[int, ...]] = {}
        for keys, shard in zip(self._plan, self.done, strict=True):
            rooms |= dict(zip(keys, map(tuple, shard.rooms), strict=True))
        layers = []
        for layer, module in enumerate(self._experts.modules):
            keys = [ExpertKey(layer, expert) for expert in range(module.num_experts)]
            layers.append(
                PackedLayer(
                    module.name,
                    self._forms[layer],
                    [rooms[key] for key in keys],
                )
            )
        return Manifest(self._code, tuple(layers), files)

    def _entries_outside(self) -> list[TensorEntry]:
        """The tensors that hold no expert, widest elements first, so that all are aligned."""
        entries = self._checkpoint.entries.values()
        within = TensorFinder(entries).of_experts(self._experts)
        outside = [entry for entry in entries if entry.name not in within]
        return sorted(
            outside, key=lambda entry: -(entry.num_bytes // max(1, math.prod(entry.shape)))
        )

    def _require_room(self, expert_bytes: int) -> None:
        dense = sum(entry.num_bytes for entry in self._entries_outside())
        needed = int(expert_bytes * _LEAST_RATIO[self._code]) + dense
        free = shutil.disk_usage(self._staging).free
        if free < needed:
            raise CapacityError(
                f"{self._staging.parent} has {format_bytes(free)} free, and the packed checkpoint "
                f"takes at least {format_bytes(needed)} more; free some, or name another folder"
            )

    def _origin(self) -> dict[str, Any]:
        """What the whole files of an earlier run must have been made of."""
        files = sorted({entry.file for entry in self._checkpoint.entries.values()})
        versions = [[file.name, *file_version(file)] for file in files]
        return {"code": self._code, "shard_bytes": SHARD_BYTES, "files": versions}

    def _read_done(self) -> list[WrittenFile]:
        """The files that an earlier run has written, and that are still what it wrote.

        What else it left is removed.
        """
        found: list[WrittenFile] = []
        progress = read_progress(self._staging)
        if progress is not None and progress["origin"] == json.loads(json.dumps(self._origin())):
            for values in progress["shards"]:
                shard = WrittenFile(**values)
                if not self._is_whole(shard):
                    break
                found.append(shard)
        whole = {shard.file for shard in found}
        for left in self._staging.iterdir():
            if left.name not in whole:
                left.unlink()
        return found

    def _is_whole(self, shard: WrittenFile) -> bool:
        path = self._staging / shard.file
        try:
            lead = path.stat().st_size - sum(shard.sizes)
            self._compare(path, shard, lead)
        except (OSError, EOFError, CheckpointError):
            return False
        return lead > 0

    def _write_done(self) -> None:
        shards = [dataclasses.asdict(shard) for shard in self.done]
        text = json.dumps({"origin": self._origin(), "shards": shards})
        write_text(self._staging / PROGRESS_NAME, text)


def _header(
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


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[int]:
    """A file that has its name once it is on the disk; removed where the block fails."""
    part = path.with_name(path.name + ".part")
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    is_whole = False
    try:
        yield descriptor
        os.fsync(descriptor)
        is_whole = True
    finally:
        os.close(descriptor)
        if is_whole:
            os.rename(part, path)
            sync_folder(path.parent)
        else:
            part.unlink(missing_ok=True)


def _link_or_move(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        os.rename(path, target)
