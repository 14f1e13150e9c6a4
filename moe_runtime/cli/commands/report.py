"""``moe-runtime report``: draw a trace, or the statistics of a run, as a page."""

import dataclasses
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_runtime.cli import options
from moe_runtime.cli.commands.predictor import check_trainable
from moe_runtime.cli.commands.replay import ModelledTime, NumExperts, parse_shares
from moe_runtime.cli.console import loading_bar, print_json, print_rows
from moe_runtime.cli.strict import FOLDER, refuse_given
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import check_output_folder

if TYPE_CHECKING:
    from moe_runtime.lab.report.page import Page


@dataclass(frozen=True, kw_only=True)
class OfTraces:
    """Options of the page of a trace.

    Args:
        policy: Policies to compare, separated by commas.
        predictor: Predictors to compare, separated by commas; the last one prefetches. none omits
            them.
        capacity: Share of the experts that fit in memory, for bytes and time.
        bandwidth: Bytes per second of the modelled link.
        expert_size: Bytes of one expert; the trace's own, or 16MiB without it.
        max_accesses: Replay only this many of the last requests for experts.
    """

    policy: str = "lfu-aging,reuse"
    predictor: str = "popularity,previous-token,layer-affinity,naive-bayes"
    capacity: str = "25%"
    bandwidth: str = "25GB"
    expert_size: str | None = None
    max_accesses: options.Count = 60_000
    num_experts: NumExperts = None


def report(
    ctx: typer.Context,
    *,
    source: Annotated[Path, typer.Argument(metavar="TRACE|STATS")],
    output: options.Output = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar=FOLDER)] = None,
    asked: OfTraces,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Draw a trace or the statistics of a run as one HTML page that needs no network.

    For a trace: which experts the tokens visit, when they visit them again, hit rates of caches of
    each size, how well the next experts can be predicted, and the cost and gain of prefetching.
    For a run: where its experts were, which reads it made and why, and where the time went.

    Args:
        source: A trace of `run --trace` (or another file that `replay` reads), or what `run --json`
            printed.
        output: Page to write (.html).
        png: Also write every plot into a folder.
    """
    if png is not None:
        check_output_folder(png, "plots")
        if output.suffix == ".png" and output.resolve().parent == png.resolve():
            raise ValueError(f"{output}: the page would lie among the plots; name another file")
    check_drawing()
    from moe_runtime.lab.report.page import write_page, write_plots

    if source.suffix == ".json":
        if source.exists():
            names = {field.name for field in fields(OfTraces)}
            refuse_given(ctx, names, f"is about traces, and {source} is of a run")
        from moe_runtime.lab.report.run_page import read_run_stats, run_page

        page = run_page(read_run_stats(source), source.name)
    else:
        page = _page_of_trace(source, asked)
    write_page(page, output)
    plots = [] if png is None else write_plots(page, png)
    facts = {"report": str(output), "plots": [str(path) for path in plots]}
    if as_json:
        print_json({**facts, "sections": [section.name for section in page.sections]})
    else:
        shown = [("page", str(output)), *(("plot", str(path)) for path in plots)]
        print_rows("written", shown, to_stderr=False)


def _page_of_trace(source: Path, asked: OfTraces) -> "Page":
    from moe_runtime.lab.report.findings import ReportSettings, find
    from moe_runtime.lab.report.trace_page import trace_page
    from moe_runtime.lab.traces.readers import read_any_trace

    shares = parse_shares(asked.capacity)
    if len(shares) != 1:
        raise ValueError(f"--capacity of a report is one share such as 25%, got {asked.capacity!r}")
    machine = ModelledTime(bandwidth=asked.bandwidth, expert_size=asked.expert_size).machine()
    assert machine is not None, "there is a bandwidth"
    settings = ReportSettings(
        policies=_names(asked.policy),
        predictors=[check_trainable(name) for name in _names(asked.predictor)],
        machine=machine,
        capacity=shares[0],
        max_accesses=asked.max_accesses,
    )
    with loading_bar() as progress:
        progress(f"reading {source.name}", 0, 0)
        trace = read_any_trace(source, num_experts=asked.num_experts)
        trace.require_choices(source)
        if asked.expert_size is None and trace.expert_bytes is not None:
            machine = dataclasses.replace(settings.machine, expert_bytes=trace.expert_bytes)
            settings = dataclasses.replace(settings, machine=machine)
        elif asked.expert_size is None:
            settings = dataclasses.replace(settings, assumes_size=True)
        found = find(trace, settings, on_progress=lambda what: progress(what, 0, 0))
        progress("drawing", 0, 0)
        return trace_page(found, source.name)


def _names(text: str) -> list[str]:
    return [] if text == "none" else list(dict.fromkeys(map(str.strip, text.split(","))))


def check_drawing() -> None:
    """Raises UnsupportedModelError without matplotlib."""
    import importlib.util

    if not importlib.util.find_spec("matplotlib"):
        raise UnsupportedModelError(
            "plots need matplotlib; install it with pip install 'moe-runtime[report]'"
        )
