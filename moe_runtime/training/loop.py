"""The training loop: batches in, steps, records and checkpoints out."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.files import make_folders, write_text
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.models.lm.model import Losses
from moe_runtime.training.checkpoint import (
    RunProgress,
    TrainingState,
    named_checkpoint,
    random_states,
    require_like,
    restore_random_states,
    save_checkpoint,
)
from moe_runtime.training.data import shorten
from moe_runtime.training.examples import TRAINED, trimmed
from moe_runtime.training.metrics import (
    EvaluationRecord,
    JsonLines,
    MetricsSink,
    Record,
    StepRecord,
    read_metrics,
)
from moe_runtime.training.optimizer import StepOptimizer
from moe_runtime.training.prepared import SUMMARY_FILE, PreparedRun
from moe_runtime.training.ranks import OneRank, autocast_of
from moe_runtime.training.run_config import OptimizerConfig
from moe_runtime.training.sharded import ShardedCheckpoints
from moe_runtime.training.snapshots import Snapshots
from moe_runtime.training.tracing import TrainingTrace


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of one step (the first is 0).

    It rises linearly to the peak at the last of `warmup_steps`. Then it falls along half a cosine
    to `final_share` of the peak after the last step, so no step has a rate of 0. Source: Loshchilov
    and Hutter, "SGDR" (2017), without restarts.
    """
    if step < config.warmup_steps:
        return config.peak_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.peak_rate * (config.final_share + (1 - config.final_share) * cosine)


MOST_SKIPPED = 10
LOWER = "lower optimizer.peak_rate or raise optimizer.warmup_steps"


class SkippedSteps:
    """Skipped steps, whose gradients were not finite; `in_a_row` since the last step taken."""

    def __init__(self) -> None:
        self.total = self.in_a_row = 0

    def count(
        self, bad_parameters: tuple[str, ...], *, step: int, first: int, last: int, has_loss: bool
    ) -> None:
        """Counts one step, which was skipped if there are `bad_parameters`.

        Raises:
            ValueError: too many steps were skipped, or all of a short run.
        """
        if not bad_parameters:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if not has_loss and self.total > step - first:
            raise ValueError(
                f"the loss of step {step} is not a number, and no weight was changed before it: "
                "the first weights are damaged; `moe-runtime inspect MODEL --verify` names the "
                "damaged weights of a model, and an earlier checkpoint of a run may be sound"
            )
        if not has_loss and step == last:
            raise ValueError(f"the loss of the last step, {last}, is not a number; {LOWER}")
        # a resumed run has taken steps before its last steps overflow
        most = min(MOST_SKIPPED, last) if first == 1 else MOST_SKIPPED
        if self.in_a_row >= most:
            raise ValueError(
                f"the gradients of {most} steps in a row were not finite (the last in "
                f"{bad_parameters[0]} and {len(bad_parameters) - 1} others); {LOWER}"
            )


class TrainableModel(Protocol):
    """A model for the loop; `LanguageModel` is one."""

    def losses(self, ids_BC: Tensor, targets_BC: Tensor, /) -> Losses: ...

    def after_step(self, *, skipped: bool = False) -> None: ...

    def train(self) -> object: ...

    def eval(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Trainer:
    """Takes the steps of a run.

    Args:
        ranks: the processes that train together; one process when omitted.
        shards: checkpoints that all processes write together; None writes a file.
        trace: records the gates' choices.
        snapshots: of every few steps in memory; None takes none.

    Attributes:
        origin: checkpoint or snapshot that the run resumed from; None for a new run.
    """

    def __init__(
        self,
        run: PreparedRun,
        model: TrainableModel,
        optimizer: StepOptimizer,
        *,
        sinks: Sequence[MetricsSink] = (),
        ranks: OneRank | None = None,
        shards: ShardedCheckpoints | None = None,
        trace: TrainingTrace | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._run, self._config, self._model = run, run.config, model
        self._settings = dict(run.settings)
        self.optimizer, self.sinks, self.trace = optimizer, sinks, trace
        self._ranks, self._shards = ranks or OneRank(), shards
        self.step = self.tokens = 0
        self.elapsed_s = 0.0
        self.skipped = SkippedSteps()
        self._first_step = 1
        self._saved_step = -1
        self.origin: Path | None = None

    def resume(
        self,
        last: Path,
        state: RunProgress,
        shards: ShardedCheckpoints | None = None,
        *,
        take: Callable[[], None] | None = None,
    ) -> None:
        """Resumes from the last checkpoint of a run; closes the sinks if it does not fit.

        Args:
            shards: reads this process's parts of a checkpoint of any number of processes.
            take: loads the weights and moments of a checkpoint of another form.
        """
        is_saved = last.parent == self._run.checkpoints  # a snapshot is not on the disk
        with contextlib.ExitStack() as refused, named_checkpoint(last):
            for sink in self.sinks:
                refused.callback(sink.close)
            if take is not None:
                take()
            elif isinstance(state, TrainingState) and (self._ranks.size == 1 or shards is None):
                self._restore(state)
            else:
                assert shards is not None, "several processes and their parts have shards"
                if isinstance(state, TrainingState):
                    shards.take(state)
                else:
                    known = None if is_saved else self._snapshots
                    shards.load(last, None if known is None else known.lost)
            self._settings = {**state.settings, **self._settings}
            self._run.batches.seek(state.taken)
            restore_random_states(state.random)
            self.step, self.tokens, self.elapsed_s = state.step, state.tokens, state.elapsed_s
            self._first_step = state.step + 1
            self._saved_step = state.step if is_saved else -1
            self.origin = last
            refused.pop_all()

    def _restore(self, state: TrainingState) -> None:
        model = self._model
        named = model.state_dict().items()
        own = {name: value for name, value in named if not isinstance(value, TrainedElsewhere)}
        require_like(state.model, own, "the checkpoint does not fit the model: it")
        model.load_state_dict(dict(state.model))
        self.optimizer.load_state_dict(dict(state.optimizer))

    def train(
        self, *, should_stop: Callable[[], bool], on_record: Callable[[Record], None]
    ) -> bool:
        """Takes steps until the run is complete or stopped, and saves a checkpoint of the last.

        Returns:
            Whether the run is complete, also by `patience`.

        Raises:
            ValueError: the run diverged: scores or the final loss are not finite, or the gradients
                of ten steps in a row.
            OSError: a checkpoint or a record cannot be written.
        """
        run = self._config.run
        measured = self._measured_before()
        stalled = self._has_stalled(measured)
        while self.step < run.steps and not stalled:
            self._emit(self._take_step(), on_record)
            is_last = self.step == run.steps
            if is_last or _is_due(self.step, run.evaluate_every):
                measured += self._evaluate(on_record)
                stalled = self._has_stalled(measured)
            # skipped steps change nothing, and would replace earlier checkpoints
            if is_last or (_is_due(self.step, run.checkpoint_every) and not self.skipped.in_a_row):
                self.save()
            if _is_due(self.step, run.snapshot_every) and self._snapshots is not None:
                self._snapshots.save(self._progress())
            saves = (self.optimizer if self._shards is None else self._shards).saves
            if self._ranks.any(should_stop() or saves.has_failed):
                break  # and the failure is raised below
        self.save()
        self.optimizer.wait()
        if self._shards is not None:
            self._shards.saves.wait()
        if self._snapshots is not None:
            self._snapshots.clear()
        return self.step >= run.steps or stalled

    def _measured_before(self) -> list[float]:
        """The mean held-out losses before the run was resumed, in rank 0, which decides."""
        if not self._config.run.patience or self._ranks.rank:
            return []
        records = read_metrics(self._run.output)
        return [record["held_out_mean"] for record in records if "held_out_mean" in record]

    def _has_stalled(self, measured: Sequence[float]) -> bool:
        """Whether the last `patience` measurements are no better than one before."""
        patience = self._config.run.patience
        if not patience:
            return False
        before, last = measured[:-patience], measured[-patience:]
        own = self._ranks.rank == 0 and bool(before) and min(last) >= min(before)
        return self._ranks.any(own)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)
            if self.trace is not None:
                stack.callback(self.trace.close)
            if self._shards is not None:
                stack.callback(self._shards.saves.close)
            stack.callback(self._ranks.close)
            self.optimizer.close()

    def save(self) -> None:
        """Writes a checkpoint, unless the last one is of this step."""
        if self._saved_step == self.step:
            return
        progress = self._progress()
        keep = self._config.run.keep_checkpoints
        if self._shards is not None:
            self._shards.save(self._run.checkpoints, progress, keep=keep)
        else:
            parts: dict[str, Any] = {
                "model": self._model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            if self.optimizer.keeps_newest_alone:
                keep = 1
            self.optimizer.write(
                TrainingState(**vars(progress), **parts),
                lambda copied: copied.optimizer,
                lambda copied: save_checkpoint(self._run.checkpoints, copied, keep=keep),
            )
        self._saved_step = self.step

    def _progress(self) -> RunProgress:
        return RunProgress(
            step=self.step,
            tokens=self.tokens,
            elapsed_s=self.elapsed_s,
            taken=self._run.batches.taken,
            random=random_states(),
            settings=dict(self._settings),
            records=next((s.digest for s in self.sinks if isinstance(s, JsonLines)), ""),
        )

    def _take_step(self) -> StepRecord:
        started = time.perf_counter()
        config, optimizer = self._config, self.optimizer
        rate = learning_rate(config.optimizer, self.step, config.run.steps)
        before = optimizer.transfers()
        self._model.train()
        self._ranks.draw_apart(config.run.seed, self.step)
        with self._ranks.watched(f"step {self.step + 1}"):
            losses = self._backward(rate)
            outcome = optimizer.step(rate)
        self._model.after_step(skipped=bool(outcome.bad_parameters))
        means = self._means(losses)
        self.step += 1
        self.skipped.count(
            outcome.bad_parameters,
            step=self.step,
            first=self._first_step,
            last=config.run.steps,
            has_loss=means["loss"] is not None,
        )
        if self.trace is not None:
            self.trace.finish_step(self.step)
        self.tokens += config.data.tokens_per_step
        step_s = time.perf_counter() - started
        self.elapsed_s += step_s
        return StepRecord(
            step=self.step,
            **means,
            rate=rate,
            gradient_norm=outcome.gradient_norm if math.isfinite(outcome.gradient_norm) else None,
            tokens=self.tokens,
            step_s=step_s,
            is_skipped=bool(outcome.bad_parameters),
            **{name: now - before[name] for name, now in optimizer.transfers().items()},
        )

    def _backward(self, rate: float) -> list[Losses]:
        micro_batches, weights = self._micro_batches()
        losses: list[Losses] = []
        # a caller's autocast would cache narrow copies of weights for later steps
        with without_autocast(self._run.device.type):
            if self._ranks.pipeline is not None:
                inputs = [windows.to(self._run.device) for windows in micro_batches]
                return self._ranks.pipeline.backward(inputs)
            parts = [
                partial(self._part, windows, weight, losses)
                for windows, weight in zip(micro_batches, weights, strict=True)
            ]
            self.optimizer.backward(parts, rate=rate)
        return losses

    def _means(self, losses: Sequence[Losses]) -> dict[str, float | None]:
        """A record's losses of the step, means over the parts of all processes."""
        named = {
            "loss": [part.cross_entropy for part in losses],
            "aux_loss": [part.auxiliary for part in losses],
            "max_load": [part.max_load for part in losses],
            "dropped_share": [part.dropped_share for part in losses],
        }
        known: dict[str, Tensor] = {}
        for name, values in named.items():
            there = [value.float() for value in values if value is not None]
            if there:
                known[name] = torch.stack(there).mean().cpu()
        means = self._ranks.mean(torch.stack(list(known.values())))
        found = [mean if math.isfinite(mean) else None for mean in means.tolist()]
        return dict.fromkeys(named) | dict(zip(known, found, strict=True))

    def _micro_batches(self) -> tuple[list[Tensor], list[float]]:
        """This process's share of the step's micro-batches, and weights of their losses."""
        data = self._config.data
        windows = self._run.batches.draw(data.sequences_per_step)
        context = data.context_at(self.step, self._config.run.steps)
        if context != data.context:
            windows = shorten(windows, context)
        parts = torch.from_numpy(windows).chunk(data.micro_batches)
        counts = [_num_targets(part) for part in parts]
        # every target of the step counts the same
        weights = [count * len(parts) / sum(counts) for count in counts]
        return self._ranks.part([trimmed(part) for part in parts]), self._ranks.part(weights)

    def _part(self, windows: Tensor, weight: float, found: list[Losses]) -> Tensor:
        """One part's share of the loss; appends its losses to `found`.

        Args:
            weight: the part's number of targets over the mean of the step's parts.
        """
        recorded = contextlib.nullcontext()
        if self.trace is not None:
            recorded = self.trace.micro_batch(windows[:, :-1])
        with recorded, self._autocast():
            losses = self._losses(windows)
        losses = replace(losses, cross_entropy=losses.cross_entropy * weight)
        found.append(losses.detach())
        num_parts = self._config.data.micro_batches // self._ranks.num_data_ranks
        return (losses.cross_entropy + losses.auxiliary) * self._ranks.loss_share / num_parts

    def _losses(self, windows: Tensor) -> Losses:
        windows = windows.to(self._run.device)
        return self._model.losses(windows[:, :-1], windows[:, 1:])

    def _autocast(self) -> torch.autocast:
        return autocast_of(self._config.run.precision, self._run.device.type)

    @torch.no_grad()
    def _evaluate(self, on_record: Callable[[Record], None]) -> list[float]:
        """Measures the held-out text, emits the record and returns the mean; none without text."""
        if not self._run.held_out:
            return []
        self._model.eval()
        nats: dict[str, float] = {}
        rows = self._config.data.windows_per_micro_batch
        for name, windows in self._run.held_out.items():
            with self._autocast(), self._ranks.watched(f"held-out text {name!r}"):
                nats[name] = self._held_out_loss(
                    [trimmed(part) for part in torch.from_numpy(windows).split(rows)]
                )
        weights = {name: self._run.mixture[name] for name in nats}
        mean = sum(weights[name] * nats[name] for name in nats) / sum(weights.values())
        if not math.isfinite(mean):
            raise ValueError(
                f"the loss of held-out text is not a number after step {self.step}; {LOWER}"
            )
        record = EvaluationRecord(step=self.step, held_out=nats, held_out_mean=mean)
        self._emit(record, on_record)
        return [mean]

    def _held_out_loss(self, parts: Sequence[Tensor]) -> float:
        """Mean loss of windows in parts, which the data-parallel ranks compute in turn."""
        ranks = self._ranks
        # passes are collective calls, so a rank without a part left repeats the last one
        numbers = range(ranks.data_rank, len(parts) + ranks.data_rank, ranks.num_data_ranks)
        own = [parts[min(number, len(parts) - 1)] for number in numbers]
        total = torch.zeros((), dtype=torch.float64)
        for number, part, loss in zip(numbers, own, self._measured(own), strict=True):
            total += float(loss) * _num_targets(part) if number < len(parts) else 0.0
        return float(ranks.mean(total)) * ranks.num_data_ranks / sum(map(_num_targets, parts))

    def _measured(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        pipeline = self._ranks.pipeline
        if pipeline is None:
            yield from (self._losses(part).cross_entropy for part in parts)
            return
        inputs = [part.to(self._run.device) for part in parts]
        at_once = self._config.data.micro_batches
        yield from (losses.cross_entropy for losses in pipeline.measure(inputs, at_once=at_once))

    def write_summary(self, folder: Path | None, *, adapters: Path | None = None) -> dict[str, Any]:
        """Writes and returns the results of a run.

        Args:
            folder: of the exported model, if any.
            adapters: folder of the exported adapters, if any.
        """
        import transformers

        records = read_metrics(self._run.output)
        losses = [record["loss"] for record in records if "loss" in record]
        held_out = [record for record in records if "held_out" in record]
        summary = {
            "steps": self.step,
            "tokens": self.tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "tokens_per_s": round(self.tokens / self.elapsed_s, 1) if self.elapsed_s else None,
            "skipped_steps": self.skipped.total,
            "loss": losses[-1] if losses else None,
            "held_out": held_out[-1]["held_out"] if held_out else {},
            "held_out_mean": held_out[-1]["held_out_mean"] if held_out else None,
            "parameters": self._run.num_parameters,
            "active_parameters": self._run.num_active_parameters,
            "offload": self.optimizer.report(),
            "trace": None if self.trace is None else str(self.trace.path),
            "output": str(self._run.output),
            "model": None if folder is None else str(folder),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        if adapters is not None:
            summary["adapters"] = str(adapters)
        make_folders(self._run.output)
        write_text(self._run.output / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
        return summary

    def _emit(self, record: Record, on_record: Callable[[Record], None]) -> None:
        for sink in self.sinks:
            sink.write(record)
        on_record(record)


def _num_targets(windows: Tensor) -> int:
    """Targets of windows of `Batches.draw`; for text, the number of windows."""
    return len(windows) if windows.ndim == 2 else int((windows[:, 1:, 2] == TRAINED).sum())


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
