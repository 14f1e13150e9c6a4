"""Experts that a checkpoint names, read from wherever they were written.

A checkpoint knows experts by logical names; each row says in whose files the expert lies. So any
number of processes finds its experts in it, under any budget, and so does a run in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.memory.slab import host_view
from moe_runtime.memory.source import CheckpointFile
from moe_runtime.training.offload.states.entries import Version
from moe_runtime.training.offload.states.records import RecordLayout, checksum
from moe_runtime.training.stored_values import (
    COUNT,
    PLAIN,
    TEXT,
    Kind,
    require_kinds,
    shown,
)
from moe_runtime.types import ExpertKey

FORMAT = 3
"""Rows name a folder since format 3; those of format 2 lie in the storage folder itself."""
_READABLE = (2, FORMAT)
_DIGEST = re.compile(r"[0-9a-f]{16}")
_OWN_FILES = ("experts-*.records", "gradients-*.scratch", "activations.scratch")
_FOLDER = re.compile(r"rank-\d+-of-\d+")
_ROW = (
    Kind("a slot", lambda slot: type(slot) is int and 0 <= slot < 1 << 31),
    COUNT,
    COUNT,
    Kind("a digest", lambda text: isinstance(text, str) and bool(_DIGEST.fullmatch(text))),
    COUNT.or_none(),
    Kind("a folder", lambda v: v == "" or (isinstance(v, str) and bool(_FOLDER.fullmatch(v)))),
)
"""Slot, step, updates, digest, pending step, folder."""
_KINDS = {"format": COUNT, "sites": PLAIN, "state": TEXT, "experts": PLAIN.named()}


class SavedExperts:
    """The rows of a checkpoint, and the files that they are about.

    Args:
        storage: the folder that was given for experts.
        saved: what the checkpoint says of the experts.
        last_step: up to which they go at most, in their own count of steps.

    Attributes:
        storage: as given.
        rows: folder below `storage` (empty for itself) and version, by logical name.

    Raises:
        CheckpointError: it is damaged, or of a format that is not read any more.
    """

    def __init__(self, storage: Path, saved: Mapping[str, Any], last_step: int) -> None:
        found = saved.get("format")
        if not (COUNT.fits(found) and found in _READABLE):
            raise CheckpointError(
                f"the checkpoint's experts have format {found}, this version reads "
                f"{' and '.join(map(str, _READABLE))}; go on with the version that wrote it, or "
                "begin anew from the model that it exported"
            )
        require_kinds(saved, _KINDS, "the checkpoint's experts")
        self.storage = storage
        self.rows: dict[str, tuple[str, Version]] = {}
        for name, row in saved["experts"].items():
            is_sound = type(row) in (list, tuple) and len(row) == len(_ROW) - (found != FORMAT)
            is_sound = is_sound and all(k.fits(v) for k, v in zip(_ROW, row, strict=False))
            if not is_sound or max(row[1], row[2], row[4] or 0) > last_step:
                raise CheckpointError(f"the checkpoint has {shown(row)} of {name}, no saved record")
            slot, step, count, digest, pending, *folder = row
            version = Version(slot, step, count, digest, pending, is_written=True)
            self.rows[name] = (folder[0] if folder else "", version)
        self._files: dict[Path, CheckpointFile] = {}

    def require(self, names: Iterable[str]) -> None:
        """Refuses a checkpoint that lacks experts, or has others.

        Raises:
            CheckpointError: it does; names one.
        """
        expected = set(names)
        if others := self.rows.keys() - expected:
            raise CheckpointError(f"the checkpoint has an expert {shown(min(others))}")
        missing = sorted(expected - self.rows.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {len(missing)} experts: {missing[0]}, ...")

    def read(self, name: str, key: ExpertKey, layout: RecordLayout, record: Tensor) -> Version:
        """Reads an expert's state into a record, and checks it.

        Raises:
            CheckpointError: its file is missing, too short or damaged; says which.
        """
        folder, version = self.rows[name]
        path = records_path(self.storage / folder, layout)
        if path not in self._files:
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing: the checkpoint has {name} there; another number of "
                    "processes needs the files of all that wrote it below one storage_dir"
                )
            self._files[path] = CheckpointFile(path, direct=False)
        size = layout.state_bytes
        try:
            self._files[path].read(version.slot * size, host_view(record[:size]), size)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        check_digest(path, key, version, record[:size])
        return version

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def row_of(version: Version, folder: str) -> list[Any]:
    """What a checkpoint says of an expert."""
    return [version.slot, version.step, version.count, version.digest, version.pending, folder]


def records_path(folder: Path, layout: RecordLayout) -> Path:
    """The file of records of a size."""
    return folder / f"experts-{layout.state_bytes}.records"


def check_digest(path: Path, key: ExpertKey, version: Version, content: Tensor) -> None:
    """Compares what was read with what a checkpoint says.

    Raises:
        CheckpointError: they differ; names the expert.
    """
    found = checksum(content)
    if found != version.digest:
        raise CheckpointError(
            f"{path}: expert {key.expert} of MoE layer {key.layer} is damaged: its checksum is "
            f"{found}, the checkpoint says {version.digest}"
        )


def remove_left_behind(storage: Path, size: int) -> None:
    """Removes the files of runs with another number of processes, which nothing names any more.

    Args:
        storage: the folder that was given for experts.
        size: number of processes now.
    """
    others = [path for path in storage.iterdir() if _FOLDER.fullmatch(path.name)]
    folders = [path for path in others if size == 1 or not path.name.endswith(f"-of-{size}")]
    for folder in folders:
        remove_own_files(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    if size > 1:
        remove_own_files(storage)


def remove_own_files(folder: Path) -> None:
    """Removes the files of experts in a folder."""
    for pattern in _OWN_FILES:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
