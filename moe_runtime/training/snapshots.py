"""Snapshots of a run in the memory of its machines.

Each process writes its part into a file system in memory, where it outlives the process. With
several machines, another one gets a copy, so that the loss of a machine loses no part. A snapshot
has the format of checkpoints of several processes: any number of processes resumes from it, under
any layout.

Source: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints" (2023).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.digests import digest, digest_of_file
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import remove_or_warn, write_atomically, write_text
from moe_runtime.training.checkpoint import RunProgress, checkpoints_in, name_of_step
from moe_runtime.training.metrics import holds_records
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.sharded import (
    PROGRESS_FILE,
    LostStage,
    ShardedCheckpoints,
    fails_together,
    lost_tensors,
    read_progress,
)

MEMORY = Path("/dev/shm")
"""Linux' file system in memory."""
_WHOLE = "whole.json"
"""Names and digests of all files of a snapshot, written after them."""


class Snapshots:
    """The newest snapshot of a run; all calls are collective.

    Args:
        output: the run's folder, which names its snapshots. A snapshot belongs to the run if its
            records begin like the folder's.
        memory: a folder in memory that this machine's processes share; Linux's when omitted.
        approximates: no other machine gets a copy, and other stages replace a lost one.

    Attributes:
        lost: missing tensors of the snapshot that `find` returned; None if it is whole.
    """

    def __init__(
        self,
        output: Path,
        shards: ShardedCheckpoints,
        ranks: OneRank,
        memory: Path | None = None,
        *,
        approximates: bool = False,
    ) -> None:
        memory = memory or MEMORY
        name = digest(os.fsencode(os.path.realpath(output)))
        self.folder = memory / f"moe-runtime-{os.getuid()}-{name}"
        self._output, self._shards, self._ranks = output, shards, ranks
        self._has_failed, self._approximates = False, approximates
        self.lost: LostStage | None = None
        self._machines = ranks.texts(f"{socket.gethostname()} {self.folder}")
        here = self._machines[ranks.rank]
        self._is_first_here = self._machines.index(here) == ranks.rank
        steps = range(1, ranks.size)
        # from every process to the nearest one on another machine
        far = (n for n in steps if not approximates and self._leaves_machine(n))
        self._shift = next(far, 0)

    def require_memory(self) -> None:
        """Raises a `CheckpointError` in all processes if one cannot take snapshots."""
        reason = ""
        try:
            self._make_folder()
        except OSError as error:
            reason = f"{self.folder}: {error.strerror}"
        if reason := self._ranks.first_text(reason):
            raise CheckpointError(
                "run.snapshot_every needs a file system in memory, and it cannot be used "
                f"({reason}); leave it out"
            )
        if self._is_first_here:
            self._remove_empty()

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_own():
            raise PermissionError(errno.EPERM, "is another user's; remove it", str(self.folder))

    def _is_own(self) -> bool:
        found = self.folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()

    def _remove_empty(self) -> None:
        with contextlib.suppress(OSError):  # it has a snapshot
            self.folder.rmdir()

    def _leaves_machine(self, shift: int) -> bool:
        size = len(self._machines)
        return all(
            machine != self._machines[(rank + shift) % size]
            for rank, machine in enumerate(self._machines)
        )

    def save(self, progress: RunProgress) -> None:
        """Takes a snapshot, and removes the last one once the new one is whole.

        If it cannot be written, all processes remove it, with a warning.
        """
        path = self.folder / name_of_step(progress.step)
        try:
            self._take(path, progress)
        except OSError as error:
            if self._is_first_here:
                remove_or_warn(path, "it is not whole")
            if self._ranks.rank == 0 and not self._has_failed:
                warnings.warn(
                    f"{path}: no snapshot was taken ({error}); training goes on, and tries again "
                    "after the next steps",
                    MoERuntimeWarning,
                    stacklevel=2,
                )
            self._has_failed = True
            return
        self._has_failed = False
        if self._is_first_here:
            self._remove(keep=path)

    def _take(self, path: Path, progress: RunProgress) -> None:
        with fails_together(self._ranks):
            if self._is_first_here:
                self._make_folder()
                remove_or_warn(path, "a process that was killed left it")
                path.mkdir()
        own = self._shards.write(path, progress)
        found: dict[str, str] = {}
        with fails_together(self._ranks):
            found |= {name: digest_of_file(path / name) for name in own}
        self._copy_to_neighbour(path, own)
        whole: dict[str, str] = {}
        for text in self._ranks.texts(json.dumps(found)):
            whole |= json.loads(text)
        with fails_together(self._ranks):
            if self._is_first_here:
                write_text(path / _WHOLE, json.dumps(whole))

    def find(self) -> Path | None:
        """The newest whole snapshot of this run, copied to every machine; None without one.

        A snapshot that does not fit stays until there is a newer one, with a warning.
        """
        own: dict[str, Any] = {}
        if self._is_first_here:
            own = {path.name: _held(path) for path in self._snapshots()}
        held = [json.loads(text) for text in self._ranks.texts(json.dumps(own))]
        for name in sorted({name for there in held for name in there}, reverse=True):
            there = [known.get(name, {"whole": {}, "files": []}) for known in held]
            whole: Mapping[str, str] = next((x["whole"] for x in there if x["whole"]), {})
            holders = [set(known["files"]) for known in there]
            path, left = self.folder / name, set(whole) & set().union(*holders)
            if not whole or (left != set(whole) and not self._approximates):
                continue
            self._gather(path, whole, holders, left)
            self.lost = self._lost_of(path, set(whole) - left)
            if (left == set(whole) or self.lost is not None) and self._fits(path):
                return path
        self.lost = None
        return None

    def _lost_of(self, path: Path, files: set[str]) -> LostStage | None:
        """The missing stage of a snapshot; None if nothing is missing or, with a warning, if it
        cannot be replaced."""
        if not files:
            return None
        try:
            if not (path / ".metadata").exists() or not (path / PROGRESS_FILE).exists():
                raise ValueError("its description is lost")
            found = LostStage(*lost_tensors(path, files))
        except ValueError as error:
            self._warn(f"{path}: is left out: {error}")
            return None
        self._warn(
            f"{path}: a stage is lost; each of its layers begins as a mean of the layers next to "
            "it, and its moments as 0"
        )
        return found

    def _warn(self, line: str) -> None:
        if self._ranks.rank == 0:
            warnings.warn(line, MoERuntimeWarning, stacklevel=4)

    def _fits(self, path: Path) -> bool:
        """Whether the run's folder has the records up to a snapshot."""
        records = read_progress(path).records
        is_other = self._ranks.rank == 0 and not holds_records(self._output, records)
        if is_other:
            self._warn(
                f"{path}: is left out: {self._output} does not have its records, so it is of an "
                "earlier run, or the run has gone on without it"
            )
        return not self._ranks.any(is_other)

    def clear(self) -> None:
        """Frees the memory at the end of a run."""
        self._ranks.barrier()
        if self._is_first_here:
            self._remove(keep=None)
            self._remove_empty()
        self._ranks.barrier()

    def _snapshots(self) -> list[Path]:
        return checkpoints_in(self.folder) if self.folder.is_dir() and self._is_own() else []

    def _remove(self, *, keep: Path | None) -> None:
        for path in self._snapshots():
            if path != keep:
                remove_or_warn(path, "there is a newer snapshot, or none is wanted")

    def _copy_to_neighbour(self, path: Path, own: Iterable[str]) -> None:
        """Exchanges files with processes of other machines."""
        size, rank, group = self._ranks.size, self._ranks.rank, self._ranks.group
        if not self._shift or group is None:
            return
        sizes = {name: (path / name).stat().st_size for name in own}
        theirs = [json.loads(text) for text in self._ranks.texts(json.dumps(sizes))]
        target, source = (rank + self._shift) % size, (rank - self._shift) % size
        read: list[torch.Tensor] = []
        with fails_together(self._ranks):
            read += [_read(path / name) for name in sizes]
        sent = torch.cat(read)
        arriving = torch.empty(sum(theirs[source].values()), dtype=torch.uint8)
        with self._ranks.watched(f"copying {path.name} to another machine"):
            sending = dist.isend(sent, target, group=group)
            dist.recv(arriving, source, group=group)
            assert sending is not None, "this process is in the group"
            sending.wait()
        parts = arriving.split(list(theirs[source].values()))
        with fails_together(self._ranks):
            for name, part in zip(theirs[source], parts, strict=True):
                _write(path / name, part)

    def _gather(
        self, path: Path, whole: Mapping[str, str], holders: list[set[str]], left: set[str]
    ) -> None:
        """Copies the remaining files of a snapshot to machines that lack some."""
        firsts = [self._machines.index(machine) for machine in dict.fromkeys(self._machines)]
        for name in sorted(left):
            if all(name in holders[first] for first in firsts):
                continue
            source = next(rank for rank, files in enumerate(holders) if name in files)
            is_source = self._ranks.rank == source
            content = torch.empty(0, dtype=torch.uint8)
            with fails_together(self._ranks):
                content = _read(path / name) if is_source else content
            (size,) = filter(None, self._ranks.texts(str(len(content)) if is_source else ""))
            if not is_source:
                content = torch.empty(int(size), dtype=torch.uint8)
            with self._ranks.watched(f"bringing {path.name} to all machines"):
                dist.broadcast(content, source, group=self._ranks.group)
            with fails_together(self._ranks):
                if self._is_first_here and name not in holders[self._ranks.rank]:
                    self._make_folder()
                    path.mkdir(exist_ok=True)
                    _write(path / name, content)
        with fails_together(self._ranks):
            if self._is_first_here:
                write_text(path / _WHOLE, json.dumps(dict(whole)))


def _held(path: Path) -> dict[str, Any]:
    """The files of a snapshot with their digests, and the undamaged files on this machine."""
    try:
        whole = json.loads((path / _WHOLE).read_bytes())
    except (OSError, ValueError):
        whole = None
    if not isinstance(whole, dict) or any(name != os.path.basename(name) for name in whole):
        return {"whole": {}, "files": []}
    files = [
        name
        for name, expected in whole.items()
        if (path / name).is_file() and digest_of_file(path / name) == expected
    ]
    return {"whole": whole, "files": files}


def _read(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _write(path: Path, content: torch.Tensor) -> None:
    with write_atomically(path) as file:
        file.write(content.numpy().tobytes())
