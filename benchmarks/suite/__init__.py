"""Shared parts of ``moe-runtime bench``: systems take turns, and all results have one format.

A case (``cases``) measures one repetition of a system. Systems take turns until the means are
certain enough, so that a slower phase of the machine affects all of them. The order rotates from
round to round. A results file (``schema.json``) holds the numbers with the machine, versions,
commit, command and settings. ``comparing`` compares two files.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.files import read_bounded, write_text
from moe_runtime.lab.this_machine import describe_machine, package_commit, versions

Number = float | Sequence[float]
"""The value of a metric in one repetition, or several samples of it."""


class PeerFailedError(MoERuntimeError):
    """A system under test cannot be measured; the message says why, in one line."""


class StoppedRepetitionError(MoERuntimeError):
    """The measurement was stopped during a repetition, which is dropped."""


@contextmanager
def peer_failures(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of torch, of a system under test, and ``kinds`` into `PeerFailedError`."""
    try:
        yield
    except (RuntimeError, ValueError, *kinds) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise PeerFailedError(lines[0]) from None


class BenchSystem(ABC):
    """A system under test. ``compared`` and ``equal`` count its checked answers."""

    def __init__(self, name: str, own_versions: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.versions = versions() if own_versions is None else own_versions
        self.gpu: str | None = None
        self.compared = self.equal = 0

    @abstractmethod
    def repeat(self) -> Mapping[str, Number]:
        """Run the system once. The first run also compares its answers.

        Raises:
            PeerFailedError: the system cannot be measured.
        """

    def count(
        self,
        compared: int,
        equal: int,
        difference: str = "tokens differ by more than roundings allow",
    ) -> None:
        """Count checked answers; raise `PeerFailedError` if any differs."""
        self.compared, self.equal = self.compared + compared, self.equal + equal
        if self.equal < self.compared:
            raise PeerFailedError(
                f"{self.compared - self.equal} of {self.compared} {difference}; "
                "its times would be those of other work"
            )


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a measurement ends, and its callbacks.

    Attributes:
        judged: metrics whose means must be certain.
        least, most: minimum and maximum repetitions of each system.
        precision: half of the mean's confidence interval, relative to the mean.
        max_s: seconds; no round starts that would end later, judging by the longest so far.
        on_repetition: called with a system's name and its number of repetitions.
        is_stopping: called before each repetition; earlier repetitions count.
    """

    judged: Sequence[str]
    least: int = 3
    most: int = 20
    precision: float = 0.05
    max_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    on_repetition: Callable[[str, int], None] = lambda name, number: None
    is_stopping: Callable[[], bool] = lambda: False


@dataclass(kw_only=True)
class MeasuredSystem:
    """The repetitions of one system, or the reason why it has none."""

    repetitions: list[Mapping[str, Number]] = field(default_factory=list)
    failure: str | None = None

    def values(self, metric: str) -> list[float]:
        return [middle(found[metric]) for found in self.repetitions if metric in found]


def middle(value: Number) -> float:
    """The median of the samples of a repetition."""
    return float(median(value)) if isinstance(value, Sequence) else float(value)


def run_in_turn(
    systems: Sequence[BenchSystem], rules: Rules
) -> tuple[dict[str, MeasuredSystem], str]:
    """Measure systems in turn.

    Returns:
        The measured systems by name, and why the measurement ended: ``narrow``, ``time``,
        ``most``, ``interrupted``, or ``failed`` if no system has numbers.
    """
    found = {system.name: MeasuredSystem() for system in systems}
    begin, longest_s = rules.clock(), 0.0
    for number in range(rules.most):
        round_begin = rules.clock()
        turn = number % len(systems)
        for system in [*systems[turn:], *systems[:turn]]:
            if rules.is_stopping():
                return found, "interrupted"
            measured = found[system.name]
            if measured.failure is not None:
                continue
            try:
                measured.repetitions.append(system.repeat())
            except PeerFailedError as error:
                measured.failure, measured.repetitions = str(error), []
                continue
            except StoppedRepetitionError:
                return found, "interrupted"
            rules.on_repetition(system.name, len(measured.repetitions))
        longest_s = max(longest_s, rules.clock() - round_begin)
        working = [one for one in found.values() if one.failure is None]
        if not working:
            return found, "failed"
        if number + 1 >= rules.least and all(_is_certain(one, rules) for one in working):
            return found, "narrow"
        if rules.clock() - begin + longest_s > rules.max_s:
            return found, "time"
    return found, "most"


def _is_certain(measured: MeasuredSystem, rules: Rules) -> bool:
    """Whether the mean of each judged metric is known to the asked precision."""
    for values in map(measured.values, rules.judged):
        ends = mean_interval(values)
        if values and (
            ends is None or ends[1] - ends[0] > 2 * rules.precision * abs(fmean(values))
        ):
            return False
    return True


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


FORMAT, VERSION = "moe-runtime-bench", 1
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Metric:
    """The unit of a number, whether ``less`` or ``more`` is better, and whether it is judged."""

    unit: str
    better: str = "less"
    is_judged: bool = True


def facts(unit: str, *names: str, better: str = "less") -> dict[str, Metric]:
    """Metrics that are reported but not judged."""
    return {name: Metric(unit, better, is_judged=False) for name in names}


JOULES = {"cpu_joules": Metric("J"), "gpu_joules": Metric("J")}
"""Measured by `EnergyMeter`, where users may read the counters."""


def describe_system(
    name: str,
    measured: MeasuredSystem,
    metrics: Mapping[str, Metric],
    *,
    system_versions: Mapping[str, str] | None = None,
    quality: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The entry of one system in a results file. Versions default to those of this process."""
    import numpy as np

    summary = {}
    for metric, meant in metrics.items():
        values = measured.values(metric)
        if not values:
            continue
        pooled = np.concatenate(
            [np.atleast_1d(found[metric]) for found in measured.repetitions if metric in found]
        )
        low, high = mean_interval(values) or (None, None)
        summary[metric] = {
            "unit": meant.unit,
            "better": meant.better,
            "judged": meant.is_judged,
            "median": median(values),
            "mean": fmean(values),
            "low": low,
            "high": high,
            **{f"p{share}": float(np.percentile(pooled, share)) for share in (50, 90, 99)},
        }
    return {
        "system": name,
        "failure": measured.failure,
        "versions": dict(versions() if system_versions is None else system_versions),
        "quality": None if quality is None else dict(quality),
        "repetitions": [dict(found) for found in measured.repetitions],
        "summary": summary,
    }


def describe_compared(
    one: BenchSystem, measured: MeasuredSystem, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    """Like `describe_system`, with the number of equal answers if any were compared."""
    quality = {"compared": one.compared, "equal": one.equal} if one.compared else None
    return describe_system(
        one.name, measured, metrics, system_versions=one.versions, quality=quality
    )


def measure_systems(
    case: str,
    systems: Sequence[BenchSystem],
    metrics: Mapping[str, Metric],
    rules: Rules,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure systems in turn and return the content of a results file."""
    found, ended = run_in_turn(systems, rules)
    rows = [describe_compared(one, found[one.name], metrics) for one in systems]
    gpu = next((one.gpu for one in systems if one.gpu), None)
    return make_results(case, settings, ended, rows, gpu=gpu)


def make_results(
    case: str,
    settings: Mapping[str, Any],
    ended: str,
    measurements: Sequence[dict[str, Any]],
    *,
    gpu: str | None = None,
) -> dict[str, Any]:
    """The content of a results file, without its ``command``.

    ``machine`` names the ``gpu`` on which systems computed, if any.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "",
        "commit": package_commit(),
        "machine": describe_machine() | ({"gpu": gpu} if gpu else {}),
        "versions": versions(),
        "settings": dict(settings),
        "ended": ended,
        "measurements": list(measurements),
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a results file.

    Raises:
        ValueError: the schema rejects the results.
        OSError: the file cannot be written.
    """
    require_valid(dict(results))
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        CheckpointError: the file is not one, or has another version.
        OSError: the file cannot be read.
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    raw = read_bounded(path, max_bytes=_MAX_BYTES)
    try:
        found = json.loads(raw, parse_constant=refuse_constant)
        require_valid(found)
        _require_systems(found["measurements"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not results of moe-runtime bench, version {VERSION}: {error}"
        ) from None
    return found


def _require_systems(measurements: Sequence[Mapping[str, Any]]) -> None:
    """Check what a JSON schema cannot express."""
    names = [one["system"] for one in measurements]
    if not names:
        raise ValueError("results.measurements: expected at least one system, got none")
    for number, one in enumerate(measurements):
        place = f"results.measurements[{number}]"
        if one["system"] in names[:number]:
            raise ValueError(f"{place}: {one['system']!r} is there a second time")
        if one["summary"] and not one["repetitions"]:
            raise ValueError(f"{place}: a summary without the repetitions that it is of")


def require_valid(results: Any) -> None:
    """Raise `ValueError`, with the place and the reason, if ``schema.json`` rejects the results."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    schema = json.loads(Path(__file__).with_name("schema.json").read_text("utf-8"))
    if error := best_match(Draft202012Validator(schema).iter_errors(results)):
        place, reason = error.json_path.replace("$", "results", 1), error.message
        raise ValueError(f"{place}: {reason if len(reason) <= 200 else f'{reason[:197]}...'}")
