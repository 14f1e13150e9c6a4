"""Checkpoints of offloaded training: a small file that names the versions of the experts.

A version that a checkpoint names is not overwritten before the next checkpoint is durable. So a
checkpoint writes the experts in memory that changed since the last one, the dense parameters, and
one flush; training goes on meanwhile. The file is written next to its place, flushed and renamed.

A checkpoint knows experts by logical names, and each row names the expert's folder. So any number
of processes resumes from it, under any budget. The first process writes the file once all processes
have durable versions; until then all keep the last checkpoint.

Sources: DataStates-LLM (2024) for writing while the next step computes; Universal Checkpointing
(2024) for logical names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from moe_runtime.errors import CheckpointError, MoERuntimeError, UnsupportedUseError
from moe_runtime.files import make_folders, write_atomically
from moe_runtime.memory.source import CheckpointFile, host_view
from moe_runtime.training.checkpoint import (
    COUNT,
    PLAIN,
    TEXT,
    BackgroundSave,
    Kind,
    host_copy,
    require_kinds,
    shown,
)
from moe_runtime.training.offload.disk import LOCK_FILE, RecordFile
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import (
    RecordLayout,
    Sections,
    StateFormat,
    Version,
    check_digest,
    records_path,
)
from moe_runtime.training.offload.site import ExpertsSite, OneProcess
from moe_runtime.types import ExpertKey

EXPERTS_FORMAT = 3
"""Rows name a folder since format 3; those of format 2 lie in the storage folder itself."""
_READABLE = (2, EXPERTS_FORMAT)
_NEEDS_FOLDER = "checkpoints need a storage_dir, where experts are saved"
_DIGEST = re.compile(r"[0-9a-f]{16}")
_OWN_FILES = ("experts-*.records", "gradients-*.scratch", "activations.scratch", LOCK_FILE)
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
    """The rows of a checkpoint, and the files that they name.

    Args:
        last_step: no row may be of a later one.

    Attributes:
        rows: folder below `storage` (empty for itself) and version, by logical name.

    Raises:
        CheckpointError: it is damaged, or of a format that this version does not read.
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
            is_sound = type(row) in (list, tuple) and len(row) == len(_ROW) - (
                found != EXPERTS_FORMAT
            )
            is_sound = is_sound and all(k.fits(v) for k, v in zip(_ROW, row, strict=False))
            if not is_sound or max(row[1], row[2], row[4] or 0) > last_step:
                raise CheckpointError(f"the checkpoint has {shown(row)} of {name}, no saved record")
            slot, step, count, digest, pending, *folder = row
            version = Version(slot, step, count, digest, pending, is_written=True)
            self.rows[name] = (folder[0] if folder else "", version)
        self._files: dict[Path, CheckpointFile] = {}

    def require(self, names: Iterable[str]) -> None:
        expected = set(names)
        if others := self.rows.keys() - expected:
            raise CheckpointError(f"the checkpoint has an expert {shown(min(others))}")
        missing = sorted(expected - self.rows.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {len(missing)} experts: {missing[0]}, ...")

    def read(self, name: str, key: ExpertKey, layout: RecordLayout, record: Tensor) -> Version:
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
        for file in self._files.values():
            file.close()
        self._files.clear()


def _row_of(version: Version, folder: str) -> list[Any]:
    return [version.slot, version.step, version.count, version.digest, version.pending, folder]


def remove_left_behind(storage: Path, size: int) -> None:
    """Removes the files of runs with another number of processes, which no checkpoint names."""
    others = [path for path in storage.iterdir() if _FOLDER.fullmatch(path.name)]
    folders = [path for path in others if size == 1 or not path.name.endswith(f"-of-{size}")]
    for folder in folders:
        remove_own_files(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    if size > 1:
        remove_own_files(storage)


def remove_own_files(folder: Path) -> None:
    for pattern in _OWN_FILES:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


S = TypeVar("S")


class HeldExperts(dict[str, Any]):
    """Experts of a state that only `write` completes; other ways to save would lose them."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedUseError(
            "the state of offloaded experts is in their files and in memory, and would be missing "
            "from this file: `write` of the optimizer saves a checkpoint with it"
        )


class ExpertCheckpoints:
    """Saves the experts' versions in the background, one checkpoint at a time."""

    def __init__(
        self,
        records: RecordStore,
        sites: Sequence[ExpertsSite],
        state_format: StateFormat,
        processes: OneProcess | None = None,
    ) -> None:
        self._records = records
        self._sites = list(sites)
        self._layouts = [site.layout(state_format) for site in sites]
        self._state_format = str(state_format)
        self._processes = processes or OneProcess()
        self.saves = BackgroundSave()
        self._begun: dict[ExpertKey, Version] = {}
        self._kept: dict[ExpertKey, Version] = {}
        self._kept_for_others: list[tuple[RecordFile, int]] = []
        self._is_first = True
        self._mark = object()

    def begin(self) -> dict[str, Any]:
        """Holds every expert as it is now, if there is a disk. The result is the experts' part of
        the checkpoint; `write` completes it."""
        self.saves.wait()
        if self._begun:
            self._records.drop_versions(self._begun)
        if self._records.disk is not None:
            self._begun = self._records.hold_versions()
        self._mark = object()
        return HeldExperts(self._head() | {"experts": {}, "held": self._mark})

    def _head(self) -> dict[str, Any]:
        return {
            "format": EXPERTS_FORMAT, "sites": self._shapes(), "state": self._state_format,
        }  # fmt: skip

    def holds(self, experts: Mapping[str, Any]) -> bool:
        """Whether the last `begin` gave these; a copy of their mapping counts."""
        return experts.get("held") is self._mark

    def write(
        self, state: S, experts_of: Callable[[S], dict[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Writes a checkpoint in the background, once the experts of all processes are durable.

        Args:
            state: of the whole run; copied to the host first.
            experts_of: finds the result of `begin` in a state.
            job: writes the state in the first process; must be atomic. The next `begin`, or `wait`
                of `saves`, raises its errors in all processes.
        """
        if self._records.disk is None:
            raise CheckpointError(_NEEDS_FOLDER)
        is_writer = self._processes.rank == 0
        snapshot, versions = host_copy(state) if is_writer else state, self._begun
        self._begun = {}

        def write_whole(rows: dict[str, Any]) -> None:
            if is_writer:
                experts = experts_of(snapshot)
                experts["experts"] = rows
                del experts["held"]
                job(snapshot)

        def save() -> None:
            rows = self._together(lambda: self._durable_rows(versions))
            whole = {name: row for part in rows for name, row in part.items()}
            self._together(lambda: write_whole(whole))
            self._release(versions)

        self.saves.start(save)

    def export(self, folder: Path) -> dict[str, Any]:
        """Writes the trained experts into a folder; `restore` reads the result from there."""
        make_folders(folder)
        rows: dict[str, Any] = {}
        with ExitStack() as opened:
            files: dict[Path, Any] = {}
            trained = {k: e for k, e in self._records.experts.items() if e.layout.trained}
            for key, expert in trained.items():
                path, size = records_path(folder, expert.layout), expert.layout.state_bytes
                if path not in files:
                    files[path] = opened.enter_context(write_atomically(path))
                record = self._records.acquire(key, Sections.STATE)
                step, slot = self._records.content_step(key), files[path].tell() // size
                version = Version(slot, step, expert.count, pending=expert.pending)
                version.digest, _ = expert.layout.checksums(record)
                files[path].write(host_view(record[:size]))
                self._records.release(key)
                rows[self._name(key)] = _row_of(version, "")
        return self._head() | {"experts": rows}

    def restore(
        self, saved: Mapping[str, Any], last_step: int, storage: Path | None = None
    ) -> None:
        """Loads the experts that a checkpoint names, whichever processes wrote them.

        Args:
            storage: folder of an export; the storage folder of this run when omitted.

        Raises:
            CheckpointError: it is of another model, lacks experts, or a record is damaged.
        """
        if "held" in saved:
            raise CheckpointError(
                "the state names experts that were not written: load what `write` saved"
            )
        own = None
        everyone = (
            ExpertKey(n, e) for n, s in enumerate(self._sites) for e in range(s.num_experts)
        )
        if storage is not None:  # exports leave out frozen experts
            everyone = (key for key in everyone if self._layouts[key.layer].trained)
        else:
            if self._records.disk is None:
                raise CheckpointError(_NEEDS_FOLDER)
            own, storage = self._processes.folder_name, self._records.disk.folder
            storage = storage.parent if own else storage
        experts = SavedExperts(storage, saved, last_step)
        self._require_same_model(saved)
        keys = {self._name(key): key for key in everyone}
        experts.require(keys)
        here, moves = {}, []
        for name, key in keys.items():
            where, version = experts.rows[name]
            if key not in self._records.experts:
                if where == own:
                    self._keep_for_others(key, version)
            elif where == own:
                here[key] = version
            else:
                moves.append((name, key))
        self._kept = here
        self._records.restore(here)
        for name, key in moves:
            self._records.take_in(
                key,
                lambda record, name=name, key=key: experts.read(
                    name, key, self._layouts[key.layer], record
                ),
            )
        self._records.commit()
        experts.close()

    def _durable_rows(self, versions: Mapping[ExpertKey, Version]) -> dict[str, Any]:
        self._records.wait_until_durable(versions)
        folder = self._processes.folder_name
        return {self._name(key): _row_of(version, folder) for key, version in versions.items()}

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Results of every process's part of a checkpoint; a failure in one fails all."""
        failure, result = None, None
        try:
            result = work()
        except (MoERuntimeError, OSError) as error:
            failure = error
        answers = self._processes.gather((None if failure is None else str(failure), result))
        if failure is not None:
            raise failure
        for rank, (reason, _) in enumerate(answers):
            if reason is not None:
                raise CheckpointError(f"rank {rank} could not save its part: {reason}")
        return [found for _, found in answers]

    def _release(self, versions: dict[ExpertKey, Version]) -> None:
        """Frees slots that only the last checkpoint named, as the new one is durable."""
        assert self._records.disk is not None
        self._records.drop_versions(self._kept)
        self._records.drop_slots(self._kept_for_others)
        self._kept, self._kept_for_others = versions, []
        if self._is_first and self._processes.rank == 0:
            folder = self._records.disk.folder
            storage = folder.parent if self._processes.folder_name else folder
            remove_left_behind(storage, self._processes.size)
        self._is_first = False

    def _keep_for_others(self, key: ExpertKey, version: Version) -> None:
        """Keeps a record that another process takes over, until the next checkpoint."""
        assert self._records.disk is not None
        layout = self._layouts[key.layer]
        # a file that is not open here is not written to either
        if (file := self._records.disk.files.get(layout.state_bytes)) is not None:
            file.hold(version.slot)
            self._kept_for_others.append((file, version.slot))

    def _require_same_model(self, saved: Mapping[str, Any]) -> None:
        shapes, state = self._shapes(), self._state_format
        if saved["sites"] != shapes:
            raise CheckpointError(
                f"the checkpoint is of another model: it has experts {saved['sites']}, "
                f"this one {shapes}"
            )
        if saved["state"] != state:
            raise CheckpointError(
                f"the checkpoint's experts have {saved['state']}, this run's {state}; go on with "
                "the optimizer's options of the checkpoint"
            )

    def _name(self, key: ExpertKey) -> str:
        return f"{self._sites[key.layer].name}.{key.expert}"

    def _shapes(self) -> dict[str, list[Any]]:
        shapes = {}
        for site, layout in zip(self._sites, self._layouts, strict=True):
            tensors = [
                [tensor.name, *tensor.shape, *(() if tensor.is_trained else ("frozen",))]
                for tensor in layout.tensors
            ]
            shapes[site.name] = [site.num_experts, str(layout.dtype), *tensors]
        return shapes
