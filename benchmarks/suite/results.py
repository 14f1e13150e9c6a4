"""Results files: one versioned format for every case, written and read here.

What a file holds besides numbers is what they depend on: machine, versions, commit, command,
settings. ``schema.json`` says it all; a file that differs from it is neither written nor read. Of
JSON Schema the keywords that it uses are known here; another one is an error, so that nothing in it
goes unchecked.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moe_runtime.benchmarks.suite.runner import (
    BenchSystem,
    MeasuredSystem,
    Rules,
    mean_interval,
    percentile,
    run_in_turn,
)
from moe_runtime.errors import CheckpointError
from moe_runtime.files import read_bounded, write_text
from moe_runtime.lab.this_machine import describe_machine, package_commit, versions

FORMAT, VERSION = "moe-runtime-bench", 1
_MAX_BYTES = 256 << 20
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_LARGEST = 1e100  # room to multiply and divide
_KNOWN = {
    *("$schema", "$id", "title", "type", "const", "enum", "minimum", "required"),
    *("properties", "additionalProperties", "items"),
}


@dataclass(frozen=True)
class Metric:
    """What a number means."""

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


def describe_compared(
    one: BenchSystem, measured: MeasuredSystem, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    """As ``describe_system``, of one whose answers were compared, or of none that were."""
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
    """Measures systems in turn."""
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
    """The content of a results file; ``command`` is added by whoever knows it."""
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
    """Writes a results file."""
    require_valid(dict(results), read_schema())
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Reads a results file."""
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


def read_schema() -> dict[str, Any]:
    """The JSON Schema of results files."""
    return json.loads(Path(__file__).with_name("schema.json").read_text("utf-8"))


def require_valid(value: Any, schema: dict[str, Any], place: str = "results") -> None:
    """Checks a value read from JSON."""
    if unknown := schema.keys() - _KNOWN:
        raise NotImplementedError(f"{place}: keywords of JSON Schema not known: {sorted(unknown)}")
    _require_kind(value, schema, place)
    if isinstance(value, dict):
        _require_properties(value, schema, place)
    elif isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            require_valid(item, schema["items"], f"{place}[{number}]")


def _require_kind(value: Any, schema: dict[str, Any], place: str) -> None:
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # For Python true is a number, for JSON it is not.
    fits = (
        isinstance(value, _TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean")
        for kind in kinds
    )
    if not any(fits):
        raise ValueError(f"{place}: expected {' or '.join(kinds)}, got {_shown(value)}")
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and value not in allowed:
        raise ValueError(
            f"{place}: expected {' or '.join(map(repr, allowed))}, got {_shown(value)}"
        )
    if isinstance(value, int | float) and not abs(value) <= _LARGEST:
        raise ValueError(f"{place}: expected a number up to {_LARGEST:g}, got {_shown(value)}")
    if "minimum" in schema and value < schema["minimum"]:
        raise ValueError(f"{place}: expected at least {schema['minimum']}, got {_shown(value)}")


def _require_properties(value: dict[str, Any], schema: dict[str, Any], place: str) -> None:
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise ValueError(f"{place}: lacks {', '.join(missing)}")
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in known:
            require_valid(item, known[name], f"{place}.{name}")
        elif rest is False:
            raise ValueError(
                f"{place}: has {_shown(name)}, which is unknown; known are {', '.join(known)}"
            )
        elif isinstance(rest, dict):
            require_valid(item, rest, f"{place}.{name}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
