"""``moe-runtime bench kernels``: products of layers on a GPU, and the tiles that it picks."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, say_line
from moe_runtime.cli.stopping import stop_on_signals

if TYPE_CHECKING:
    from moe_runtime.kernels.grouped_gemm.tuner import LayerBatch, Measured

# One layer of Qwen3-30B-A3B at three batches, OLMoE and Mixtral.
_SHAPES = [
    "128,2048,768,128,8",
    "1024,2048,768,128,8",
    "8192,2048,768,128,8",
    "4096,2048,1024,64,8",
    "4096,4096,14336,8,2",
]

_REPEATED_S = 120.0
"""Seconds after which no repetition begins that a results file is to have."""

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


def bench_kernels(
    ctx: typer.Context,
    tune: Tune = False,
    shape: Shapes = None,
    table: Table = None,
    output: shared.Output = None,
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
        raise ValueError("--table belongs to --tune: without it no tiles are written")
    shared.check_results(output, ())
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

    shapes = [*dict.fromkeys(parse_shape(text) for text in shape or _SHAPES)]
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    path = table or table_path(gpu)
    room = describe_device(device)
    found: list[tuple[LayerBatch, Measured]] = []
    with stop_on_signals(shared.STOPPING) as stop:
        for layer in shapes:
            for measured in tune_problems(
                layer_problems(layer, torch.bfloat16, device),
                (lambda problem: candidate_tiles(problem, room)) if tune else lambda problem: (),
                median_seconds,
                refusals=(OutOfResources, PTXASError, CompilationError),
                num_threads=os.cpu_count() or 1,
            ):
                found.append((layer, measured))
                if tune:
                    write_table(path, gpu, {measured.problem.key: measured.tile})
                if not as_json:
                    print(describe(measured), flush=True)
                if stop.is_set:
                    break
            if stop.is_set:
                break
        unwritten = None
        if output is not None:
            unwritten = keep_products(output, found, gpu, lambda: stop.is_set)
    written = str(path) if tune else None
    if as_json:
        rows = [as_dict(measured) for _, measured in found]
        print_json({"gpu": gpu, "table": written, "products": rows})
    elif tune:
        print_table("", [("", "left"), ("", "left")], [("written to", str(path))])
    if unwritten is not None:
        say_line(unwritten)
    if stop.is_set:
        raise typer.Exit(stop.exit_code)
    if unwritten is not None:
        raise typer.Exit(2)


def keep_products(
    output: Path,
    found: "Sequence[tuple[LayerBatch, Measured]]",
    gpu: str,
    is_stopping: Callable[[], bool],
) -> str | None:
    """Repeats products in turn, and writes a results file, as `shared.keep_results`.

    Args:
        output: the file.
        found: layers and their products, in the tiles that these have.
        gpu: its name.
        is_stopping: asked before each repetition.
    """
    from moe_runtime.benchmarks.cases.product_times import TimedProduct, measure_products
    from moe_runtime.benchmarks.suite.runner import Rules

    products = [TimedProduct(layer, measured, median_seconds) for layer, measured in found]
    results = measure_products(
        products,
        Rules(judged=("product_s",), max_s=_REPEATED_S),
        time.monotonic,
        settings={
            "gpu": gpu,
            "dtype": "bfloat16",
            "tiles": {one.name: dataclasses.asdict(one.tile) for one in products},
        },
        is_stopping=is_stopping,
    )
    return shared.keep_results(results, output)


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
