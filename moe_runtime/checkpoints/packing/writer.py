"""Rewrites a checkpoint's experts file by file, and continues after a kill.

The new folder grows as ``NAME.packing``. Its complete files are listed with their digests, and the
next run with the same checkpoint and settings continues after them. When all files are written,
read back and compared, the folder replaces the old one in one step.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packed_experts import aligned
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    copy_tensor,
    widest_first,
    write_at,
    write_index,
)
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.files import held, make_folders, replace_folder, write_atomically, write_text
from moe_runtime.memory.source import (
    BLOCK_BYTES,
    CheckpointFile,
    ExpertSource,
    aligned_bytes,
    file_version,
    host_view,
)
from moe_runtime.types import ExpertKey

SHARD_BYTES = 2 << 30  # source bytes of experts in a file: the most work that a kill loses
PROGRESS_NAME = "packing_progress.json"
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")

Experts = Iterator[tuple[ExpertKey, Mapping[str, Tensor]]]
"""Experts in reading order, with their tensors by the names in `ExpertMap.matrices`."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete file of experts."""

    file: str
    pieces: list[list[int]]  # begin, bytes and digest of its content, the header included
    notes: list[list[Any]]  # of each expert: rooms of escapes, or squares of errors

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, without the header."""
        return sum(size for begin, size, _ in self.pieces if begin)


def staging_of(folder: Path) -> Path:
    """The folder of an unfinished checkpoint."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f"{place.name}.packing")


def read_progress(staging: Path) -> dict[str, Any] | None:
    """The progress of an interrupted run; None if there is none."""
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
        origin, shards = values["origin"], [WrittenFile(**shard) for shard in values["shards"]]
        if not all(map(_is_sound, shards)):
            raise ValueError("a file of experts without sound pieces")
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} cannot be read; {staging} {advice}") from None
    if any(left.is_dir() for left in staging.iterdir()):
        raise ValueError(f"{staging} {advice}: it holds folders, which no run makes")
    return {"origin": origin, "shards": shards}


def _is_sound(shard: WrittenFile) -> bool:
    return (
        type(shard.file) is str
        and type(shard.notes) is list
        and bool(shard.pieces)
        and all(
            {type(begin), type(size), type(crc)} == {int} and begin >= 0 and size > 0
            for begin, size, crc in shard.pieces
        )
    )


class GrowingFile:
    """A file of experts being written; ``pieces`` have begin, bytes and digest."""

    def __init__(self, descriptor: int, pool: ThreadPoolExecutor) -> None:
        self._descriptor = descriptor
        self.pieces: list[list[int]] = []
        self.notes: list[list[Any]] = []
        self.pool = pool

    def put(self, content: bytes | memoryview, begin: int) -> None:
        write_at(self._descriptor, content, begin)
        self.pieces.append([begin, len(content), zlib.crc32(content)])


class CheckpointWriter(abc.ABC):
    """Writes a checkpoint's experts in another form; everything else is copied.

    Files of an earlier run must have the same ``settings``. ``replaced`` are the tensors that get
    another form, and ``expert_bytes`` their bytes before. ``done`` are the files of experts; an
    earlier run wrote the first ``num_kept``.
    """

    stage: ClassVar[str]
    report_name: ClassVar[str]  # the file that lists the files of the new checkpoint
    index_name: ClassVar[str] = INDEX_FILE_NAME
    settings: dict[str, Any]
    replaced: set[str]
    expert_bytes: int

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap) -> None:
        self.checkpoint = checkpoint
        self.experts = experts
        self.done: list[WrittenFile] = []
        self.num_kept = 0

    @abc.abstractmethod
    def units(self) -> Iterable[list[ExpertKey]]:
        """All experts in file order, grouped by the files that they must share."""

    @abc.abstractmethod
    def file_name(self, number: int, num_files: int) -> str:
        """The name of a file of experts; the last number is the file of everything else."""

    @abc.abstractmethod
    def tensors_of(self, keys: Sequence[ExpertKey]) -> Iterable[str]:
        """The tensors in a file of these experts."""

    @abc.abstractmethod
    def least_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """The least bytes of a file of these experts."""

    @abc.abstractmethod
    def write_file(self, file: GrowingFile, keys: Sequence[ExpertKey], experts: Experts) -> None:
        """Writes a file of experts."""

    @abc.abstractmethod
    def quantization(self) -> Mapping[str, Any]:
        """The quantisation settings for the new ``config.json``."""

    @abc.abstractmethod
    def report(self, notes: Mapping[ExpertKey, list[Any]], files: list[str]) -> str:
        """The content of `report_name`, from the notes of all experts."""

    def write(self, folder: Path, *, io_threads: int = 4, progress: Progress | None = None) -> None:
        """Writes the new checkpoint, which replaces the folder once it is complete."""
        staging = staging_of(folder)
        make_folders(staging.parent)
        read_progress(staging)
        staging.mkdir(exist_ok=True)
        with held(staging, advice=f"remove {staging}"):
            self._progress = progress
            self._begin(staging)
            try:
                source = ExpertSource(self.experts.layouts, io_threads=io_threads)
                with contextlib.closing(source):
                    self._write_experts(source)
                self._write_rest()
                self._require_experts()
                with replace_folder(folder) as new:
                    for path in sorted(staging.iterdir()):
                        if path.name != PROGRESS_NAME:
                            _link_or_move(path, new / path.name)
                shutil.rmtree(staging)
            finally:
                if not self.done:  # nothing that another run could continue
                    shutil.rmtree(staging, ignore_errors=True)

    def _begin(self, staging: Path) -> None:
        self._staging = staging
        self._plan = [*self._files()]
        entries = self.checkpoint.entries.values()
        self._outside = [entry for entry in entries if entry.name not in self.replaced]
        versions = [[file.name, *file_version(file)] for file in sorted({e.file for e in entries})]
        self._origin = {**self.settings, "shard_bytes": SHARD_BYTES, "files": versions}
        self.done = self._read_done()
        self.num_kept = len(self.done)
        self._write_done()

    def _write_experts(self, source: ExpertSource) -> None:
        sizes = [sum(map(self._bytes_of, keys)) for keys in self._plan]
        done, total = sum(sizes[: len(self.done)]), sum(sizes)
        self._require_room()

        def experts_of(keys: Sequence[ExpertKey]) -> Experts:
            nonlocal done
            for key, views in _read_ahead(source, self.experts, keys):
                yield key, views
                done += self._bytes_of(key)
                if self._progress is not None:
                    self._progress(self.stage, done, total)

        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
            for number in range(len(self.done), len(self._plan)):
                keys = self._plan[number]
                self.done.append(self._write_file(number, experts_of(keys), pool))
                self._write_done()

    def _write_rest(self) -> None:
        staging = self._staging
        name = self.file_name(len(self._plan), len(self._plan))
        offsets, header, total = widest_first(self._outside)
        with write_atomically(staging / name) as output:
            write_at(output.fileno(), header, 0)
            for entry in self._outside:
                copy_tensor(entry, output.fileno(), len(header) + offsets[entry.name])
        file_of = dict.fromkeys(offsets, name)
        for keys, written in zip(self._plan, self.done, strict=True):
            file_of |= dict.fromkeys(self.tensors_of(keys), written.file)
            total += written.num_bytes
        source = self.checkpoint.folder
        own = (INDEX_FILE_NAME, PROGRESS_NAME, self.report_name)
        for found in sorted(source.iterdir()):
            if found.is_file() and found.suffix not in _NOT_COPIED and found.name not in own:
                shutil.copyfile(found, staging / found.name)
        write_index(staging / self.index_name, file_of, {"total_size": total})
        config = parse_object((source / "config.json").read_bytes(), has_infinity=True)
        config["quantization_config"] = self.quantization()
        write_text(staging / "config.json", json.dumps(config, indent=2) + "\n")
        files = {path.name for path in staging.iterdir()} - {PROGRESS_NAME} | {self.report_name}
        every = (key for keys in self._plan for key in keys)
        notes = (note for written in self.done for note in written.notes)
        report = self.report(dict(zip(every, notes, strict=True)), sorted(files))
        write_text(staging / self.report_name, report)

    def _require_experts(self) -> None:
        new = open_checkpoint(self._staging, self.checkpoint.dtype)
        found = map_experts(build_on_meta(new), new).layouts.keys()
        if found != self.experts.layouts.keys():
            raise CheckpointError(
                f"{self._staging}: expected {len(self.experts.layouts)} experts in what "
                f"was written, found {len(found)}"
            )

    def _write_file(self, number: int, experts: Experts, pool: ThreadPoolExecutor) -> WrittenFile:
        keys, name = self._plan[number], self.file_name(number, len(self._plan))
        with write_atomically(self._staging / name) as output:
            descriptor = output.fileno()
            file = GrowingFile(descriptor, pool)
            self.write_file(file, keys, experts)
            os.fsync(descriptor)
            written = WrittenFile(name, file.pieces, file.notes)
            self._compare(Path(f"/proc/self/fd/{descriptor}"), written)
        return written

    def _compare(self, path: Path, written: WrittenFile) -> None:
        """Reads a file back, past the page cache if possible, and compares digests."""
        with contextlib.closing(CheckpointFile(path)) as file:
            most = max(size for _, size, _ in written.pieces)
            view = host_view(aligned_bytes(aligned(most, BLOCK_BYTES) + BLOCK_BYTES))
            for begin, size, digest in written.pieces:
                first = begin // BLOCK_BYTES * BLOCK_BYTES
                end = begin + size - first
                file.read(first, view[: aligned(end, BLOCK_BYTES)], end)
                if zlib.crc32(view[begin - first : end]) != digest:
                    raise CheckpointError(
                        f"{self._staging / written.file}: what was read back is not what was "
                        "written; the disk is faulty, or another program writes to it"
                    )

    def _files(self) -> Iterator[list[ExpertKey]]:
        keys: list[ExpertKey] = []
        size = 0
        for unit in self.units():
            num_bytes = sum(map(self._bytes_of, unit))
            if keys and size + num_bytes > SHARD_BYTES:
                yield keys
                keys, size = [], 0
            keys, size = [*keys, *unit], size + num_bytes
        yield keys

    def _bytes_of(self, key: ExpertKey) -> int:
        return self.experts.layouts[key].tensor_bytes

    def _require_room(self) -> None:
        needed = sum(entry.num_bytes for entry in self._outside)
        needed += sum(map(self.least_bytes, self._plan[len(self.done) :]))
        free = shutil.disk_usage(self._staging).free
        if free < needed:
            raise CapacityError(
                f"{self._staging.parent} has {format_bytes(free)} free, and the packed checkpoint "
                f"takes at least {format_bytes(needed, up=True)} more; free some, or name "
                "another folder"
            )

    def _read_done(self) -> list[WrittenFile]:
        """The unchanged files of an earlier run."""
        found: list[WrittenFile] = []
        progress = read_progress(self._staging)
        if progress is not None and progress["origin"] == json.loads(json.dumps(self._origin)):
            for written in progress["shards"]:
                if not self._is_whole(written):
                    break
                found.append(written)
        whole = {written.file for written in found}
        for left in self._staging.iterdir():
            if left.name not in whole:
                left.unlink()
        return found

    def _is_whole(self, written: WrittenFile) -> bool:
        path = self._staging / written.file
        try:
            if path.stat().st_size < max(begin + size for begin, size, _ in written.pieces):
                return False
            self._compare(path, written)
        except (OSError, EOFError, CheckpointError):
            return False
        return True

    def _write_done(self) -> None:
        shards = [asdict(written) for written in self.done]
        text = json.dumps({"origin": self._origin, "shards": shards})
        write_text(self._staging / PROGRESS_NAME, text)


def _link_or_move(path: Path, target: Path) -> None:
    """Links a file, or moves it if the filesystem has no links."""
    try:
        os.link(path, target)
    except OSError:
        os.rename(path, target)


def _read_ahead(source: ExpertSource, experts: ExpertMap, keys: Sequence[ExpertKey]) -> Experts:
    """Reads each expert ahead of its use; views are valid until the next one."""
    slots = [aligned_bytes(experts.slot_bytes) for _ in range(2)]
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(source.read, {keys[0]: slots[0]})
        for number, key in enumerate(keys):
            reading.result()
            if number + 1 < len(keys):
                following = {keys[number + 1]: slots[(number + 1) % 2]}
                reading = reader.submit(source.read, following)
            views = experts.layouts[key].views(slots[number % 2])
            yield key, dict(zip(experts.matrices[key.layer], views, strict=True))
