"""The learning rate over the steps: linear warm-up, then a cosine.

Source: Loshchilov and Hutter, "SGDR" (2017), without restarts.

When a run has diverged: losses that are no numbers, and gradients that stay infinite.

The training loop: batches in, steps, records and checkpoints out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.models.lm.model import Losses
from moe_runtime.training.checkpoint import (
    Progress,
    TrainingState,
    random_states,
    require_like,
    restore_random_states,
    save_checkpoint,
)
from moe_runtime.training.data import Batches, DataPosition, shorten
from moe_runtime.training.metrics import (
    EvaluationRecord,
    JsonLines,
    MetricsSink,
    Record,
    StepRecord,
)
from moe_runtime.training.offload.dense_adamw import StepOptimizer
from moe_runtime.training.ranks import OneRank, autocast_of
from moe_runtime.training.run_config import LoopConfig, OptimizerConfig
from moe_runtime.training.sharded import ShardedCheckpoints
from moe_runtime.training.tracing import TrainingTrace

COURSE = "half a cosine to behind the last step"
"""What a run that goes on must have begun with, as its other settings."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of one step.

    Rises linearly over the first `warmup_steps` and reaches the peak at the last of them; then
    falls along half a cosine, from the peak in the first step after them to `final_share` of it
    where the run ends, behind its last step: no step is lost to an end of 0.

    Args:
        step: number of the step, the first is 0; from `num_steps` on the rate stays at its end.
    """
    if step < config.warmup_steps:
        return config.peak_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.peak_rate * (config.final_share + (1 - config.final_share) * cosine)


MOST_SKIPPED = 10
LOWER = "lower optimizer.peak_rate or raise optimizer.warmup_steps"


class SkippedSteps:
    """Steps that changed nothing, as their gradients were not finite.

    Attributes:
        in_a_row: since the last step that was taken.
    """

    def __init__(self) -> None:
        """None yet."""
        self.total = self.in_a_row = 0

    def count(
        self, bad_parameters: tuple[str, ...], *, step: int, first: int, last: int, has_loss: bool
    ) -> None:
        """Counts one step.

        Args:
            bad_parameters: those whose gradients were not finite; none where the step was taken.

        Raises:
            ValueError: the run cannot go on, or has come to nothing.
        """
        if not bad_parameters:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if not has_loss and self.total > step - first:
            raise ValueError(
                f"the loss of step {step} is no number, and no weight was changed before it: those "
                "that are begun with give none; `moe-runtime inspect MODEL --verify` names the "
                "ones of a model, and of a run an earlier checkpoint may be whole"
            )
        if not has_loss and step == last:
            raise ValueError(f"the loss of the last step, {last}, is no number; {LOWER}")
        # who goes on with a run whose last steps overflow has steps that were taken
        most = min(MOST_SKIPPED, last) if first == 1 else MOST_SKIPPED
        if self.in_a_row >= most:
            raise ValueError(
                f"the gradients of {most} steps in a row were not finite (the last in "
                f"{bad_parameters[0]} and {len(bad_parameters) - 1} others); {LOWER}"
            )


def require_number(loss: float, step: int) -> float:
    """The mean loss of held-out text.

    Raises:
        ValueError: it is no number.
    """
    if math.isfinite(loss):
        return loss
    raise ValueError(f"the loss of held-out text is no number after step {step}; {LOWER}")


class TrainableModel(Protocol):
    """What the loop asks of a model; `LanguageModel` is one."""

    def losses(self, ids_BC: Tensor, targets_BC: Tensor, /) -> Losses:
        """Losses of token ids `[B, C]` and the tokens after them."""
        ...

    def after_step(self, *, skipped: bool = False) -> None:
        """Called after every optimizer step, and after one that changed nothing as `skipped`."""
        ...

    def train(self) -> object:
        """Before training."""
        ...

    def eval(self) -> object:
        """Before measuring."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Takes up what `state_dict` gave."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What the loop works with.

    Attributes:
        held_out: windows `[N, C + 1]` of held-out text, by source; may be empty.
        held_out_weights: share of each source in the mean.
        settings: what a resumed run must agree in.
        shards: checkpoints that all processes write together; None writes a file.
        trace: where the gates send the tokens; None records nothing.
    """

    config: LoopConfig
    model: TrainableModel
    optimizer: StepOptimizer
    batches: Batches
    held_out: Mapping[str, npt.NDArray[np.int64]]
    held_out_weights: Mapping[str, float]
    device: torch.device
    checkpoints: Path
    settings: Mapping[str, Any]
    sinks: Sequence[MetricsSink] = field(default_factory=tuple)
    ranks: OneRank = field(default_factory=OneRank)
    shards: ShardedCheckpoints | None = None
    trace: TrainingTrace | None = None


class Trainer:
    """Takes the steps of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._config = run.config
        self.step = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        self.skipped = SkippedSteps()
        self._first_step = 1
        self._saved_step = -1

    @property
    def optimizer(self) -> StepOptimizer:
        """Of the run."""
        return self._run.optimizer

    @property
    def trace(self) -> TrainingTrace | None:
        """Of the run."""
        return self._run.trace

    def restore(self, state: TrainingState) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: it does not fit the model or the optimizer.
        """
        model = self._run.model
        named = model.state_dict().items()
        own = {name: value for name, value in named if not isinstance(value, TrainedElsewhere)}
        require_like(state.model, own, "the checkpoint does not fit the model: it")
        model.load_state_dict(dict(state.model))
        self._run.optimizer.load_state_dict(dict(state.optimizer))
        self.go_on(state)

    def go_on(self, state: Progress) -> None:
        """Takes up where a checkpoint left off, its weights apart."""
        self._run.batches.seek(DataPosition(tuple(state.taken)))
        restore_random_states(state.random)
        self._run.ranks.draw_apart(state.step)
        self.step, self.tokens, self.elapsed_s = state.step, state.tokens, state.elapsed_s
        self._saved_step, self._first_step = state.step, state.step + 1

    def train(
        self, *, should_stop: Callable[[], bool], on_record: Callable[[Record], None]
    ) -> bool:
        """Takes steps until the run is complete or somebody wants it to stop.

        Either way a checkpoint of the last step is left behind.

        Args:
            on_record: called with every record, after the sinks.

        Returns:
            Whether the run is complete.

        Raises:
            ValueError: the run diverged: scores or the loss at its end are no numbers, or the
                gradients of ten steps in a row are not.
            OSError: a checkpoint or a record cannot be written.
        """
        run = self._config.run
        while self.step < run.steps:
            self._emit(self._take_step(), on_record)
            is_last = self.step == run.steps
            if is_last or _is_due(self.step, run.evaluate_every):
                self._evaluate(on_record)
            # skipped steps change nothing, and would take the place of earlier checkpoints
            if is_last or (_is_due(self.step, run.checkpoint_every) and not self.skipped.in_a_row):
                self.save()
            if self._run.ranks.any(should_stop()):
                break
        self.save()
        self._run.optimizer.wait()
        return self.step >= run.steps

    def close(self) -> None:
        """Ends what runs beside the training; the model is of no use then, if it is offloaded.

        Raises:
            MoERuntimeError, OSError: a checkpoint, a record or the trace could not be written.
        """
        with contextlib.ExitStack() as stack:
            for sink in self._run.sinks:
                stack.callback(sink.close)
            if self._run.trace is not None:
                stack.callback(self._run.trace.close)
            self._run.optimizer.close()

    def report(self) -> dict[str, Any]:
        """As of `StepOptimizer`."""
        return self._run.optimizer.report()

    def save(self) -> None:
        """Writes a checkpoint, unless the last one is of this step."""
        if self._saved_step == self.step:
            return
        progress: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "taken": self._run.batches.position.taken,
            "random": random_states(),
            "settings": dict(self._run.settings),
            "records": next((s.digest for s in self._run.sinks if isinstance(s, JsonLines)), ""),
        }
        keep = self._config.run.keep_checkpoints
        if self._run.shards is not None:
            self._run.shards.save(self._run.checkpoints, Progress(**progress), keep=keep)
        else:
            self._save_file(progress, keep)
        self._saved_step = self.step

    def _save_file(self, progress: dict[str, Any], keep: int) -> None:
        """A checkpoint of this process alone."""
        state = TrainingState(
            **progress,
            model=self._run.model.state_dict(),
            optimizer=self._run.optimizer.state_dict(),
        )
        if self._run.optimizer.keeps_newest_alone:
            keep = 1
        self._run.optimizer.write(
            state,
            lambda copied: copied.optimizer,
            lambda copied: save_checkpoint(self._run.checkpoints, copied, keep=keep),
        )

    def _take_step(self) -> StepRecord:
        started = time.perf_counter()
        config, optimizer = self._config, self._run.optimizer
        rate = learning_rate(config.optimizer, self.step, config.run.steps)
        before = optimizer.transfers()
        self._run.model.train()
        with self._run.ranks.watched(f"step {self.step + 1}"):
            losses = self._backward(rate)
            outcome = optimizer.step(rate)
        self._run.model.after_step(skipped=bool(outcome.bad_parameters))
        means = self._means(losses)
        self.step += 1
        self.skipped.count(
            outcome.bad_parameters,
            step=self.step,
            first=self._first_step,
            last=config.run.steps,
            has_loss=means["loss"] is not None,
        )
        if self._run.trace is not None:
            self._run.trace.finish_step(self.step)
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
        """Adds up the gradients of the step; the losses of this process's micro-batches."""
        micro_batches = self._micro_batches()
        losses: list[Losses] = []
        # a caller's autocast would keep narrow copies of weights for the steps that follow
        with without_autocast(self._run.device.type):
            if self._run.ranks.pipeline is not None:
                inputs = [windows.to(self._run.device) for windows in micro_batches]
                return self._run.ranks.pipeline.backward(inputs)
            parts = [partial(self._part, windows, losses) for windows in micro_batches]
            self._run.optimizer.backward(parts, rate=rate)
        return losses

    def _means(self, losses: Sequence[Losses]) -> dict[str, float | None]:
        """What a record says of the step's losses, over the parts of all processes."""
        named = {
            "loss": [part.cross_entropy for part in losses],
            "aux_loss": [part.auxiliary for part in losses],
            "max_load": [part.max_load for part in losses],
            "dropped_share": [part.dropped_share for part in losses],
        }
        known: dict[str, list[Tensor]] = {}
        for name, values in named.items():
            there = [value for value in values if value is not None]
            if there:
                known[name] = there
        means = self._run.ranks.mean(torch.stack([_mean(values) for values in known.values()]))
        found = [mean if math.isfinite(mean) else None for mean in means.tolist()]
        return dict.fromkeys(named) | dict(zip(known, found, strict=True))

    def _micro_batches(self) -> list[Tensor]:
        """This process's tokens of the step, in the parts that are computed one after another."""
        data = self._config.data
        windows = self._run.batches.draw(data.sequences_per_step)
        context = data.context_at(self.step, self._config.run.steps)
        if context != data.context:
            windows = shorten(windows, context)
        return self._run.ranks.part(torch.from_numpy(windows).chunk(data.micro_batches))

    def _part(self, windows: Tensor, found: list[Losses]) -> Tensor:
        """One part's share of the loss; its losses go to those that were found."""
        with self._recorded(windows), self._autocast():
            losses = self._losses(windows)
        found.append(losses.detach())
        num_parts = self._config.data.micro_batches // self._run.ranks.num_data_ranks
        return (losses.cross_entropy + losses.auxiliary) * self._run.ranks.loss_share / num_parts

    def _recorded(self, windows: Tensor) -> contextlib.AbstractContextManager[None]:
        trace = self._run.trace
        return contextlib.nullcontext() if trace is None else trace.micro_batch(windows[:, :-1])

    def _losses(self, windows: Tensor) -> Losses:
        windows = windows.to(self._run.device)
        return self._run.model.losses(windows[:, :-1], windows[:, 1:])

    def _autocast(self) -> torch.autocast:
        return autocast_of(self._config.run.precision, self._run.device.type)

    @torch.no_grad()
    def _evaluate(self, on_record: Callable[[Record], None]) -> None:
        """Measures the held-out text and emits the record; without any text, does nothing."""
        if not self._run.held_out:
            return
        self._run.model.eval()
        nats: dict[str, float] = {}
        rows = self._config.data.windows_per_micro_batch
        for name, windows in self._run.held_out.items():
            with self._autocast(), self._run.ranks.watched(f"held-out text {name!r}"):
                nats[name] = self._held_out_loss(torch.from_numpy(windows).split(rows))
        weights = {name: self._run.held_out_weights[name] for name in nats}
        mean = sum(weights[name] * nats[name] for name in nats) / sum(weights.values())
        mean = require_number(mean, self.step)
        record = EvaluationRecord(step=self.step, held_out=nats, held_out_mean=mean)
        self._emit(record, on_record)

    def _held_out_loss(self, parts: Sequence[Tensor]) -> float:
        """Mean loss of windows in parts, which the data-parallel ranks compute in turn."""
        ranks = self._run.ranks
        # Who has no part left keeps the others company: passes are collective calls.
        numbers = range(ranks.data_rank, len(parts) + ranks.data_rank, ranks.num_data_ranks)
        own = [parts[min(number, len(parts) - 1)] for number in numbers]
        total = torch.zeros((), dtype=torch.float64)
        for number, part, loss in zip(numbers, own, self._measured(own), strict=True):
            total += float(loss) * len(part) if number < len(parts) else 0.0
        return float(ranks.mean(total)) * ranks.num_data_ranks / sum(map(len, parts))

    def _measured(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """The cross-entropy of each part."""
        pipeline = self._run.ranks.pipeline
        if pipeline is None:
            yield from (self._losses(part).cross_entropy for part in parts)
            return
        inputs = [part.to(self._run.device) for part in parts]
        at_once = self._config.data.micro_batches
        yield from (losses.cross_entropy for losses in pipeline.measure(inputs, at_once=at_once))

    def _emit(self, record: Record, on_record: Callable[[Record], None]) -> None:
        for sink in self._run.sinks:
            sink.write(record)
        on_record(record)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.float() for value in values]).mean().cpu()
