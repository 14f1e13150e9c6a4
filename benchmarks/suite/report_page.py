"""Show results files as a page with plots, as a Markdown table, and as CSV."""

import csv
import io
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from moe_runtime.benchmarks.suite.comparing import heading_words
from moe_runtime.benchmarks.suite.figures import figure, metric_words, unit_for
from moe_runtime.lab.report.page import INK, SERIES, SURFACE, Page, Section, Table, chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOW_DRAWN = (
    "Bars: mean of the repetitions with its 95 % interval, where a repetition of several values "
    "counts with their median; dots: p50, p90 and p99 of all values."
)
_BOUNDS = {"bound_s": "|", "optimum_bound_s": "x"}
"""Marks in the bars of ``step_s``: lower bounds by the bytes read, and by the optimum's."""
_HEADER = ("repetitions", "mean", "95 % interval", "p50", "p90", "p99", "unit")


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One metric of one system in one file."""

    case: str
    work: str
    label: str
    metric: str
    num_repetitions: int
    summary: dict[str, Any]
    scale: tuple[float, str]

    @property
    def group(self) -> tuple[str, str, str]:
        """Rows with the same group stand side by side."""
        return self.case, self.work, self.metric

    def cells(self) -> list[str]:
        scale, unit = self.scale
        found = self.summary
        ends = [found["low"], found["high"]]
        interval = "" if None in ends else " to ".join(figure(end * scale) for end in ends)
        rest = (figure(found[part] * scale) for part in ("p50", "p90", "p99"))
        return [str(self.num_repetitions), figure(found["mean"] * scale), interval, *rest, unit]


def result_rows(named: Sequence[tuple[str, dict[str, Any]]]) -> list[ResultRow]:
    num_of_work = Counter((results["case"], heading_words(results)) for _, results in named)
    rows = [
        ResultRow(
            case=results["case"],
            work=work,
            label=one["system"]
            + (f" ({name})" if num_of_work[results["case"], work] > 1 else "")
            + (", interrupted" if results["ended"] == "interrupted" else ""),
            metric=metric,
            num_repetitions=len(one["repetitions"]),
            summary=summary,
            scale=(1.0, summary["unit"]),
        )
        for name, results in named
        for work in [heading_words(results)]
        for one in results["measurements"]
        for metric, summary in one["summary"].items()
    ]
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        values.setdefault(row.group, []).append(row.summary["mean"])
    return [replace(row, scale=unit_for(row.summary["unit"], values[row.group])) for row in rows]


def results_page(named: Sequence[tuple[str, dict[str, Any]]], *, has_plots: bool) -> Page:
    """Lay out results files; several machines stand side by side."""
    rows = result_rows(named)
    groups: dict[tuple[str, str, str], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    judged = [found for found in groups.values() if found[0].summary["judged"]]
    others = [found for found in groups.values() if not found[0].summary["judged"]]
    sections: dict[str, Section] = {}
    for found in judged:
        anchor = _anchor(f"{found[0].case}-{found[0].metric}", sections)
        bounds = [
            row
            for row in rows
            if found[0].metric == "step_s" and row.metric in _BOUNDS
            if (row.case, row.work) == found[0].group[:2]
        ]
        sections[anchor] = _metric_section(anchor, found, has_plots, bounds)
    num_interrupted = sum(results["ended"] == "interrupted" for _, results in named)
    cpus = {str(results["machine"].get("cpu")) for _, results in named}
    return Page(
        title="Benchmark results",
        subtitle=_few([name for name, _ in named]),
        facts=[
            (str(len(named)), "results files" if len(named) > 1 else "results file"),
            (str(len({row.label for row in rows})), "systems with numbers"),
            (str(len(cpus)), "processors" if len(cpus) > 1 else "processor"),
            *([(str(num_interrupted), "interrupted")] if num_interrupted else []),
        ],
        sections=[
            *sections.values(),
            *([_other_numbers(others)] if others else []),
            _circumstances(named),
        ],
    )


def to_markdown(rows: Sequence[ResultRow]) -> str:
    """A table of all rows, with file names escaped."""
    header = ["case", "measured", "system", "metric", *_HEADER]
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line([row.case, row.work, row.label, row.metric, *row.cells()]) for row in rows]
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[ResultRow]) -> str:
    """All rows in full precision, in the units of the results files."""
    names = ["unit", "better", "judged", "median", "mean", "low", "high", "p50", "p90", "p99"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["case", "measured", "system", "metric", "repetitions", *names])
    for row in rows:
        facts = [row.case, row.work, row.label, row.metric, row.num_repetitions]
        writer.writerow([*facts, *(row.summary[name] for name in names)])
    return buffer.getvalue()


def _anchor(name: str, taken: Container[str]) -> str:
    """A unique name without spaces, for links and files."""
    plain = re.sub(r"[^\w.]+|_+", "-", name).strip("-.")
    numbered = (f"{plain}-{number}" for number in count(2))
    return next(one for one in chain([plain], numbered) if one not in taken)


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = names if len(names) <= 6 else names[:3]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more, named below" if rest else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in cells) + " |"


def _metric_section(
    anchor: str, rows: Sequence[ResultRow], has_plot: bool, bounds: Sequence[ResultRow]
) -> Section:
    first = rows[0]
    scale, unit = first.scale
    is_less_better = first.summary["better"] == "less"
    best = (min if is_less_better else max)(rows, key=lambda row: row.summary["mean"])
    name = metric_words(first.metric)
    return Section(
        name=anchor,
        title=f"{name[:1].upper()}{name[1:]} ({': '.join(filter(None, (first.case, first.work)))})",
        lesson=(
            f"{'Less' if is_less_better else 'More'} is better. The mean of {best.label} is "
            f"{figure(best.summary['mean'] * scale)} {unit}"
            + (", the best of them." if len(rows) > 1 else ".")
        ),
        how=_HOW_DRAWN if has_plot else "",
        figure=draw_metric(rows, bounds) if has_plot else None,
        alt=f"Bars of {name}, one for each system; the table has the numbers.",
        table=Table(header=["system", *_HEADER], rows=[[row.label, *row.cells()] for row in rows]),
    )


def draw_metric(rows: Sequence[ResultRow], bounds: Sequence[ResultRow] = ()) -> "Figure":
    """A bar for each row, with its interval, percentiles and the bounds of its system."""
    scale, unit = rows[0].scale
    with chart(1.0 + 0.55 * len(rows)) as (figure, axes):
        for place, row in enumerate(rows):
            found = row.summary
            axes.barh(place, found["mean"] * scale, color=SERIES[place % len(SERIES)], height=0.6)
            if found["low"] is not None:
                ends = [found["low"] * scale, found["high"] * scale]
                axes.plot(ends, [place, place], color=INK, linewidth=1.4)
            spread = [found[part] * scale for part in ("p50", "p90", "p99")]
            axes.plot(spread, [place] * 3, "o", color=INK, markeredgecolor=SURFACE, markersize=5)
        for name, marker in _BOUNDS.items():
            of_system = {
                row.label: row.summary["mean"] * scale for row in bounds if row.metric == name
            }
            places = [place for place, row in enumerate(rows) if row.label in of_system]
            found = [of_system[rows[place].label] for place in places]
            axes.plot(found, places, marker, color=INK, markersize=13, label=name)
        if bounds:
            axes.legend()
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{rows[0].metric} ({unit})")
    return figure


def _other_numbers(groups: Sequence[Sequence[ResultRow]]) -> Section:
    return Section(
        name="other-numbers",
        title="What else was counted",
        lesson="Numbers that no verdict rests on.",
        table=Table(
            header=["metric", "measured", "system", *_HEADER],
            rows=[
                [row.metric, ": ".join(filter(None, (row.case, row.work))), row.label, *row.cells()]
                for rows in groups
                for row in rows
            ],
        ),
    )


def _circumstances(named: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    rows = []
    for name, results in named:
        facts = {"machine": results["machine"].get("cpu", ""), "ended by": results["ended"]}
        facts |= {part: results[part] for part in ("date", "commit", "command")}
        rows += [[f"{name}: {what}", str(value)] for what, value in facts.items()]
        for what, value in results["settings"].items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            rows += [[": ".join(filter(None, (name, what, key))), str(it)] for key, it in parts]
        for one in results["measurements"]:
            if one["failure"] is not None:
                rows.append([f"{name}: {one['system']} has no numbers", one["failure"]])
            elif one["quality"] is not None:
                quality = one["quality"]
                equal = f"{quality['equal']} of {quality['compared']}"
                rows.append([f"{name}: {one['system']}, likeliest tokens equal", equal])
    return Section(
        name="circumstances",
        title="How it was measured",
        lesson="What the numbers depend on besides the code.",
        table=Table(header=["what", "value"], rows=rows),
    )
