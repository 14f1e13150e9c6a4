"""``moe-runtime bench report``: results files as a page, plots, Markdown and CSV."""

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli import options
from moe_runtime.cli.commands.report import check_drawing
from moe_runtime.cli.console import Session, print_json, print_rows, say_line
from moe_runtime.cli.strict import FOLDER
from moe_runtime.files import check_output_folder, check_output_path, write_text

Results = Annotated[
    list[Path], typer.Argument(metavar="RESULTS...", help="Results files of bench commands.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Page to write (.html).")]
Png = Annotated[
    Path | None, typer.Option("--png", metavar=FOLDER, help="Also write every plot into a folder.")
]
Markdown = Annotated[Path | None, typer.Option(help="Also write the numbers as a Markdown table.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Also write the numbers as CSV.")]


def bench_report(
    ctx: typer.Context,
    results: Results,
    output: Output = Path("bench.html"),
    png: Png = None,
    markdown: Markdown = None,
    csv: Csv = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Draw results files: one page that needs no network, several machines side by side."""
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    for path, what in ((output, "report"), (markdown, "table"), (csv, "table")):
        if path is not None:
            check_output_path(path, what)
    if png is not None:
        check_output_folder(png, "plots")
        check_drawing()
    from moe_runtime.benchmarks.suite.report_page import (
        result_rows,
        results_page,
        to_csv,
        to_markdown,
    )
    from moe_runtime.benchmarks.suite.results import read_results
    from moe_runtime.lab.report.page import write_page, write_plots

    places = [os.path.realpath(path) for path in results]
    for number, path in enumerate(results):
        if places[number] in places[:number]:
            raise ValueError(f"{path}: is given a second time; give each results file once")
    num_named = Counter(path.name for path in results)
    # Files of the same name in several folders are told apart by these.
    names = [path.name if num_named[path.name] == 1 else str(path) for path in results]
    named = [(name, read_results(path)) for name, path in zip(names, results, strict=True)]
    for path, (_, found) in zip(results, named, strict=True):
        if found["ended"] == "interrupted":
            say_line(f"{path}: was interrupted, and the page says so")
        if not any(one["summary"] for one in found["measurements"]):
            say_line(f"{path}: no system has numbers; the page says what failed")
    has_plots = find_spec("matplotlib") is not None
    if not has_plots:
        say_line(
            "the page has numbers and no plots; "
            "pip install 'moe-runtime[report]' brings what draws them"
        )
    page, rows = results_page(named, has_plots=has_plots), result_rows(named)
    write_page(page, output)
    written = [output, *([] if png is None else write_plots(page, png))]
    for path, text in ((markdown, to_markdown(rows)), (csv, to_csv(rows))):
        if path is not None:
            write_text(path, text)
            written.append(path)
    if as_json:
        print_json({"report": str(output), "written": [str(path) for path in written]})
    else:
        print_rows("written", [("file", str(path)) for path in written], to_stderr=False)
