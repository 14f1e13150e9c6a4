"""Tables of measured systems, a column for each, and numbers in units of their size."""

from collections.abc import Mapping
from typing import Any

from moe_runtime.benchmarks.suite.figures import figure, unit_for, with_half
from moe_runtime.cli.console import print_table

JOULE_ROWS = {"processors": "cpu_joules", "GPUs": "gpu_joules"}
MEMORY_ROWS = {
    "load without imports": "load_s",
    "imports": "import_s",
    "peak memory": "peak_rss_bytes",
    "peak memory of the GPU": "peak_device_bytes",
    "after imports": "rss_after_imports_bytes",
    "read by calls": "read_call_bytes",
    "of these from the page cache": "page_cache_bytes",
    "read from storage": "storage_bytes",
    **JOULE_ROWS,
}


def show_systems(
    results: dict[str, Any],
    title: str,
    spreads: Mapping[str, str],
    singles: Mapping[str, str],
    equal: str,
) -> None:
    """Prints a column for each system that has numbers.

    Args:
        results: content of a results file.
        title: of the table.
        spreads: metrics shown with percentiles and the mean of the repetitions' medians, by what
            their rows are called.
        singles: metrics of which the median is shown, where there are any.
        equal: what was compared.
    """
    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    rows = [["repetitions", *(str(len(one["repetitions"])) for one in shown)]]
    for what, metric in spreads.items():
        factor, unit = unit_of(shown, metric)
        for part in ("p50", "p90", "p99"):
            values = (one["summary"][metric][part] * factor for one in shown)
            rows.append([f"{what}, {unit}: {part}", *map(figure, values)])
        means = (with_half(one["summary"][metric], factor) for one in shown)
        rows.append([f"{what}, {unit}: mean of medians", *means])
    for what, metric in singles.items():
        found = [one["summary"].get(metric) for one in shown]
        if any(found):
            factor, unit = unit_of(shown, metric)
            cells = (figure(one["median"] * factor) if one else "–" for one in found)
            rows.append([f"{what}, {unit}", *cells])
    counts = (f"{one['quality']['equal']} of {one['quality']['compared']}" for one in shown)
    rows.append([equal, *counts])
    print_table(title, [("", "left"), *((one["system"], "right") for one in shown)], rows)


def unit_of(shown: list[dict[str, Any]], metric: str) -> tuple[float, str]:
    """Factor and name of the unit in which a metric of several systems is shown."""
    found = [one["summary"][metric] for one in shown if metric in one["summary"]]
    return unit_for(found[0]["unit"], (one["median"] for one in found))


def mean_cell(one: dict[str, Any], metric: str, factor: float) -> str:
    """The mean of a system's metric with half of its interval; a dash where it has none."""
    summary = one["summary"].get(metric)
    return with_half(summary, factor) if summary else "–"
