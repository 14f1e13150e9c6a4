"""Results files: one versioned format for every case, written and read here.

What a file holds besides numbers is what they depend on: machine, versions, commit, command,
settings. ``schema.json`` says it all; a file that differs from it is neither written nor read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from moe_runtime.benchmarks.suite.intervals import mean_interval, percentile
from moe_runtime.benchmarks.suite.runner import MeasuredSystem
from moe_runtime.benchmarks.suite.schema import read_schema, require_valid
from moe_runtime.errors import CheckpointError
from moe_runtime.files import read_bounded, write_text
from moe_runtime.lab.this_machine import describe_machine, package_commit, versions

FORMAT, VERSION = "moe-runtime-bench", 1
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Metric:
    """What a number means.

    Attributes:
        unit: one of those of ``schema.json``.
        better: ``less`` or ``more``.
        is_judged: whether ``compare`` calls a change better or worse.
    """

    unit: str
    better: str = "less"
    is_judged: bool = True


JOULES = {"cpu_joules": Metric("J"), "gpu_joules": Metric("J")}
"""What `EnergyMeter` finds, where this machine lets its users read it."""


def summarize_measured(
    measured: MeasuredSystem, metrics: Mapping[str, Metric]
) -> dict[str, dict[str, Any]]:
    """Mean with its interval over repetitions, and percentiles over everything, by metric."""
    summary = {}
    for name, metric in metrics.items():
        values = measured.values(name)
        if not values:
            continue
        pooled = [one for found in measured.repetitions for one in _as_list(found.get(name, ()))]
        low, high = mean_interval(values) or (None, None)
        summary[name] = {
            "unit": metric.unit,
            "better": metric.better,
            "judged": metric.is_judged,
            "median": median(values),
            "mean": fmean(values),
            "low": low,
            "high": high,
            **{f"p{share}": percentile(pooled, share / 100) for share in (50, 90, 99)},
        }
    return summary


class ComparedSystem(Protocol):
    """A system whose answers were held against a reference."""

    name: str
    compared: int
    equal: int


def quality_of(system: ComparedSystem) -> dict[str, int] | None:
    """How many answers were compared, and how many were equal; None where none were."""
    if not system.compared:
        return None
    return {"compared": system.compared, "equal": system.equal}


def describe_system(
    name: str,
    measured: MeasuredSystem,
    metrics: Mapping[str, Metric],
    *,
    system_versions: Mapping[str, str],
    quality: Mapping[str, int] | None,
) -> dict[str, Any]:
    """What a results file says of one system."""
    return {
        "system": name,
        "failure": measured.failure,
        "versions": dict(system_versions),
        "quality": None if quality is None else dict(quality),
        "repetitions": [dict(found) for found in measured.repetitions],
        "summary": summarize_measured(measured, metrics),
    }


def describe_own_systems(
    systems: Sequence[ComparedSystem],
    found: Mapping[str, MeasuredSystem],
    metrics: Mapping[str, Metric],
) -> list[dict[str, Any]]:
    """As ``describe_system``, of systems that ran with this process's packages."""
    return [
        describe_system(
            one.name,
            found[one.name],
            metrics,
            system_versions=versions(),
            quality=quality_of(one),
        )
        for one in systems
    ]


def make_results(
    case: str,
    settings: Mapping[str, Any],
    ended: str,
    measurements: Sequence[dict[str, Any]],
    *,
    gpu: str | None = None,
) -> dict[str, Any]:
    """The content of a results file; ``command`` is added by whoever knows it.

    ``machine`` says which ``gpu`` systems computed on, where they did.
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
    """Writes a results file.

    Raises:
        ValueError: the schema refuses it.
        OSError: it cannot be written.
    """
    require_valid(dict(results), read_schema())
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Reads a results file.

    Raises:
        CheckpointError: it is not one, or one of another version.
        OSError: it cannot be read.
    """
    raw = read_bounded(path, max_bytes=_MAX_BYTES)
    try:
        found = json.loads(raw, parse_constant=_refuse_constant)
        require_valid(found, read_schema())
        _require_systems(found["measurements"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not results of moe-runtime bench, version {VERSION}: {error}"
        ) from None
    return found


def _require_systems(measurements: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what no command writes and no schema can say."""
    names = [one["system"] for one in measurements]
    if not names:
        raise ValueError("results.measurements: expected at least one system, got none")
    for number, one in enumerate(measurements):
        place = f"results.measurements[{number}]"
        if one["system"] in names[:number]:
            raise ValueError(f"{place}: {one['system']!r} is there a second time")
        if one["summary"] and not one["repetitions"]:
            raise ValueError(f"{place}: a summary without the repetitions that it is of")


def _as_list(value: Any) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
