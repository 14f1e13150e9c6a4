"""Connects a model's forward passes to a trace recorder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.inference import options
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.steps import RequestNumbers
from moe_runtime.places import require_apart
from moe_runtime.reading import require_not_read
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.lab.traces.recent import RecentRouting
    from moe_runtime.lab.traces.recorder import TraceRecorder

    Recorder = TraceRecorder | RecentRouting


class RoutingRecord:
    """Everything that records a model's routing: a trace, what later runs choose by, or both.

    Args:
        recorders: who is told of every step.
        signature: of the model; ids from its number of experts on are choices of no expert.
    """

    def __init__(self, recorders: Sequence[Recorder], signature: ModelSignature) -> None:
        self.recorders = list(recorders)
        self._num_experts = signature.num_experts
        self._last_layer = signature.num_layers - 1
        self._open = self.recorders
        self._has_step = False
        self._requests = RequestNumbers()
        self._latest = 0  # first request of those that began last: recorders count from there

    @property
    def is_done(self) -> bool:
        """Whether nobody records any more."""
        return not self._open

    def begin_step(self, step: Step) -> None:
        """A forward pass begins; those who have recorded enough hear of no more."""
        self._open = [recorder for recorder in self._open if not recorder.is_done]
        first_request, _ = self._requests.begin(step)
        if step.is_new:
            self._latest = first_request
        for recorder in self._open:
            if step.is_new:
                recorder.begin_request(num_sequences=step.num_sequences)
            recorder.begin_step(
                phase=step.phase,
                token_ids=step.token_ids,
                positions=step.positions,
                sequences=step.sequences + (first_request - self._latest),
            )

    def routing(self, layer: int, expert_ids: np.ndarray, weights: npt.ArrayLike) -> None:
        """A layer sent the tokens of the step to experts."""
        expert_ids = np.where(expert_ids < self._num_experts, expert_ids, -1)
        for recorder in self._open:
            recorder.routing(layer, expert_ids, weights)
        self._has_step = self._has_step or layer == self._last_layer

    def hold(self) -> None:
        """Begins the trace, if one is wanted, so that no other process can.

        Raises:
            CheckpointError: another process has begun it.
        """
        for recorder in self.recorders:
            recorder.hold()

    def close(self) -> None:
        """Writes what is not written yet, each of them even if another one cannot.

        A model that failed before the end of its first step leaves everything as it was.

        Raises:
            CheckpointError: the trace cannot be written.
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

    Args:
        trace: the file of a trace, if one is wanted.
        timeline: that of a timeline.
        inputs: files that are read.

    Raises:
        ValueError: one would.
    """
    require_not_read(trace, "trace", inputs)
    require_not_read(timeline, "timeline", inputs)
    if trace is not None and timeline is not None:
        require_apart(trace, timeline, ("trace", "timeline"))


def open_record(
    model: torch.nn.Module,
    modules: Sequence[OffloadedExperts],
    signature: ModelSignature,
    trace: str | Path | None,
    *,
    keeps_recent: bool,
) -> RoutingRecord | None:
    """Records a model's forward passes from now on, into a trace and for the choices of later runs.

    Args:
        model: the model.
        modules: its experts.
        signature: what it is.
        trace: the file of a trace, if one is wanted.
        keeps_recent: whether the first decode steps are kept in the user's cache.

    Raises:
        CheckpointError: the trace cannot be written there.
    """
    recorders: list[Recorder] = []
    if trace is not None:
        recorders.append(options.TraceRecorder(Path(trace), signature))
    if keeps_recent:
        recorders.append(options.RecentRouting(signature))
    if not recorders:
        return None
    record = RoutingRecord(recorders, signature)

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if record.is_done:
            for module in modules:
                module.recorder = None
            return
        record.begin_step(read_step(args, kwargs))

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    for module in modules:
        module.recorder = record
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tokens of one forward pass, T in all, sequence by sequence.

    Attributes:
        phase: ``"prefill"`` or ``"decode"``.
        is_new: whether a new batch of prompts begins.
        num_sequences: sequences of the batch.
        token_ids: ``[T]``, -1 where the model is fed embeddings.
        positions: ``[T]`` positions in the sequences.
        sequences: ``[T]`` number of the sequence in the batch.
    """

    phase: str
    is_new: bool
    num_sequences: int
    token_ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray


def read_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """Reads what a causal language model's ``forward`` was called with."""
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    shape = kwargs["inputs_embeds"].shape[:2] if input_ids is None else input_ids.shape
    cache = kwargs.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    positions = kwargs.get("position_ids")
    if positions is None or positions.shape != shape:
        positions = torch.arange(past, past + shape[1]).expand(shape)
    tokens = np.full(shape, -1) if input_ids is None else input_ids.cpu().numpy()
    return Step(
        phase="decode" if past and shape[1] == 1 else "prefill",
        is_new=past == 0,
        num_sequences=shape[0],
        token_ids=tokens.reshape(-1),
        positions=positions.cpu().numpy().reshape(-1),
        sequences=np.repeat(np.arange(shape[0]), shape[1]),
    )
