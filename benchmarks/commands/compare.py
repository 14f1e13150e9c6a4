"""``moe-runtime bench compare``: better, worse or noise, and exit code 1 on a regression."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.benchmarks.suite.figures import figure, unit_for
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, say_line

Before = Annotated[Path, typer.Argument(metavar="BEFORE.json", help="Results file.")]
After = Annotated[Path, typer.Argument(metavar="AFTER.json", help="Results file of the same case.")]
Bound = Annotated[
    float, typer.Option(min=0.0, max=10.0, help="Differences up to this share are noise.")
]


def bench_compare(
    ctx: typer.Context,
    before: Before,
    after: After,
    bound: Bound = 0.05,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare two results files: better, worse or noise, by a rank test and a bound.

    Exit code 1 when a metric of any system became worse, or one that had numbers failed. What else
    differs between the two, such as the machine, is said on stderr.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    from moe_runtime.benchmarks.suite.judging import compare, differing_settings, lost_systems
    from moe_runtime.benchmarks.suite.measured_work import work_words
    from moe_runtime.benchmarks.suite.results import read_results

    one, other = read_results(before), read_results(after)
    verdicts = compare(one, other, bound)
    for path, results in ((before, one), (after, other)):
        if results["ended"] == "interrupted":
            say_line(f"{path}: was interrupted")
    for line in differing_settings(one, other):
        say_line(line)
    lost = lost_systems(one, other)
    for name, reason in lost.items():
        why = "was not measured after" if reason is None else f"has no numbers after: {reason}"
        say_line(f"{name}: {why}")
    if as_json:
        rows = [dataclasses.asdict(verdict) for verdict in verdicts]
        print_json({"case": one["case"], "bound": bound, "verdicts": rows, "lost": lost})
    else:
        columns = ["before", "after", "change", "", "chance"]
        print_table(
            f"{one['case']}: {before.name} and {after.name}; {work_words(one)}".rstrip("; "),
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
    """The metric with its unit, which a narrow terminal has below it, and both values."""
    factor, name = unit_for(unit, (before, after))
    return f"{metric}, {name}", figure(before * factor), figure(after * factor)
