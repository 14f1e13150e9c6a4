"""``moe-runtime bench layer``: `MoELayer` beside the block of transformers."""

import time
from pathlib import Path

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.expert_layer import (
    Dtype,
    Model,
    Quick,
    Shape,
    Tokens,
    Training,
    parse_dtype,
    parse_tokens,
    show_experts,
)
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.files import check_output_path


def bench_layer(
    ctx: typer.Context,
    model: Model = None,
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
    """Time `MoELayer` on the CPU, routing included, beside transformers' eager and grouped_mm.

    The formula is that of Qwen3-MoE, with the sizes of MODEL's first layer of experts or of a known
    model; weights are random and shared by all. Results are compared as by `bench experts`.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if (model is None) == (shape is None):
        raise ValueError("expected MODEL or --shape, one of them: whose sizes are taken?")
    numbers = parse_tokens(tokens, quick=quick)
    if output is not None:
        check_output_path(output, "results")
    quiet_transformers(session)
    import torch

    from moe_runtime.benchmarks.cases.layer_blocks import PEERS, LayerPlan, measure_layer
    from moe_runtime.benchmarks.experts.layer_shapes import sizes_of_shape
    from moe_runtime.benchmarks.experts.layers import sizes_of_model
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.lab.this_machine import num_usable_cores

    asked = parse_dtype(dtype)
    num_threads = threads or num_usable_cores()
    torch.set_num_threads(num_threads)
    if shape is not None:
        sizes, found = sizes_of_shape(shape), asked or torch.bfloat16
    else:
        assert model is not None
        sizes, found = sizes_of_model(model, asked or "auto")
    plan = LayerPlan(
        sizes=sizes,
        dtype=found,
        tokens=numbers,
        trains=training,
        block_s=0.2 if quick else 0.5,
    )
    rules = Rules(
        judged=[name for name, _, _ in plan.calls()],
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_layer(
            plan,
            rules,
            time.monotonic,
            settings={
                "model": shape or Path(model or "").name,
                "experts": sizes.num_experts,
                "top_k": sizes.top_k,
                "dim_model": sizes.dim_model,
                "dim_hidden": sizes.dim_hidden,
                "dtype": str(found).removeprefix("torch."),
                "tokens": numbers,
                "training": training,
                "num_threads": num_threads,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(
        *(results, output, stop, lambda found: show_experts(found, "layer")),
        as_json=as_json,
        unasked=PEERS,
    )
