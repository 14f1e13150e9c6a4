"""Results of proofs that are no case of `moe-runtime bench`, in the format that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.machine import machine_name, run_command, versions
from moe_runtime.benchmarks.suite.results import (
    Metric,
    describe_system,
    make_results,
    write_results,
)
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, Number
from moe_runtime.lab.this_machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Repetition = Mapping[str, Number]


def write_systems(
    path: Path,
    kind: str,
    settings: Mapping[str, Any],
    systems: Mapping[str, Sequence[Repetition] | str],
    metrics: Mapping[str, Metric],
    qualities: Mapping[str, Mapping[str, int]],
    *,
    ended: str = "most",
) -> None:
    """Writes a results file, for `bench compare` and `bench report` too.

    Args:
        path: of the file.
        kind: what was measured.
        settings: of all systems.
        systems: repetitions of each, or why it has none.
        metrics: what the numbers mean.
        qualities: of systems that were held against a reference: how many answers were `compared`,
            and how many were `equal`.
        ended: why there are no more; `interrupted` while there may be.
    """
    rows = [
        describe_system(
            name,
            MeasuredSystem(failure=found)
            if isinstance(found, str)
            else MeasuredSystem(repetitions=[*found]),
            metrics,
            system_versions=versions(),
            quality=qualities.get(name),
        )
        for name, found in systems.items()
    ]
    results = make_results(kind, settings, ended, rows)
    write_results(path, results | {"command": run_command(ROOT)})


def save_results(
    kind: str,
    settings: Mapping[str, Any],
    systems: Mapping[str, Sequence[Repetition] | str],
    metrics: Mapping[str, Metric],
    path: Path | None = None,
) -> None:
    """As `write_systems`, and says so; without a path this machine's file of the kind."""
    path = path or RESULTS / f"{kind}-{machine_name(describe_machine())}.json"
    write_systems(path, kind, settings, systems, metrics, {})
    print(f"written to {path.name}")
