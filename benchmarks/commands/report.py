"""``bench report`` and ``bench compare``: show results files, and compare two of them."""

import dataclasses
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.benchmarks.suite.figures import figure, unit_for
from moe_runtime.cli import options
from moe_runtime.cli.commands.report import check_drawing
from moe_runtime.cli.console import print_json, print_rows, print_table, say_line
from moe_runtime.cli.strict import FOLDER
from moe_runtime.files import check_output_folder, write_text


def bench_report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...")],
    output: options.Output = Path("bench.html"),
    png: Annotated[Path | None, typer.Option(metavar=FOLDER)] = None,
    markdown: Path | None = None,
    csv: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Draw results files as one page that needs no network; several machines stand side by side.

    Args:
        results: Results files of bench commands.
        output: Page to write (.html).
        png: Also write every plot into a folder.
        markdown: Also write the numbers as a Markdown table.
        csv: Also write the numbers as CSV.
    """
    if png is not None:
        check_output_folder(png, "plots")
        check_drawing()
    from moe_runtime.benchmarks.suite import read_results, report_page
    from moe_runtime.lab.report.page import write_page, write_plots

    places = [os.path.realpath(path) for path in results]
    for path in (p for number, p in enumerate(results) if places[number] in places[:number]):
        raise ValueError(f"{path}: is given a second time; give each results file once")
    num_named = Counter(path.name for path in results)
    # Folders distinguish files of the same name.
    names = [path.name if num_named[path.name] == 1 else str(path) for path in results]
    named = [(name, read_results(path)) for name, path in zip(names, results, strict=True)]
    for path, (_, found) in zip(results, named, strict=True):
        if found["ended"] == "interrupted":
            say_line(f"{path}: was interrupted, and the page says so")
        if not any(one["summary"] for one in found["measurements"]):
            say_line(f"{path}: no system has numbers; the page says what failed")
    if not (has_plots := find_spec("matplotlib") is not None):
        why = "pip install 'moe-runtime[report]' brings what draws them"
        say_line(f"the page has numbers and no plots; {why}")
    page, rows = (
        report_page.results_page(named, has_plots=has_plots),
        report_page.result_rows(named),
    )
    write_page(page, output)
    written = [output, *([] if png is None else write_plots(page, png))]
    for path, text in ((markdown, report_page.to_markdown(rows)), (csv, report_page.to_csv(rows))):
        if path is not None:
            write_text(path, text)
            written.append(path)
    if as_json:
        print_json({"report": str(output), "written": [str(path) for path in written]})
    else:
        print_rows("written", [("file", str(path)) for path in written], to_stderr=False)


def bench_compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.json")],
    after: Annotated[Path, typer.Argument(metavar="AFTER.json")],
    bound: Annotated[float, typer.Option(min=0.0, max=10.0)] = 0.05,
    as_json: options.Json = False,
) -> None:
    """Compare two results files: better, worse or noise, by a rank test and a bound.

    The exit code is 1 if a metric of any system became worse, or if a system failed that had
    numbers before. Other differences, such as the machine, go to stderr.

    Args:
        before: Results file.
        after: Results file of the same case.
        bound: Relative differences up to this count as noise.
    """
    from moe_runtime.benchmarks.suite import comparing, read_results

    one, other = read_results(before), read_results(after)
    verdicts = comparing.compare(one, other, bound)
    for path, results in ((before, one), (after, other)):
        if results["ended"] == "interrupted":
            say_line(f"{path}: was interrupted")
    for line in comparing.differing_settings(one, other):
        say_line(line)
    lost = comparing.lost_systems(one, other)
    for name, reason in lost.items():
        why = "was not measured after" if reason is None else f"has no numbers after: {reason}"
        say_line(f"{name}: {why}")
    if as_json:
        rows = [dataclasses.asdict(verdict) for verdict in verdicts]
        print_json({"case": one["case"], "bound": bound, "verdicts": rows, "lost": lost})
    else:
        columns = ["before", "after", "change", "", "chance"]
        print_table(
            f"{one['case']}: {before.name} and {after.name}; {comparing.heading_words(one)}".rstrip(
                "; "
            ),
            [("system", "left"), ("", "left"), *((name, "right") for name in columns)],
            [
                [
                    found.system,
                    *_in_unit(found.metric, found.before, found.after, found.unit),
                    f"{found.change:+.1%}",
                    found.word,
                    f"{found.chance:.2g}",
                ]
                for found in verdicts
            ],
        )
    has_failed = any(reason is not None for reason in lost.values())
    if has_failed or any(found.word == "worse" for found in verdicts):
        raise typer.Exit(1)


def _in_unit(metric: str, before: float, after: float, unit: str) -> tuple[str, str, str]:
    """The metric with its unit (on a second line in a narrow terminal), and both values."""
    factor, name = unit_for(unit, (before, after))
    return f"{metric}, {name}", figure(before * factor), figure(after * factor)
