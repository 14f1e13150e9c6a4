"""What `moe-runtime train` shows while it trains: a live line, or one line every few steps."""

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_runtime.config import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from moe_runtime.training.metrics import EvaluationRecord, Record, StepRecord


class TrainingLines:
    """Turns records into text: a line every `log_every` steps and after every measurement.

    Args:
        num_steps: steps of the run.
        log_every: steps between lines.
    """

    def __init__(self, num_steps: int, log_every: int) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._recent: deque[StepRecord] = deque(maxlen=log_every)
        self._tokens_before = 0

    def line_for(self, record: "Record") -> str | None:
        """The line that a record gives rise to, or None."""
        from moe_runtime.training.metrics import EvaluationRecord

        if isinstance(record, EvaluationRecord):
            return self._held_out(record)
        self._recent.append(record)
        if record.step % self._log_every and record.step != self._num_steps:
            return None
        return f"step {record.step}/{self._num_steps}  {self.status()}"

    def status(self) -> str:
        """Loss, speed, balance and drops over the recent steps."""
        records = list(self._recent)
        last = records[-1]
        tokens = last.tokens // last.step * len(records)
        seconds = sum(record.step_s for record in records)
        losses = [record.loss for record in records if record.loss is not None]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "no number"
        parts = [f"loss {loss}", f"{tokens / seconds:,.0f} tokens/s"]
        if last.max_load is not None:
            parts.append(f"load {_mean_of(records, 'max_load'):.2f}")
        if last.dropped_share is not None:
            parts.append(f"dropped {_mean_of(records, 'dropped_share'):.1%}")
        if last.stall_s is not None:
            parts.append(f"stall {_mean_of(records, 'stall_s') * len(records) / seconds:.1%}")
            found, read, written = (
                format_bytes(_mean_of(records, f"{way}_bytes"))
                for way in ("memory", "read", "written")
            )
            parts.append(f"memory {found}  disk {read} in, {written} out a step")
        parts.append(f"rate {last.rate:.2e}")
        if skipped := sum(record.is_skipped for record in records):
            parts.append(f"skipped {skipped}")
        return "  ".join(parts)

    def _held_out(self, record: "EvaluationRecord") -> str:
        shown = ", ".join(f"{name} {nats:.4f}" for name, nats in record.held_out.items())
        each = f" ({shown})" if len(record.held_out) > 1 else ""
        return f"step {record.step}/{self._num_steps}  held out {record.held_out_mean:.4f}{each}"


def _mean_of(records: "list[StepRecord]", name: str) -> float:
    return sum(getattr(record, name) for record in records) / len(records)


class TrainingDisplay:
    """Shows records on stderr.

    Args:
        lines: makes the text.
        bar: the live line of a terminal; None where stderr is none.
        task: the bar's only task.
    """

    def __init__(
        self, lines: TrainingLines, bar: "Progress | None" = None, task: "TaskID | None" = None
    ) -> None:
        self._lines = lines
        self._bar = bar
        self._task = task

    def show(self, record: "Record") -> None:
        """Takes a record."""
        from moe_runtime.training.metrics import StepRecord

        line = self._lines.line_for(record)
        if self._bar is None or self._task is None:
            if line is not None:
                print(line, file=sys.stderr, flush=True)
            return
        if isinstance(record, StepRecord):
            status = self._lines.status()
            self._bar.update(self._task, completed=record.step, status=status)
        elif line is not None:
            self._bar.console.print(line, markup=False, highlight=False)


@contextlib.contextmanager
def training_display(num_steps: int, log_every: int, first_step: int) -> Iterator[TrainingDisplay]:
    """A display for the `with` block: a live line on a terminal, lines elsewhere.

    Args:
        num_steps: steps of the run.
        log_every: steps between lines where stderr is no terminal.
        first_step: steps already taken.
    """
    lines = TrainingLines(num_steps, log_every)
    if not sys.stderr.isatty():
        yield TrainingDisplay(lines)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    console = Console(stderr=True)
    # where a line is short, the end of the status goes, and step and loss stay
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        *([BarColumn(20)] if console.width > 100 else []),
        TextColumn("{task.fields[status]}", markup=False, table_column=rest),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("train", total=num_steps, completed=first_step, status="")
        yield TrainingDisplay(lines, bar, task)
