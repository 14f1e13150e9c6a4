"""The common part of all runs: settings, checkpoints, records, summary."""

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
from moe_runtime.training.run_config import LoopConfig, ParallelConfig, ResearchConfig
from moe_runtime.training.sharded import read_progress

SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
DATA = "data"
TOKENIZER = "tokenizer"
EXPERTS = "experts"
LOCK_FILE = "run.lock"

# settings that may change when a run resumes: they change places and speed, not the results
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
"""A setting of fine-tuning: the content of the base checkpoint."""
FIRST_ADAPTERS = "the files of lora.start"
"""The content of the first adapters, if their files still exist."""
# settings that only affect further steps: --reschedule changes them
_SCHEDULE = frozenset(
    {
        *("run.steps", "data.short_context", "data.short_share"),
        *(f"optimizer.{name}" for name in ("peak_rate", "warmup_steps", "final_share", "course")),
    }
)


_TEXT = "text of source "
"""Begins the settings of sources, which are in the order of the configuration."""
COURSE = "half a cosine to behind the last step"
"""A setting that a resumed run shares with its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run before its first step.

    Attributes:
        storage: folder of offloaded experts.
        held_out: windows of held-out text, shaped as by `Batches.draw`, by source; sources without
            any are left out.
        device: computes, and has everything but offloaded experts.
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
        """Values that must be equal when the run resumes, by dotted name."""
        config: Any = self.config
        flat = dict(leaves(dataclasses.asdict(config), ""))
        kept = {name: value for name, value in flat.items() if name not in _FREE}
        kept["optimizer.course"] = COURSE
        if (wire := flat.get("parallel.wire", "exact")) != "exact":
            kept["parallel.wire"] = wire  # the one key of [parallel] that changes numbers
        # checkpoints from before these keys have none of them
        plain = dict(leaves(dataclasses.asdict(ResearchConfig()), "research.")).items()
        kept = {name: value for name, value in kept.items() if (name, value) not in plain}
        for name, stream in self.streams.items():
            kept[f"{_TEXT}{name!r}"] = stream.fingerprint
        return kept

    @property
    def mixture(self) -> dict[str, float]:
        """Share of each source in the batches: by weight, otherwise by size."""
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
            if not (name in saved and name in current):  # of an older version, or deleted
                saved.pop(name, None)
                current.pop(name, None)
        check_settings(last, saved, current, schedule=_SCHEDULE, reschedule=reschedule)
        before, now = ([n.removeprefix(_TEXT) for n in s if _TEXT in n] for s in (saved, current))
        if before != now:  # positions and seeds of sources are by their places
            raise CheckpointError(
                f"{last}: was made with data.sources in the order {', '.join(before)}, now it is "
                f"{', '.join(now)}; restore it, or choose another output folder"
            )
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
    """Refuses outputs that would replace a run's inputs, or lie among them.

    Args:
        model: the folder or GGUF file of the checkpoint that the run begins with.
    """
    files = list(texts)
    if model is not None and model.is_file():
        files.append(model)
    require_not_read(trace, "trace", [*files, *(files_of(model) if model else ())])
    place = _real_path(output)
    read = {_real_path(file).parent for file in files} & {place}
    if model is not None and place.is_relative_to(_real_path(model)):
        read.add(model)
    for folder in read:
        raise ValueError(
            f"{output}: the run's files would lie among those of {folder}, which it reads; "
            "name another output folder"
        )


def check_outputs(output: Path, trace: Path | None) -> None:
    """Refuses places that cannot be written, and removes partial files of killed runs."""
    for folder in (output, output / CHECKPOINTS, output / DATA):
        remove_abandoned(folder)
        check_output_folder(folder, "run's output")
    if output.is_dir():
        check_output_path(output / SUMMARY_FILE, "run's output")
    if trace is None:
        return
    run, place = _real_path(output), _real_path(trace)
    if run.is_relative_to(place):
        raise CheckpointError(f"{trace}: is the run's folder, expected the name of a trace file")
    # the run makes its own folder before it opens the trace, but no other
    if run.is_dir() or place.parent != run:
        check_output_path(trace, "trace")


def _real_path(path: Path) -> Path:
    """The target of a path; unlike `Path.resolve`, it does not raise for circular links."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def run_folder(output: Path, storage: Path | None = None, *, is_used: bool) -> Iterator[None]:
    """Locks the folders of a run, until the block or the process ends.

    If the run fails before its first step, a new folder is removed. If it fails before its first
    checkpoint, its files stay, except the experts' states, which no checkpoint names.

    Args:
        output: the run's folder, which is made. An existing one is not removed.
        storage: folder of its experts' states, if it is another one.
        is_used: False if nothing is written, or another process of the run uses the folder.
    """
    if not is_used:
        yield
        return
    missing = [_real_path(output)]
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
                    continue  # it is refused later
                try:
                    lock.enter_context(locked(folder / LOCK_FILE))
                except BlockingIOError:
                    if folder == output:
                        made.clear()  # the folder belongs to the other run
                    raise CheckpointError(
                        f"{folder}: another train or finetune uses this folder; wait until it has "
                        "ended, or name another one"
                    ) from None
            try:
                yield
            except OSError:
                last = checkpoints_in(output / CHECKPOINTS)[-1:]
                way_on = (
                    f"{last[0]}: is kept; free space, and the same command with --resume goes on "
                    "from it"
                    if last
                    else f"{output}: no checkpoint is whole; free space, and give the same command "
                    "again"
                )
                warnings.warn(way_on, MoERuntimeWarning, stacklevel=2)
                raise
        stack.pop_all()


def _remove_unbegun(made: list[Path]) -> None:
    if not made or checkpoints_in(made[0] / CHECKPOINTS):
        return
    metrics = made[0] / METRICS_FILE
    has_begun = metrics.is_file() and metrics.stat().st_size > 0
    for name in (EXPERTS,) if has_begun else (DATA, TOKENIZER, EXPERTS):
        remove_or_warn(made[0] / name, "no checkpoint goes on with it")
    # an error has been reported already, and files that stay do no harm
    with contextlib.suppress(OSError):
        if not has_begun:
            metrics.unlink(missing_ok=True)
        for folder in (made[0] / CHECKPOINTS, *made):
            if folder.is_dir():
                folder.rmdir()
