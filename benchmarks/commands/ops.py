"""``moe-runtime bench ops``: what each op of a layer of experts takes on this CPU."""

import time
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.expert_layer import (
    Dtype,
    Quick,
    Tokens,
    Training,
    parse_dtype,
    parse_tokens,
)
from moe_runtime.benchmarks.commands.tables import mean_cell
from moe_runtime.benchmarks.experts.layer_shapes import LAYER_SHAPES, sizes_of_shape
from moe_runtime.benchmarks.suite.figures import unit_for
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_table
from moe_runtime.cli.stopping import stop_on_signals

Shape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: LAYER_SHAPES),
        help="Sizes of a layer of olmoe-1b-7b, qwen3-30b-a3b, mixtral-8x7b or gpt-oss-20b; 32 "
        "experts of 512 x 1024, 4 a token, when omitted.",
    ),
]


def bench_ops(
    ctx: typer.Context,
    shape: Shape = None,
    tokens: Tokens = None,
    training: Training = False,
    dtype: Dtype = "auto",
    threads: shared.Threads = None,
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time each op of a layer of experts on the CPU: sorting, products, combining, the whole.

    Weights are random. An op whose result differs from its reference's gets no numbers; two files
    of this case say which op became quicker or slower. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    numbers = parse_tokens(tokens, quick=quick)
    shared.check_results(output, ())
    import torch

    from moe_runtime.benchmarks.cases.op_times import SIZES, OpsPlan, measure_ops
    from moe_runtime.benchmarks.experts.layers import kinds_of_calls
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.lab.this_machine import num_usable_cores

    plan = OpsPlan(
        sizes=SIZES if shape is None else sizes_of_shape(shape),
        dtype=parse_dtype(dtype) or torch.bfloat16,
        tokens=numbers,
        trains=training,
        block_s=0.05 if quick else 0.2,
    )
    num_threads = threads or num_usable_cores()
    torch.set_num_threads(num_threads)
    rules = Rules(
        judged=[name for name, _, _ in kinds_of_calls(numbers, trains=training)],
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_ops(
            plan,
            rules,
            time.monotonic,
            settings={
                "model": shape,
                **plan.sizes._asdict(),
                "dtype": str(plan.dtype).removeprefix("torch."),
                "tokens": numbers,
                "training": training,
                "num_threads": num_threads,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_ops, as_json=as_json)


def show_ops(results: dict[str, Any]) -> None:
    """Prints a row for each op and pass, and a column for each number of tokens."""
    settings = results["settings"]
    rows = []
    for one in results["measurements"]:
        for kind in ("forward", "backward"):
            names = [f"{kind}_{tokens}_s" for tokens in settings["tokens"]]
            medians = [one["summary"][name]["median"] for name in names if name in one["summary"]]
            if medians:
                factor, unit = unit_for("s", medians)
                cells = (mean_cell(one, name, factor) for name in names)
                rows.append([one["system"], f"{kind}, {unit}", *cells])
    title = (
        f"ops: E={settings['num_experts']} K={settings['top_k']} D={settings['dim_model']} "
        f"F={settings['dim_hidden']}, {settings['dtype']}"
    )
    columns = [(f"T={tokens}", "right") for tokens in settings["tokens"]]
    if rows:
        print_table(title, [("", "left"), ("", "left"), *columns], rows)
