"""Results of proofs that are no case of `moe-runtime bench`, in the format that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.machine import machine_name, run_facts, versions
from moe_runtime.bench.results import Metric, describe_system, make_results, write_results
from moe_runtime.bench.runner import MeasuredSystem, Number

ROOT = Path(__file__).resolve().parents[2]
Repetition = Mapping[str, Number]


def save_results(
    kind: str,
    settings: Mapping[str, Any],
    systems: Mapping[str, Sequence[Repetition] | str],
    metrics: Mapping[str, Metric],
    path: Path | None = None,
) -> None:
    """Writes this machine's results file, for `bench compare` and `bench report` too.

    Args:
        kind: what was measured; the beginning of the file's name.
        settings: of all systems.
        systems: repetitions of each, or why it has none.
        metrics: what the numbers mean.
        path: of the file, if not in `benchmarks/results`.
    """
    measured = {
        name: MeasuredSystem(failure=found)
        if isinstance(found, str)
        else MeasuredSystem(repetitions=[*found])
        for name, found in systems.items()
    }
    rows = [
        describe_system(name, one, metrics, system_versions=versions(), quality=None)
        for name, one in measured.items()
    ]
    results = make_results(kind, settings, "most", rows) | {"command": run_facts(ROOT)["command"]}
    name = f"{kind}-{machine_name(results['machine'])}.json"
    path = path or ROOT / "benchmarks" / "results" / name
    write_results(path, results)
    print(f"written to {path.name}")
