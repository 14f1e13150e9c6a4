"""Records where a model's gates send its tokens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.files import require_apart, require_file_name, require_not_read
from moe_runtime.inference.steps import LayerRouting, Listener, Listeners, Step
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.lab.traces.recent import RecentRouting
    from moe_runtime.lab.traces.recorder import TraceRecorder

    Recorder = TraceRecorder | RecentRouting


class RoutingRecord(Listener):
    """Records a model's routing: in a trace, for choices of later runs, or both."""

    def __init__(
        self, recorders: Sequence[Recorder], signature: ModelSignature, listeners: Listeners
    ) -> None:
        self.recorders = list(recorders)
        listeners.add(self)
        self._num_experts = signature.num_experts
        self._open: list[Recorder] = []
        self._has_step = False
        self._latest = 0  # first request of those that began last: recorders count from there

    def begin(self, step: Step) -> None:
        """Listens to the layers of the pass only if a recorder wants it."""
        if step.begun:
            self._latest = step.begun[0]
            for recorder in self.recorders:
                recorder.begin_request(num_sequences=len(step.begun))
        self._open = [recorder for recorder in self.recorders if recorder.wants_step()]
        self.hears_routing = bool(self._open)
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
        """Begins the trace; CheckpointError where another process has begun it."""
        for recorder in self.recorders:
            recorder.hold()

    def close(self) -> None:
        """Writes what is not written yet; CheckpointError where the trace cannot be written.

        A model that failed before the end of its first step leaves everything as it was.
        """
        with contextlib.ExitStack() as stack:
            for recorder in self.recorders:
                stack.callback(recorder.close if self._has_step else recorder.discard)


def check_records(
    trace: str | os.PathLike[str] | None,
    timeline: str | os.PathLike[str] | None,
    inputs: Sequence[str | os.PathLike[str] | None],
) -> None:
    """Refuses a trace or timeline that would replace a file which is read, or the other one.

    Raises:
        ValueError: one would, or has a name that no file has.
    """
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
) -> RoutingRecord:
    """Records a model's forward passes from now on, into a trace and for choices of later runs.

    Raises:
        CheckpointError: the trace cannot be written there.
    """
    recorders: list[Recorder] = []
    if trace is not None:
        from moe_runtime.lab.traces.recorder import TraceRecorder

        recorders.append(TraceRecorder(Path(trace), signature, expert_bytes=expert_bytes))
    if keeps_recent:
        from moe_runtime.lab.traces.recent import RecentRouting

        recorders.append(RecentRouting(signature, checkpoint))
    return RoutingRecord(recorders, signature, listeners)
