"""Learned state of policies and predictors, kept between processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.files import require_apart, require_file_name, require_not_read
from moe_runtime.inference.steps import LayerRouting, Listener, Listeners, Step
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction import PREDICTORS, LayerRouted, StepBegins, is_file_name
from moe_runtime.policies.prediction.base import Learner
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.lab.traces.recent import RecentRouting
    from moe_runtime.lab.traces.recorder import TraceRecorder

    Recorder = TraceRecorder | RecentRouting


class PolicyListener(Listener):
    """Passes steps and routing to eviction policies. Policies that may decline an expert after its
    use are called while the layer's reads run."""

    def __init__(self, stores: Sequence[ExpertStore[Any]]) -> None:
        self._stores = [store for store in stores if store.watchers]
        self.follows_requests = bool(self._stores)
        decide_later = all(store.decides_later for store in self._stores)
        self.wants_demands = bool(self._stores) and decide_later
        self.wants_routing = not decide_later

    def begin(self, step: Step) -> None:
        for store in self._stores:
            for request in step.ended:
                store.finish(request)
        for store in self._stores:
            store.observe(StepBegins(sequences=step.requests, token_ids=step.token_ids))

    def routed(self, routing: LayerRouting) -> None:
        if routing.keys:
            self.demanded(routing)

    def demanded(self, routing: LayerRouting) -> None:
        event = LayerRouted(
            layer=routing.layer,
            expert_ids=routing.ids_TK.cpu().numpy(),
            gate_weights=routing.weights_TK.float().cpu().numpy(),
        )
        for store in self._stores:
            store.observe(event)


WRITE_EVERY_S = 300.0
"""Least time between two writes."""


class KeptLearning(Listener):
    """Restores the learned state of a loaded model's policies and predictors, and writes it.

    Args:
        checkpoint: its folder or file.
        predictor: name of the predictor, or the file of a trained one, which is not restored.
        writes: whether this process writes.
    """

    def __init__(
        self,
        signature: ModelSignature,
        checkpoint: Path,
        predictor: str | Path,
        *,
        writes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signature = signature
        self._checkpoint = checkpoint
        self._writes = writes
        self._predictor = predictor
        self._clock = clock
        self._written_s = clock()
        self._has_step = self._has_ended = False
        self._running: set[int] = set()
        self._learners: dict[Path, Learner] = {}

    def keep(self, *watchers: object) -> list[str]:
        """Restores watchers that learn from requests, and writes them later; of equal names only
        the first. Returns names of those that begin empty."""
        from moe_runtime.lab.traces.learned import learned_path, restore_learned

        empty = []
        for watcher in watchers:
            if not isinstance(watcher, Learner):
                continue
            if watcher.name in PREDICTORS and is_file_name(self._predictor):
                continue
            path = learned_path(watcher.name, self._signature, self._checkpoint)
            if not restore_learned(watcher, self._signature, path):
                empty.append(watcher.name)
            self._learners.setdefault(path, watcher)
        return empty

    def begin(self, step: Step) -> None:
        self._running.update(step.begun)
        self._running.difference_update(step.ended)
        self._has_ended = self._has_ended or bool(step.ended)

    def end(self) -> None:
        """Writes if a request ended and the last write is long ago."""
        self._has_step = True
        if self._has_ended and self._clock() - self._written_s >= WRITE_EVERY_S:
            self._write()

    def close(self) -> None:
        """Ends running requests, and writes."""
        for learner in self._learners.values():
            for request in self._running:
                learner.finish(request)
        self._write()

    def _write(self) -> None:
        from moe_runtime.lab.traces.learned import keep_learned

        self._written_s, self._has_ended = self._clock(), False
        if self._has_step and self._writes:
            for path, learner in self._learners.items():
                keep_learned(learner, self._signature, path)


class RoutingRecord(Listener):
    """Records a model's routing, in a trace and for the policy choice of later runs."""

    def __init__(
        self, recorders: Sequence[Recorder], signature: ModelSignature, listeners: Listeners
    ) -> None:
        self.recorders = list(recorders)
        listeners.add(self)
        self._num_experts = signature.num_experts
        self._open: list[Recorder] = []
        self._has_step = False
        self._latest = 0  # recorders number requests from the first that began last

    def begin(self, step: Step) -> None:
        """Listens to layers only if a recorder wants the step."""
        if step.begun:
            self._latest = step.begun[0]
            for recorder in self.recorders:
                recorder.begin_request(num_sequences=len(step.begun))
        self._open = [recorder for recorder in self.recorders if recorder.wants_step()]
        self.wants_routing = bool(self._open)
        for recorder in self._open:
            recorder.begin_step(
                phase=step.phase,
                token_ids=step.token_ids,
                positions=step.positions,
                sequences=step.requests - self._latest,
            )

    def end(self) -> None:
        self._has_step = True

    def routed(self, routing: LayerRouting) -> None:
        ids_TK = routing.ids_TK.cpu().numpy()
        ids_TK = np.where(ids_TK < self._num_experts, ids_TK, -1)
        for recorder in self._open:
            recorder.routing(routing.layer, ids_TK, routing.weights_TK.float().cpu().numpy())

    def hold(self) -> None:
        """Locks the trace. Raises CheckpointError: another process writes it."""
        for recorder in self.recorders:
            recorder.hold()

    def close(self) -> None:
        """Writes the rest. A model that failed in its first step leaves old files unchanged. Raises
        CheckpointError: the trace cannot be written."""
        with contextlib.ExitStack() as stack:
            for recorder in self.recorders:
                stack.callback(recorder.close if self._has_step else recorder.discard)


def check_records(
    trace: str | os.PathLike[str] | None,
    timeline: str | os.PathLike[str] | None,
    inputs: Sequence[str | os.PathLike[str] | None],
) -> None:
    """Raises ValueError: a trace or timeline would replace an input or the other one, or has no
    valid file name."""
    for output, what in ((trace, "trace"), (timeline, "timeline")):
        if output is not None:
            require_file_name(output, what)
    require_not_read(trace, "trace", inputs)
    require_not_read(timeline, "timeline", inputs)
    if trace is not None and timeline is not None:
        require_apart(trace, timeline, ("trace", "timeline"))


def open_record(
    listeners: Listeners,
    signature: ModelSignature,
    checkpoint: Path,
    trace: str | Path | None,
    *,
    expert_bytes: int,
    keeps_recent: bool,
    teaches: bool,
) -> RoutingRecord:
    """Records a model's forward passes: into a trace, and for policy choice and teaching of later
    runs. Raises CheckpointError: the trace cannot be written."""
    recorders: list[Recorder] = []
    if trace is not None:
        from moe_runtime.lab.traces.recorder import TraceRecorder

        recorders.append(TraceRecorder(Path(trace), signature, expert_bytes=expert_bytes))
    if keeps_recent:
        from moe_runtime.lab.replay.teaching import start_teaching
        from moe_runtime.lab.traces.recent import RecentRouting

        on_kept = partial(start_teaching, checkpoint=checkpoint) if teaches else None
        recorders.append(RecentRouting(signature, checkpoint, on_kept=on_kept))
    return RoutingRecord(recorders, signature, listeners)
