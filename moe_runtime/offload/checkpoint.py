"""Checkpoints of offloaded training: a small file that names the versions of the experts.

Experts lie on the disk already, and a version that a checkpoint names is not overwritten before the
next checkpoint is durable. So a checkpoint costs the experts that live in memory and changed since
the last one, the dense parameters, and one flush; training goes on meanwhile. The file is written
beside its place, flushed and renamed: a kill or a power cut at any instant leaves a whole one.

Sources: DataStates-LLM (2024) for writing while the next step computes; Universal Checkpointing
(2024) for logical names: the file knows experts, not homes, budgets or numbers of threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from moe_runtime.errors import CheckpointError
from moe_runtime.offload.books import Version
from moe_runtime.offload.site import ExpertsSite
from moe_runtime.offload.states import ExpertStates
from moe_runtime.types import ExpertKey

FORMAT = 2
S = TypeVar("S")


class ExpertCheckpoints:
    """Saves the experts' versions, one checkpoint at a time, beside the training.

    Args:
        states: the experts.
        sites: their modules, for the names.
    """

    def __init__(self, states: ExpertStates, sites: Sequence[ExpertsSite]) -> None:
        self._states = states
        self._sites = list(sites)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._begun: dict[ExpertKey, Version] = {}
        self._kept: dict[ExpertKey, Version] = {}

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
            "state": self._state_format(),
            "experts": {},
        }

    def write(
        self, state: S, experts_of: Callable[[S], dict[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Writes a checkpoint in the background, once its experts are durable.

        Args:
            state: everything that belongs to it, what `begin` gave included; copied first.
            experts_of: finds in a state what `begin` gave.
            job: writes the state; must be atomic. Errors come out of the next `begin` or `wait`.
        """
        snapshot, versions = copy.deepcopy(state), self._begun
        self._begun = {}

        def save() -> None:
            self._states.wait_until_durable(versions)
            experts_of(snapshot)["experts"] = {
                self._name(key): [v.slot, v.step, v.count, v.digest, v.pending]
                for key, v in versions.items()
            }
            job(snapshot)
            self._states.drop_versions(self._kept)
            self._kept = versions

        self._under_way = self._thread.submit(save)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the experts that a checkpoint names.

        Raises:
            CheckpointError: it is of another model, lacks experts, or a record is damaged.
        """
        if saved.get("format") != FORMAT:
            raise CheckpointError(f"not a checkpoint of offloaded experts of format {FORMAT}")
        shapes = self._shapes()
        if saved["sites"] != shapes:
            raise CheckpointError(
                f"the checkpoint is of another model: it has experts {saved['sites']}, "
                f"this one {shapes}"
            )
        if saved["state"] != self._state_format():
            raise CheckpointError(
                f"the checkpoint's experts have {saved['state']}, this run's "
                f"{self._state_format()}; go on with the optimizer's options of the checkpoint"
            )
        rows = saved["experts"]
        missing = [self._name(key) for key in self._states.experts if self._name(key) not in rows]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {len(missing)} experts: {missing[0]}, ...")
        self._kept = {key: Version(*rows[self._name(key)]) for key in self._states.experts}
        self._states.restore(self._kept)

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

    def _name(self, key: ExpertKey) -> str:
        return f"{self._sites[key.layer].name}.{key.expert}"

    def _state_format(self) -> str:
        return str(next(iter(self._states.experts.values())).layout.state)

    def _shapes(self) -> dict[str, list[Any]]:
        """Number of experts, dtype and shapes of each module."""
        shapes = {}
        for layer, site in enumerate(self._sites):
            layout = self._states.experts[ExpertKey(layer, 0)].layout
            tensors = [[tensor.name, *tensor.shape] for tensor in layout.tensors]
            shapes[site.name] = [site.num_experts, str(layout.dtype), *tensors]
        return shapes
