"""Checkpoints of offloaded training: a small file that names the versions of the experts.

Experts lie on the disk already, and a version that a checkpoint names is not overwritten before the
next checkpoint is durable. So a checkpoint costs the experts that live in memory and changed since
the last one, the dense parameters, and one flush; training goes on meanwhile. The file is written
beside its place, flushed and renamed: a kill or a power cut at any instant leaves a whole one.

Where several processes train together, the first one writes the file, once all have said which
versions of their experts lie on the disk, and all go on naming the one before until it is there. So
there is one file or none, whoever is killed when.

Sources: DataStates-LLM (2024) for writing while the next step computes; Universal Checkpointing
(2024) for logical names: the file knows experts, not tiers, budgets, or numbers of threads and
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.training.checkpoint import host_copy
from moe_runtime.training.offload.processes import OneProcess
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.entries import Version
from moe_runtime.training.offload.states.records import RecordLayout, StateFormat
from moe_runtime.training.offload.states.saved import (
    FORMAT,
    SavedExperts,
    remove_left_behind,
    row_of,
)
from moe_runtime.training.offload.states.states import ExpertStates
from moe_runtime.types import ExpertKey

S = TypeVar("S")


class ExpertCheckpoints:
    """Saves the experts' versions, one checkpoint at a time, beside the training.

    Args:
        states: the experts.
        sites: their modules, with their parameters still.
        state_format: what records hold.
        processes: who trains together; this process alone when omitted.
    """

    def __init__(
        self,
        states: ExpertStates,
        sites: Sequence[ExpertsModuleSpec],
        state_format: StateFormat,
        processes: OneProcess | None = None,
    ) -> None:
        self._states = states
        self._sites = list(sites)
        self._layouts = [site.layout(state_format) for site in sites]
        self._state_format = str(state_format)
        self._processes = processes or OneProcess()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._begun: dict[ExpertKey, Version] = {}
        self._kept: dict[ExpertKey, Version] = {}
        self._lent: list[tuple[RecordLayout, int]] = []
        self._is_first = True

    def begin(self) -> dict[str, Any]:
        """Holds every expert as it is now; `write` makes a checkpoint of it.

        Returns:
            What the checkpoint will say of the experts; complete when `write` calls its job.

        Raises:
            CheckpointError: there is no folder to save to.
            MoERuntimeError: the checkpoint before failed.
        """
        if self._states.disk is None:
            raise CheckpointError("checkpoints need a storage_dir, where experts are saved")
        self.wait()
        if self._begun:
            self._states.drop_versions(self._begun)
        self._begun = self._states.hold_versions()
        return {
            "format": FORMAT,
            "sites": self._shapes(),
            "state": self._state_format,
            "experts": {},
        }

    def write(
        self, state: S, experts_of: Callable[[S], dict[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Writes a checkpoint in the background, once the experts of all processes are durable.

        Args:
            state: everything that belongs to it, what `begin` gave included; copied to the host
                first.
            experts_of: finds in a state what `begin` gave.
            job: writes the state; must be atomic. Called in the first process. Errors come out of
                the next `begin` or `wait`, in all processes.
        """
        is_writer = self._processes.rank == 0
        snapshot, versions = host_copy(state) if is_writer else state, self._begun
        self._begun = {}

        def write_whole(rows: dict[str, Any]) -> None:
            if is_writer:
                experts_of(snapshot)["experts"] = rows
                job(snapshot)

        def save() -> None:
            rows = self._together(lambda: self._durable_rows(versions))
            whole = {name: row for part in rows for name, row in part.items()}
            self._together(lambda: write_whole(whole))
            self._let_go(versions)

        self._under_way = self._thread.submit(save)

    def restore(self, saved: Mapping[str, Any], last_step: int) -> None:
        """Takes up the experts that a checkpoint names, whichever processes wrote them.

        Args:
            saved: what the checkpoint says of the experts.
            last_step: up to which they go at most, in their own count of steps.

        Raises:
            CheckpointError: it is of another model, lacks experts, or a record is damaged.
        """
        assert self._states.disk is not None, "checkpoints need a folder"
        own = self._processes.folder_name
        folder = self._states.disk.folder
        experts = SavedExperts(folder.parent if own else folder, saved, last_step)
        self._require_same_model(saved)
        keys = {self._name(key): key for key in self._everyone()}
        experts.require(keys)
        here, moves = {}, []
        for name, key in keys.items():
            where, version = experts.rows[name]
            if key not in self._states.experts:
                if where == own:
                    self._lend(key, version)
            elif where == own:
                here[key] = version
            else:
                moves.append((name, key))
        self._kept = here
        self._states.restore(here)
        for name, key in moves:
            self._states.take_in(
                key,
                lambda record, name=name, key=key: experts.read(
                    name, key, self._layouts[key.layer], record
                ),
            )
        self._states.commit()
        experts.close()

    def wait(self) -> None:
        """Returns when no checkpoint is under way.

        Raises:
            MoERuntimeError, OSError: the last one failed; the one before is intact.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits for the checkpoint under way and ends the thread."""
        self._thread.shutdown()

    def _durable_rows(self, versions: Mapping[ExpertKey, Version]) -> dict[str, Any]:
        self._states.wait_until_durable(versions)
        folder = self._processes.folder_name
        return {self._name(key): row_of(version, folder) for key, version in versions.items()}

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """What a part of the checkpoint gave in every process; one that fails fails all.

        Raises:
            MoERuntimeError, OSError: it failed here.
            CheckpointError: it failed in another process.
        """
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

    def _let_go(self, versions: dict[ExpertKey, Version]) -> None:
        """The checkpoint is durable: what only the one before named is free."""
        assert self._states.disk is not None
        self._states.drop_versions(self._kept)
        self._states.drop_lent(self._lent)
        self._kept, self._lent = versions, []
        if self._is_first and self._processes.rank == 0:
            folder = self._states.disk.folder
            storage = folder.parent if self._processes.folder_name else folder
            remove_left_behind(storage, self._processes.size)
        self._is_first = False

    def _lend(self, key: ExpertKey, version: Version) -> None:
        """Keeps a record here that another process takes over, until the next checkpoint."""
        assert self._states.disk is not None
        layout = self._layouts[key.layer]
        # What has no file open here is not written to either.
        if self._states.disk.has_file(layout):
            self._states.disk.hold(layout, version.slot)
            self._lent.append((layout, version.slot))

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

    def _everyone(self) -> Iterable[ExpertKey]:
        """The experts of all processes."""
        for layer, site in enumerate(self._sites):
            for expert in range(site.num_experts):
                yield ExpertKey(layer, expert)

    def _name(self, key: ExpertKey) -> str:
        return f"{self._sites[key.layer].name}.{key.expert}"

    def _shapes(self) -> dict[str, list[Any]]:
        """Number of experts, dtype and shapes of each module, and which tensors are frozen."""
        shapes = {}
        for site, layout in zip(self._sites, self._layouts, strict=True):
            tensors = [
                [tensor.name, *tensor.shape, *(() if tensor.is_trained else ("frozen",))]
                for tensor in layout.tensors
            ]
            shapes[site.name] = [site.num_experts, str(layout.dtype), *tensors]
        return shapes
