"""Turns a session's findings into medians, ratios, tables and the results file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.kept import with_kept
from harness.plan import Settings, cannot_work, cap_label
from harness.replay import misses_per_token
from harness.session import Findings, RunRecord
from moe_runtime.files import write_text

MEDIANS = (
    "load_s",
    "ttft_s",
    "prefill_first_tokens_per_s",
    "prefill_warm_tokens_per_s",
    "decode_tokens_per_s",
    "peak_rss_bytes",
    "peak_rss_less_imports_bytes",
    "group_peak_bytes",
)
RATIOS = ("prefill_first_tokens_per_s", "prefill_warm_tokens_per_s", "decode_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one system under one cap, or the reason why there are none."""

    cap_bytes: int | None
    system: str
    num_runs: int
    medians: dict[str, float]
    failure: str | None


def summarize(settings: Settings, caps: Iterable[int | None], findings: Findings) -> list[Row]:
    """One row a system and cap, in the order of the settings."""
    rows: list[Row] = []
    for cap in caps:
        for system in settings.systems:
            records = [
                record
                for record in findings.records
                if record.run.system == system and record.run.cap_bytes == cap
            ]
            rows.append(_row(settings, cap, system, records))
    return rows


def ratios(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Ours over each peer under the same cap, for every speed both have."""
    table = list(rows)
    ours = {row.cap_bytes: row for row in table if row.system == "ours" and row.medians}
    return [
        {
            "cap_bytes": row.cap_bytes,
            "peer": row.system,
            **{name: ours[row.cap_bytes].medians[name] / row.medians[name] for name in RATIOS},
        }
        for row in table
        if row.system != "ours" and row.medians and row.cap_bytes in ours
    ]


def details_of_ours(
    settings: Settings, rows: Iterable[Row], findings: Findings
) -> list[dict[str, Any]]:
    """Memory against its budget, and misses a token: measured, LRU's, Belady's optimum.

    The last two have as many slots a layer as ours had; they are None without a routing trace.
    """
    details: list[dict[str, Any]] = []
    for row in rows:
        if row.system != "ours" or not row.medians:
            continue
        slots = int(row.medians["expert_slots"]) // settings.shape.num_layers
        replayed = (None, None)
        if findings.routes is not None:
            replayed = misses_per_token(findings.routes, slots)
        details.append(
            {
                "cap_bytes": row.cap_bytes,
                "budget_bytes": row.medians["budget_bytes"],
                "peak_rss_less_imports_bytes": row.medians["peak_rss_less_imports_bytes"],
                "slots_per_layer": slots,
                "measured_misses_per_token": row.medians["misses_per_token"],
                "lru_misses_per_token": replayed[0],
                "belady_misses_per_token": replayed[1],
                "stall_fraction": row.medians["stall_fraction"],
            }
        )
    return details


def write_results(
    path: Path,
    settings: Settings,
    caps: Iterable[int | None],
    findings: Findings,
    facts: dict[str, Any],
    *,
    keeps: bool = False,
) -> None:
    """Writes everything found as JSON.

    Args:
        path: the file.
        settings: what was asked for.
        caps: what was measured.
        findings: what was found.
        facts: where, when and how it was measured.
        keeps: whether results of other caps that the file has stay in it.

    Raises:
        ValueError: as `with_kept`.
    """
    rows = summarize(settings, caps, findings)
    content: dict[str, Any] = {
        **facts,
        "shape": settings.shape.describe(),
        "settings": {**settings.describe(), "caps": list(caps)},
        "notes": findings.notes,
        "summary": [asdict(row) for row in rows],
        "ratios_ours_over_peer": ratios(rows),
        "ours": details_of_ours(settings, rows, findings),
        "disk": [result.describe() for result in findings.disk],
        "runs": [
            {
                **asdict(record.run),
                "disk_bytes_per_s": record.disk_bytes_per_s,
                "io_bound_fraction": io_bound_fraction(settings, record),
                "failure": record.outcome.failure,
                **record.outcome.numbers,
            }
            for record in findings.records
        ],
    }
    if keeps:
        content = with_kept(content, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def io_bound_fraction(settings: Settings, record: RunRecord) -> float | None:
    """Seconds that reading the missed bytes takes at the disk's speed, over seconds decoded."""
    counters = record.outcome.numbers.get("decode_counters", {})
    if record.disk_bytes_per_s is None or not counters.get("misses"):
        return None
    bound_s = counters["misses"] * settings.shape.expert_bytes / record.disk_bytes_per_s
    return bound_s / record.outcome.numbers["decode_s"]


def print_report(
    console: Console, settings: Settings, caps: Iterable[int | None], findings: Findings
) -> None:
    """Prints the tables: every system, ours over the peers, misses."""
    rows = summarize(settings, caps, findings)
    console.print(_systems_table(settings, rows))
    if table := ratios(rows):
        console.print(_ratios_table(table))
    if details := details_of_ours(settings, rows, findings):
        console.print(_details_table(settings, details))
    for row in rows:
        if row.failure is not None:
            place = f"cap {cap_label(row.cap_bytes)}"
            console.print(f"{row.system}, {place}: {row.failure}", soft_wrap=True)
    for note in findings.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _row(settings: Settings, cap: int | None, system: str, records: list[RunRecord]) -> Row:
    good = [record for record in records if record.outcome.succeeded]
    if not good:
        reason = cannot_work(system, cap, settings.shape)
        if records:
            reason = records[-1].outcome.failure
        return Row(cap, system, 0, {}, reason or "not run")
    medians = _medians(record.outcome.numbers for record in good)
    if system == "ours":
        medians |= _medians_of_ours(settings, good)
    return Row(cap, system, len(good), medians, None)


def _medians(runs: Iterable[dict[str, Any]]) -> dict[str, float]:
    table = list(runs)
    return {
        name: median(run[name] for run in table)
        for name in MEDIANS
        if all(run.get(name) is not None for run in table)
    }


def _medians_of_ours(settings: Settings, records: list[RunRecord]) -> dict[str, float]:
    runs = [record.outcome.numbers for record in records]
    misses = median(run["decode_counters"]["misses"] / run["decode_tokens"] for run in runs)
    found = {
        "expert_slots": median(run["counters"]["expert_slots"] for run in runs),
        "budget_bytes": median(run["counters"]["budget_bytes"] for run in runs),
        "misses_per_token": misses,
        "missed_bytes_per_token": misses * settings.shape.expert_bytes,
        "stall_fraction": median(
            run["decode_counters"]["stall_s"] / run["decode_s"] for run in runs
        ),
    }
    fractions = [io_bound_fraction(settings, record) for record in records]
    if known := [fraction for fraction in fractions if fraction is not None]:
        found["io_bound_fraction"] = median(known)
    return found


def _systems_table(settings: Settings, rows: list[Row]) -> Table:
    title = (
        f"{settings.shape.name}, {settings.prompt_tokens} prompt tokens, {settings.new_tokens} "
        f"decoded, {settings.num_threads} threads, median of {settings.repeats}"
    )
    table = _table(
        title,
        ("cap", "system"),
        "load\ns",
        "first\ntoken s",
        "prefill\nfirst",
        "tok/s\nwarm",
        "decode\ntok/s",
        "peak\nRSS GB",
        "missed\nGB/tok",
        "of I/O\nbound",
    )
    for row in rows:
        found = row.medians
        if not found:
            continue
        table.add_row(
            cap_label(row.cap_bytes),
            row.system,
            f"{found['load_s']:.1f}",
            f"{found['ttft_s']:.1f}",
            f"{found['prefill_first_tokens_per_s']:.4g}",
            f"{found['prefill_warm_tokens_per_s']:.4g}",
            f"{found['decode_tokens_per_s']:.3g}",
            f"{found['peak_rss_bytes'] / 1e9:.2f}",
            _gigabytes(found.get("missed_bytes_per_token")),
            _percent(found.get("io_bound_fraction")),
        )
    return table


def _ratios_table(found: list[dict[str, Any]]) -> Table:
    table = _table(
        "ours over the peer (more is faster)",
        ("cap", "peer"),
        "prefill, first",
        "prefill, warm",
        "decode",
    )
    for entry in found:
        values = (f"{entry[name]:.2f} x" for name in RATIOS)
        table.add_row(cap_label(entry["cap_bytes"]), entry["peer"], *values)
    return table


def _details_table(settings: Settings, details: list[dict[str, Any]]) -> Table:
    table = _table(
        "ours: memory, and GB of experts missed a decoded token",
        ("cap",),
        "budget\nGB",
        "peak less\nimports GB",
        "slots a\nlayer",
        "missed\nGB/tok",
        "LRU\nGB/tok",
        "Belady\nGB/tok",
        "time\nstalled",
    )
    expert_bytes = settings.shape.expert_bytes
    for entry in details:
        missed = (entry[f"{name}_misses_per_token"] for name in ("measured", "lru", "belady"))
        table.add_row(
            cap_label(entry["cap_bytes"]),
            f"{entry['budget_bytes'] / 1e9:.2f}",
            f"{entry['peak_rss_less_imports_bytes'] / 1e9:.2f}",
            f"{entry['slots_per_layer']} of {settings.shape.num_experts}",
            *(_gigabytes(None if count is None else count * expert_bytes) for count in missed),
            _percent(entry["stall_fraction"]),
        )
    return table


def _table(title: str, names: tuple[str, ...], *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _gigabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e9:.3f}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"
