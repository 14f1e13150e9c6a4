"""``moe-runtime bench dispatch``: the exchange of tokens beside a padded all-to-all."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.tables import show_systems
from moe_runtime.cli import options
from moe_runtime.cli.console import Session
from moe_runtime.cli.processes import joined_processes
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.config import require_known
from moe_runtime.files import check_output_path

if TYPE_CHECKING:
    from moe_runtime.benchmarks.cases.dispatch_rounds import DispatchBenchPlan

Ranks = Annotated[int, typer.Option(min=2, max=64, help="Processes here; torchrun has its own.")]
Tokens = Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of each process.")]
Dim = Annotated[int, typer.Option(min=1, max=1 << 16, help="Width of a token.")]
Experts = Annotated[int, typer.Option(min=2, max=1 << 14, help="Experts of all processes.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, max=1 << 10, help="Choices of a token.")]
Load = Annotated[
    str, typer.Option(help="How often experts are chosen: balanced, uniform, zipf; with commas.")
]
Dtype = Annotated[str, typer.Option(help="Types of rows: float32, bfloat16; with commas.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds, about a minute.")]


def bench_dispatch(
    ctx: typer.Context,
    ranks: Ranks = 2,
    tokens: Tokens = 2048,
    dim: Dim = 1024,
    experts: Experts = 32,
    top_k: TopK = 2,
    load: Load = "balanced,uniform,zipf",
    dtype: Dtype = "float32,bfloat16",
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time dispatch and combine between processes (gloo), beside a padded all-to-all.

    The peer sends equal parts, as many slots for each expert as the busiest one needs. Results must
    be equal to the bit. Processes are started here, one thread each, or by torchrun.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    loads = _names("load", load, ("balanced", "uniform", "zipf"))
    dtypes = _names("dtype", dtype, ("float32", "bfloat16"))
    if top_k > experts:
        raise ValueError(f"--top-k {top_k}: expected at most --experts, which is {experts}")
    if output is not None:
        check_output_path(output, "results")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined_processes(session))
        num_ranks = ranks if group is None else group.size()
        if experts % num_ranks:
            raise ValueError(f"--experts {experts}: expected a multiple of the {num_ranks} ranks")
        from moe_runtime.benchmarks.cases.dispatch_rounds import DispatchBenchPlan, measure_dispatch
        from moe_runtime.benchmarks.cases.padded_exchange import ExchangeShape
        from moe_runtime.benchmarks.suite.runner import Rules

        plan = DispatchBenchPlan(
            shapes=[
                ExchangeShape(tokens, dim, experts, top_k, one, kind)
                for kind in dtypes
                for one in loads
            ],
            rounds=3 if quick else 5,
        )
        rules = Rules(
            judged=[f"{plan.name(shape)}_s" for shape in plan.shapes],
            precision=precision,
            max_s=max_s or (60.0 if quick else 300.0),
        )
        if group is None:
            stack.enter_context(_started_here(plan, num_ranks))
        stop = stack.enter_context(stop_on_signals(shared.STOPPING))
        results = measure_dispatch(
            plan,
            rules,
            time.monotonic,
            settings={
                "backend": "gloo",
                "ranks": num_ranks,
                "tokens": tokens,
                "dim": dim,
                "experts": experts,
                "top_k": top_k,
                "loads": loads,
                "dtypes": dtypes,
                "rounds": plan.rounds,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    if results is not None:
        shared.end_case(results, output, stop, show_dispatch, as_json=as_json)


@contextlib.contextmanager
def _started_here(plan: "DispatchBenchPlan", num_ranks: int) -> Iterator[None]:
    from moe_runtime.benchmarks.cases.dispatch_ranks import ranks_here

    with (
        tempfile.TemporaryDirectory() as folder,
        ranks_here(plan, num_ranks, str(Path(folder, "store"))),
    ):
        yield


def _names(what: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        require_known(what, name, known)
    return names


def show_dispatch(results: dict[str, Any]) -> None:
    """Prints a column for each side."""
    from moe_runtime.benchmarks.suite.measured_work import counted

    settings = results["settings"]
    names = [f"{load}_{kind}" for kind in settings["dtypes"] for load in settings["loads"]]
    show_systems(
        results,
        f"dispatch and combine, {counted('{} ranks', settings['ranks'])}",
        {name.replace("_", ", "): f"{name}_s" for name in names},
        {f"{name.replace('_', ', ')}, sent": f"{name}_bytes" for name in names},
        "tokens equal",
    )
