"""A run's records, one for each step: lines of JSON and, optionally, TensorBoard's files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_runtime.digests import digest
from moe_runtime.errors import CheckpointError
from moe_runtime.files import make_folders, open_regular, write_atomically
from moe_runtime.training.checkpoint import COUNT, MAPPING, NUMBER, require_kind

METRICS_FILE = "metrics.jsonl"
_KINDS = {
    "step": COUNT,
    "loss": NUMBER.or_none(),
    "held_out": NUMBER.named(),
    "held_out_mean": NUMBER,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: its number, the first is 1.
        loss: mean cross-entropy of its tokens, nats; None if it was not finite.
        aux_loss: the gates' losses with their coefficients; None if not finite.
        gradient_norm: before clipping; None if it was not finite.
        tokens: tokens trained on so far.
        max_load: demand of the busiest expert over the mean, averaged over the layers; 1 is even.
        dropped_share: share of the choices that exceeded an expert's capacity.
        is_skipped: the gradients were not finite and nothing was changed.
        stall_s: seconds of waiting for offloaded experts; None if all are in memory.
        memory_bytes: of offloaded experts that were needed and in memory; None likewise.
        read_bytes: of offloaded experts, from the disk.
        written_bytes: to the disk.
    """

    step: int
    loss: float | None
    aux_loss: float | None
    rate: float
    gradient_norm: float | None
    tokens: int
    step_s: float
    max_load: float | None = None
    dropped_share: float | None = None
    is_skipped: bool = False
    stall_s: float | None = None
    memory_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Held-out loss after a step.

    Attributes:
        held_out: nats per token, by source.
        held_out_mean: mean of the sources, weighted as training mixes them.
    """

    step: int
    held_out: dict[str, float]
    held_out_mean: float


Record = StepRecord | EvaluationRecord


class JsonLines:
    """Records as lines of JSON in the run's folder.

    Args:
        first_step: steps already taken; lines of later steps are removed.
        digest_then: of the lines up to that step; when omitted, steps decide.

    Raises:
        CheckpointError: the file does not hold the lines up to the step.
    """

    def __init__(self, folder: Path, *, first_step: int, digest_then: str = "") -> None:
        path = folder / METRICS_FILE
        kept = _lines_up_to(path, first_step, digest_then) if first_step else []
        self.digest = digest(b"".join(kept)) if kept else ""
        make_folders(folder)
        with write_atomically(path) as file:
            file.writelines(kept)
        self._file = path.open("ab")

    def write(self, record: Record) -> None:
        line = f"{json.dumps(asdict(record))}\n".encode()
        self.digest = digest(line, self.digest)
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def holds_records(folder: Path, expected: str) -> bool:
    """Whether the file begins with lines of this digest of `JsonLines`."""
    found = ""
    return any(
        (found := digest(line, found)) == expected for line in _whole_lines(folder / METRICS_FILE)
    )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    return [_record(path, number, line) for number, line in enumerate(_whole_lines(path), 1)]


def _lines_up_to(path: Path, step: int, expected: str) -> list[bytes]:
    """The lines up to a step, by their digest; checkpoints of older versions have none."""
    lines = _whole_lines(path)
    if not expected:
        records = (_record(path, number, line) for number, line in enumerate(lines, 1))
        return [line for line, record in zip(lines, records, strict=True) if record["step"] <= step]
    found = ""
    for number, line in enumerate(lines, 1):
        found = digest(line, found)
        if found == expected:
            return lines[:number]
    if path.exists():
        raise CheckpointError(
            f"{path}: is damaged, or of another run: it does not hold the records of the first "
            f"{step} steps; restore it, or remove it to go on without them"
        )
    return []


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    what = f"{path}: line {number}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error}); remove the line") from None
    require_kind(values, MAPPING, what)
    for name in _KINDS.keys() & {*values, "step"}:
        require_kind(values.get(name), _KINDS[name], f"{what}: {name}")
    return values


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with open_regular(path) as file:
        # a line without a line break was not written completely
        return [line for line in file if line.endswith(b"\n")]


class TensorBoard:
    """Records as TensorBoard's scalars; hides an earlier run's scalars after `first_step`."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "run.tensorboard needs the package tensorboard: pip install 'moe-runtime[train]'"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: Record) -> None:
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


MetricsSink = JsonLines | TensorBoard


def _scalars(record: Record) -> Sequence[tuple[str, float]]:
    if isinstance(record, EvaluationRecord):
        named = [(f"held_out/{name}", value) for name, value in record.held_out.items()]
        return [*named, ("held_out/mean", record.held_out_mean)]
    values = asdict(record)
    del values["step"]
    return [(f"train/{name}", float(value)) for name, value in values.items() if value is not None]
