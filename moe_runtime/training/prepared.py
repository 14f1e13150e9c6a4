"""What all runs share: settings, checkpoints, records, summary."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.checkpoints.opening import files_of
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import (
    check_output_folder,
    check_output_path,
    locked,
    make_folders,
    remove_abandoned,
    remove_or_warn,
    require_not_read,
)
from moe_runtime.training.checkpoint import (
    RunProgress,
    check_settings,
    checkpoints_in,
    load_checkpoint,
    step_of,
)
from moe_runtime.training.config_tree import leaves
from moe_runtime.training.data import Batches, TokenStreams
from moe_runtime.training.metrics import METRICS_FILE, JsonLines, MetricsSink, TensorBoard
from moe_runtime.training.run_config import LoopConfig, ParallelConfig
from moe_runtime.training.sharded import read_progress

SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
DATA = "data"
TOKENIZER = "tokenizer"
EXPERTS = "experts"
LOCK_FILE = "run.lock"

# What may change when a run goes on: it decides where and how fast, not which numbers come out.
_FREE_NAMES = (
    *("output", "device", "threads", "recompute", "compile", "log_every", "evaluate_every"),
    *("host_memory", "device_memory", "evaluate_tokens", "checkpoint_every", "keep_checkpoints"),
    *("snapshot_every", "lost_stage"),
    *("tensorboard", "export_dtype", "trace", "trace_steps", "patience"),
)
_FREE = frozenset(
    {
        *(f"run.{name}" for name in _FREE_NAMES),
        *("model.moe.impl", "model.moe.recompute", "merge"),
        *(f"parallel.{field.name}" for field in dataclasses.fields(ParallelConfig)),
    }
)
BASE_FILES = "the model's files"
"""A setting of fine-tuning: what the checkpoint holds that is fine-tuned."""
FIRST_ADAPTERS = "the files of lora.start"
"""The same of the adapters that it began with, where they still are."""
# What only the steps to come depend on: a resumed run may change it if asked to.
_SCHEDULE = frozenset(
    {
        *("run.steps", "data.short_context", "data.short_share"),
        *(f"optimizer.{name}" for name in ("peak_rate", "warmup_steps", "final_share", "course")),
    }
)


COURSE = "half a cosine to behind the last step"
"""What a resumed run must have begun with, as its other settings."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """What every run has before its first step, whatever it trains.

    Attributes:
        storage: folder of offloaded experts.
        held_out: windows of held-out text as of `Batches.draw`, by source; sources without any are
            left out.
        device: where everything but offloaded experts lies, and what computes.
        num_parameters, num_active_parameters: of the model, offloaded experts included.
    """

    config: LoopConfig
    output: Path
    storage: Path
    streams: Mapping[str, TokenStreams]
    batches: Batches
    held_out: Mapping[str, npt.NDArray[np.int64]]
    device: torch.device
    num_parameters: int
    num_active_parameters: int

    @property
    def checkpoints(self) -> Path:
        return self.output / CHECKPOINTS

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when the run resumes, by dotted name."""
        config: Any = self.config
        flat = dict(leaves(dataclasses.asdict(config), ""))
        kept = {name: value for name, value in flat.items() if name not in _FREE}
        kept["optimizer.course"] = COURSE
        if (wire := flat.get("parallel.wire", "exact")) != "exact":
            kept["parallel.wire"] = wire  # the one key of [parallel] that changes numbers
        for name, stream in self.streams.items():
            kept[f"text of source {name!r}"] = stream.fingerprint
        return kept

    @property
    def mixture(self) -> dict[str, float]:
        """Share of each source, as the batches have it: by weight, else by size."""
        sources = self.config.data.sources
        return {
            name: sources[name].weight or float(len(stream.training))
            for name, stream in self.streams.items()
        }

    def find_state(
        self, *, resume: bool, reschedule: bool = False, snapshot: Path | None = None
    ) -> tuple[Path, RunProgress] | None:
        """The newest checkpoint of a run and its content; None for a new run.

        Args:
            snapshot: in memory; used if it is newer.
        """
        found = [*checkpoints_in(self.checkpoints), *filter(None, [snapshot])]
        if not found:
            return None
        last = max(found, key=lambda path: (step_of(path) or 0, path != snapshot))
        if not resume:
            raise CheckpointError(
                f"{self.output}: holds a run already (the last checkpoint is "
                f"{last.name}); --resume goes on with it, another output folder begins anew"
            )
        state = read_progress(last) if last.is_dir() else load_checkpoint(last)
        saved, current = dict(state.settings), dict(self.settings)
        for name in (BASE_FILES, FIRST_ADAPTERS):
            if not (name in saved and name in current):  # of an older version, or gone since
                saved.pop(name, None)
                current.pop(name, None)
        check_settings(last, saved, current, schedule=_SCHEDULE, reschedule=reschedule)
        steps, data = self.config.run.steps, self.config.data
        expected = (state.step * data.tokens_per_step, state.step * data.sequences_per_step)
        if (state.tokens, sum(state.taken)) != expected:
            raise CheckpointError(
                f"{last}: is damaged: expected {expected[0]} tokens in {expected[1]} windows after "
                f"{state.step} steps, found {state.tokens} in {sum(state.taken)}"
            )
        if state.step > steps:
            raise CheckpointError(
                f"{last}: has taken {state.step} steps already, run.steps asks for {steps}; "
                f"set at least {state.step}"
            )
        return last, state

    def open_sinks(self, found: tuple[Path, RunProgress] | None) -> list[MetricsSink]:
        """Files of records, that continue after the checkpoint that `find_state` found."""
        sinks: list[MetricsSink] = []
        first_step, records = (0, "") if found is None else (found[1].step, found[1].records)
        if self.config.run.tensorboard:
            sinks.append(TensorBoard(self.output / "tensorboard", first_step=first_step))
        sinks.append(JsonLines(self.output, first_step=first_step, digest_then=records))
        return sinks


def check_inputs_stay(
    output: Path, trace: Path | None, texts: Iterable[Path], model: Path | None = None
) -> None:
    """Refuses outputs that would replace what a run reads, or lie among it.

    Args:
        model: the folder of the checkpoint that is trained further, or its GGUF file.
    """
    files = list(texts)
    if model is not None and model.is_file():
        files.append(model)
    require_not_read(trace, "trace", [*files, *(files_of(model) if model else ())])
    place = _end_of(output)
    read = {_end_of(file).parent for file in files} & {place}
    if model is not None and place.is_relative_to(_end_of(model)):
        read.add(model)
    for folder in read:
        raise ValueError(
            f"{output}: the run's files would lie among those of {folder}, which it reads; "
            "name another output folder"
        )


def check_outputs(output: Path, trace: Path | None) -> None:
    """Refuses places where nothing could be written, and removes what killed runs left half
    there."""
    for folder in (output, output / CHECKPOINTS, output / DATA):
        remove_abandoned(folder)
        check_output_folder(folder, "run's output")
    if output.is_dir():
        check_output_path(output / SUMMARY_FILE, "run's output")
    if trace is None:
        return
    run, place = _end_of(output), _end_of(trace)
    if run.is_relative_to(place):
        raise CheckpointError(f"{trace}: is the run's folder, expected the name of a trace file")
    # The run's folder is there when its trace is begun; no other one is made for it.
    if run.is_dir() or place.parent != run:
        check_output_path(trace, "trace")


def _end_of(path: Path) -> Path:
    """Where a name leads to; `Path.resolve` would raise for links that lead in a circle."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def run_folder(output: Path, storage: Path | None = None, *, is_used: bool) -> Iterator[None]:
    """Locks the folders of a run, until the block or the process ends.

    A new folder is removed if the run fails before its first step. After it, what the run wrote
    stays, but for the experts' states, which no checkpoint names.

    Args:
        output: the run's folder, which is made. An existing one is not removed.
        storage: that of its experts' states, where it is another one.
        is_used: False where nothing is written, or another process of the run uses the folder.
    """
    if not is_used:
        yield
        return
    missing = [_end_of(output)]
    while not os.path.lexists(missing[-1]):
        missing.append(missing[-1].parent)
    made = missing[:-1]
    check_output_folder(output, "run's output")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _remove_unbegun(made))
        make_folders(output)
        with contextlib.ExitStack() as lock:
            for folder in {os.path.realpath(one): one for one in (output, storage) if one}.values():
                if not folder.is_dir():
                    continue  # what is no folder is refused where it is used
                try:
                    lock.enter_context(locked(folder / LOCK_FILE))
                except BlockingIOError:
                    if folder == output:
                        made.clear()  # it is the other run's
                    raise CheckpointError(
                        f"{folder}: another train or finetune uses this folder; wait until it has "
                        "ended, or name another one"
                    ) from None
            try:
                yield
            except OSError:
                _tell_of_last(output)
                raise
        stack.pop_all()


def _tell_of_last(output: Path) -> None:
    last = checkpoints_in(output / CHECKPOINTS)[-1:]
    way_on = f"{output}: no checkpoint is whole; free space, and give the same command again"
    if last:
        way_on = (
            f"{last[0]}: is kept; free space, and the same command with --resume goes on from it"
        )
    warnings.warn(way_on, MoERuntimeWarning, stacklevel=2)


def _remove_unbegun(made: list[Path]) -> None:
    if not made or checkpoints_in(made[0] / CHECKPOINTS):
        return
    metrics = made[0] / METRICS_FILE
    has_begun = metrics.is_file() and metrics.stat().st_size > 0
    for name in (EXPERTS,) if has_begun else (DATA, TOKENIZER, EXPERTS):
        remove_or_warn(made[0] / name, "no checkpoint goes on with it")
    # What is left is no harm, and an error has been reported already.
    with contextlib.suppress(OSError):
        if not has_begun:
            metrics.unlink(missing_ok=True)
        for folder in (made[0] / CHECKPOINTS, *made):
            if folder.is_dir():
                folder.rmdir()
