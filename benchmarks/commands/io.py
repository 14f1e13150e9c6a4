"""``moe-runtime bench io``: the disk, as experts are read from it, beside plain reads."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.tables import show_systems
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, fetch_model, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.config import format_bytes
from moe_runtime.files import check_output_path

_SPREADS = {"an expert": "expert_read_s"}
_SINGLES = {"all of them": "bytes_per_s", "from storage": "from_storage"}

Experts = Annotated[
    int | None,
    typer.Option(min=1, help="Experts that a repetition reads. [128; quick: 32; at most all]"),
]
InFlight = Annotated[int, typer.Option(min=1, max=256, help="Experts on their way at any time.")]
IoThreads = Annotated[
    int, typer.Option(min=1, max=256, help="Threads that serve this project's reads.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer experts, half a minute at most.")]
Time = Annotated[
    float | None,
    typer.Option(
        "--time", min=1.0, help="Seconds after which no repetition begins. [120; quick: 30]"
    ),
]


def bench_io(
    ctx: typer.Context,
    model: options.Model,
    experts: Experts = None,
    in_flight: InFlight = 4,
    io_threads: IoThreads = 4,
    max_s: Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time reads of MODEL's experts from disk: bytes a second, and how long an expert takes.

    Through this project's queue of direct reads, and by threads that call preadv, past the page
    cache and through it. What the kernel keeps of the files is dropped before every repetition;
    the table says what share came from storage. Bytes are compared with those of the file.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if output is not None:
        check_output_path(output, "results")
    quiet_transformers(session)
    from moe_runtime.benchmarks.cases.disk_reads import ReadPlan, measure_reads
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.checkpoints.expert_map import map_experts
    from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint

    checkpoint = open_checkpoint(fetch_model(model), "auto")
    layouts = map_experts(build_on_meta(checkpoint), checkpoint).layouts
    num_experts = min(experts or (32 if quick else 128), len(layouts))
    plan = ReadPlan(
        layouts=layouts,
        num_experts=num_experts,
        in_flight=min(in_flight, num_experts),
        io_threads=io_threads,
    )
    rules = Rules(
        judged=("bytes_per_s",), precision=precision, max_s=max_s or (30.0 if quick else 120.0)
    )
    sizes = sorted({layout.tensor_bytes for layout in layouts.values()})
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_reads(
            plan,
            rules,
            time.monotonic,
            settings={
                "model": Path(model).name,
                "expert_bytes": sizes,
                "experts": num_experts,
                "in_flight": plan.in_flight,
                "io_threads": io_threads,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(
        *(results, output, stop, show_reads),
        as_json=as_json,
        unasked=("preadv", "preadv:direct"),
    )


def show_reads(results: dict[str, Any]) -> None:
    """Prints a column for each way to read."""
    settings = results["settings"]
    sizes = settings["expert_bytes"]
    size = format_bytes(sizes[0]) + (f" to {format_bytes(sizes[-1])}" if len(sizes) > 1 else "")
    title = f"experts of {settings['model']}, {size} each, {settings['in_flight']} at once"
    show_systems(results, title, _SPREADS, _SINGLES, "tensors equal the file's")
