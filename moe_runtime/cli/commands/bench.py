"""``moe-runtime bench``: a model beside other systems, servers, kernels, whose tiles it picks."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from moe_runtime.cli import options
from moe_runtime.cli.bench_cases.dispatch import bench_dispatch
from moe_runtime.cli.bench_cases.expert_layer import bench_experts
from moe_runtime.cli.bench_cases.io import bench_io
from moe_runtime.cli.bench_cases.layer import bench_layer
from moe_runtime.cli.bench_cases.policies import bench_policies
from moe_runtime.cli.bench_cases.throughput import bench_throughput
from moe_runtime.cli.bench_cases.training import bench_training
from moe_runtime.cli.commands.bench_compare import bench_compare
from moe_runtime.cli.commands.bench_latency import bench_latency
from moe_runtime.cli.commands.bench_report import bench_report
from moe_runtime.cli.commands.bench_serve import bench_serve
from moe_runtime.cli.console import Session, print_json, print_table
from moe_runtime.cli.strict import StrictCommand

if TYPE_CHECKING:
    from moe_runtime.kernels.grouped_gemm.tuner import Measured

# One layer of Qwen3-30B-A3B at three batches, OLMoE and Mixtral.
_SHAPES = [
    "128,2048,768,128,8",
    "1024,2048,768,128,8",
    "8192,2048,768,128,8",
    "4096,2048,1024,64,8",
    "4096,4096,14336,8,2",
]

Tune = Annotated[
    bool, typer.Option("--tune", help="Try other tiles and keep the fastest for later runs.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="T,H,I,E,K",
        help="Tokens, hidden size, intermediate size, experts and top-k; several times if wanted.",
    ),
]
Table = Annotated[
    Path | None, typer.Option(help="Write the tiles to this file, not to the user's own table.")
]


def bench_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Measure a model, kernels on this machine, or a server.", no_args_is_help=True
    )
    app.command(cls=StrictCommand)(kernels)
    app.command("latency", cls=StrictCommand)(bench_latency)
    app.command("throughput", cls=StrictCommand)(bench_throughput)
    app.command("io", cls=StrictCommand)(bench_io)
    app.command("experts", cls=StrictCommand)(bench_experts)
    app.command("layer", cls=StrictCommand)(bench_layer)
    app.command("training", cls=StrictCommand)(bench_training)
    app.command("policies", cls=StrictCommand)(bench_policies)
    app.command("dispatch", cls=StrictCommand)(bench_dispatch)
    app.command("serve", cls=StrictCommand)(bench_serve)
    app.command("compare", cls=StrictCommand)(bench_compare)
    app.command("report", cls=StrictCommand)(bench_report)
    app.callback()(lambda: None)
    return app


def kernels(
    ctx: typer.Context,
    tune: Tune = False,
    shape: Shapes = None,
    table: Table = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time every product of a layer of experts on the GPU, forward and backward, in bf16.

    With --tune, other tiles are tried as well (some minutes a shape), and the fastest are written
    to a table that every later run on this model of GPU reads. Tiles change the order of sums, and
    so the last bits of a result. Ctrl-C keeps what was found so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    import torch

    from moe_runtime.kernels.triton_support import require_triton

    if table is not None and not tune:
        raise ValueError("--table belongs to --tune: without it nothing is written")
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA or ROCm GPU, and torch sees none here")
    require_triton(torch.device("cuda"))
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from moe_runtime.kernels.grouped_gemm.table import table_path, write_table
    from moe_runtime.kernels.grouped_gemm.tiles import describe_device
    from moe_runtime.kernels.grouped_gemm.tuner import (
        candidate_tiles,
        layer_problems,
        parse_shape,
    )
    from moe_runtime.kernels.grouped_gemm.tuner import tune as tune_problems

    shapes = [parse_shape(text) for text in shape or _SHAPES]
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    path = table or table_path(gpu)
    room = describe_device(device)
    found: list[Measured] = []
    for layer in shapes:
        for measured in tune_problems(
            layer_problems(layer, torch.bfloat16, device),
            (lambda problem: candidate_tiles(problem, room)) if tune else lambda problem: (),
            median_seconds,
            refusals=(OutOfResources, PTXASError, CompilationError),
            num_threads=os.cpu_count() or 1,
        ):
            found.append(measured)
            if tune:
                write_table(path, gpu, {measured.problem.key: measured.tile})
            if not as_json:
                print(describe(measured), flush=True)
    if as_json:
        written = str(path) if tune else None
        print_json({"gpu": gpu, "table": written, "products": [as_dict(one) for one in found]})
    elif tune:
        print_table("", [("", "left"), ("", "left")], [("written to", str(path))])


def median_seconds(call: Callable[[], Any]) -> float:
    """Median time of a call by the GPU's own clock, with a cold second-level cache."""
    from triton.testing import do_bench

    return cast(float, do_bench(call, warmup=10, rep=40, return_mode="median")) / 1e3


def describe(measured: "Measured") -> str:
    """One line for a terminal."""
    key, tile = measured.problem.key, measured.tile
    line = (
        f"{measured.problem.name:33} N={key.dim_n:<6} K={key.dim_k:<6} rows={key.rows:<6} "
        f"{tile.block_m:>3} x {tile.block_n:>3} x {tile.block_k:>3} "
        f"{measured.seconds * 1e3:9.3f} ms {measured.problem.flops / measured.seconds / 1e12:7.1f} "
        "TFLOP/s"
    )
    if measured.num_tried > 1:
        line += f"  {measured.rule_seconds / measured.seconds:.2f} times the rule's"
    return line


def as_dict(measured: "Measured") -> dict[str, Any]:
    """What `--json` says of a product."""
    return {
        "name": measured.problem.name,
        **measured.problem.key._asdict(),
        "tile": dataclasses.asdict(measured.tile),
        "seconds": measured.seconds,
        "rule_seconds": measured.rule_seconds,
        "tflops": measured.problem.flops / measured.seconds / 1e12,
        "tried": measured.num_tried,
        "refused": measured.num_refused,
    }
