"""``moe-runtime report``: a trace, or the statistics of a run, as a page to look at."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import Session, loading_bar, print_json, print_rows
from moe_runtime.cli.strict import FOLDER, refuse_given
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import check_output_folder, check_output_path

if TYPE_CHECKING:
    from moe_runtime.lab.report.page import Page

Source = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE|STATS",
        help="A trace of `run --trace` (or another file that `replay` reads), or what "
        "`run --json` printed.",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Page to write (.html).")]
Png = Annotated[
    Path | None, typer.Option("--png", metavar=FOLDER, help="Also write every plot into a folder.")
]
Policies = Annotated[
    str, typer.Option("--policy", help="Policies to compare, with commas between.")
]
Predictors = Annotated[
    str,
    typer.Option(
        "--predictor",
        help="Predictors to judge, with commas between; the last one prefetches. none leaves "
        "them out.",
    ),
]
Capacity = Annotated[str, typer.Option(help="Share of the experts that fit, for bytes and time.")]
MaxAccesses = Annotated[
    int, typer.Option(min=1, help="Replay the last so many experts asked for, of a long trace.")
]

_OF_TRACES = (
    "policy",
    "predictor",
    "capacity",
    "bandwidth",
    "expert_size",
    "max_accesses",
    "num_experts",
)
"""Parameters that the page of a run has no use for."""


def report(
    ctx: typer.Context,
    source: Source,
    output: Output = Path("report.html"),
    png: Png = None,
    policy: Policies = "lfu-aging,reuse",
    predictor: Predictors = "popularity,previous-token,layer-affinity,naive-bayes",
    capacity: Capacity = "25%",
    bandwidth: Annotated[str, typer.Option(help="Bytes per second of the modelled link.")] = "25GB",
    expert_size: Annotated[
        str | None,
        typer.Option(help="Bytes of one expert; the trace's own, or 16MiB where it lacks them."),
    ] = None,
    max_accesses: MaxAccesses = 60_000,
    num_experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of a layer, for files that do not say.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
    config: options.Config = None,
) -> None:
    """Draw a trace or the statistics of a run: one page that needs no network.

    Of a trace: which experts the tokens visit, how soon they come back, what caches of each size
    would find, how well the next experts can be predicted, what prefetching would move and save. Of
    a run: where its experts were, what was read and why, where the time went.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    check_output_path(output, "report")
    if png is not None:
        check_output_folder(png, "plots")
        if output.suffix == ".png" and output.resolve().parent == png.resolve():
            raise ValueError(f"{output}: the page would lie among the plots; name another file")
    check_drawing()
    from moe_runtime.lab.report.page import write_page, write_plots

    if source.suffix == ".json":
        if source.exists():
            refuse_given(ctx, _OF_TRACES, f"is about traces, and {source} is of a run")
        page = _page_of_run(source)
    else:
        page = _page_of_trace(
            source,
            policies=_names(policy),
            predictors=_names(predictor),
            capacity=capacity,
            bandwidth=bandwidth,
            expert_size=expert_size,
            max_accesses=max_accesses,
            num_experts=num_experts,
        )
    write_page(page, output)
    plots = [] if png is None else write_plots(page, png)
    facts = {"report": str(output), "plots": [str(path) for path in plots]}
    if as_json:
        print_json({**facts, "sections": [section.name for section in page.sections]})
    else:
        shown = [("page", str(output)), *(("plot", str(path)) for path in plots)]
        print_rows("written", shown, to_stderr=False)


def _page_of_run(source: Path) -> "Page":
    from moe_runtime.lab.report.run_page import read_run_stats, run_page

    return run_page(read_run_stats(source), source.name)


def _page_of_trace(
    source: Path,
    *,
    policies: list[str],
    predictors: list[str],
    capacity: str,
    bandwidth: str,
    expert_size: str | None,
    max_accesses: int,
    num_experts: int | None,
) -> "Page":
    from moe_runtime.cli.commands.predictor import check_trainable
    from moe_runtime.cli.commands.replay import ASSUMED_EXPERT, parse_shares
    from moe_runtime.lab.replay.timed import Machine
    from moe_runtime.lab.report.findings import ReportSettings, find
    from moe_runtime.lab.report.trace_page import trace_page
    from moe_runtime.lab.traces.readers import read_any_trace

    shares = parse_shares(capacity)
    if len(shares) != 1:
        raise ValueError(f"--capacity of a report is one share such as 25%, got {capacity!r}")
    settings = ReportSettings(
        policies=policies,
        predictors=[check_trainable(name) for name in predictors],
        machine=Machine(
            bytes_per_s=options.bytes_of(
                bandwidth.removesuffix("/s"), "--bandwidth", needs_unit=True
            ),
            latency_s=1e-4,
            expert_bytes=options.bytes_of(expert_size or ASSUMED_EXPERT, "--expert-size"),
            layer_s=5e-4,
            expert_s=1e-4,
        ),
        capacity=shares[0],
        max_accesses=max_accesses,
    )
    with loading_bar() as progress:
        progress(f"reading {source.name}", 0, 0)
        trace = read_any_trace(source, num_experts=num_experts)
        trace.require_choices(source)
        if expert_size is None and trace.expert_bytes is not None:
            machine = dataclasses.replace(settings.machine, expert_bytes=trace.expert_bytes)
            settings = dataclasses.replace(settings, machine=machine)
        elif expert_size is None:
            settings = dataclasses.replace(settings, assumes_size=True)
        found = find(trace, settings, on_progress=lambda what: progress(what, 0, 0))
        progress("drawing", 0, 0)
        return trace_page(found, source.name)


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",")]


def check_drawing() -> None:
    """Refuses to go on without the package that draws.

    Raises:
        UnsupportedModelError: it is missing; the message says how to install it.
    """
    import importlib.util

    if not importlib.util.find_spec("matplotlib"):
        raise UnsupportedModelError(
            "plots need matplotlib; install it with pip install 'moe-runtime[report]'"
        )
