"""``moe-runtime bench throughput``: batches of prompts, tokens a second, beside other systems."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.bench_cases import shared
from moe_runtime.cli.console import Session, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget

_SPREADS = {"tokens/s of a step": ("step_tokens_per_s", 1.0)}
_SINGLES = {
    "new tokens/s in all": ("new_tokens_per_s", 1.0),
    "prompt tokens/s": ("prompt_tokens_per_s", 1.0),
    **shared.MEMORY_ROWS,
}

Batch = Annotated[int, typer.Option(min=1, max=4096, help="Sequences side by side.")]
Batches = Annotated[
    int | None, typer.Option(min=1, help="Batches of built-in prompts. [2; quick: 1]")
]
NewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", min=2, help="Tokens after each prompt. [32; quick: 16]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="One batch and fewer tokens, about a minute.")]


def bench_throughput(
    ctx: typer.Context,
    model: options.Model,
    peer: shared.Peers = None,
    batch: Batch = 8,
    batches: Batches = None,
    prompts: shared.Prompts = None,
    prompt_tokens: shared.PromptTokens = 64,
    max_new_tokens: NewTokens = None,
    host_memory: options.HostMemory = "auto",
    policy: options.Policy = "auto",
    prefetch: options.Prefetch = "auto",
    threads: shared.Threads = None,
    cap: shared.Cap = None,
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    agreement: shared.Agreement = 0.9,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
    config: options.Config = None,
) -> None:
    """Time batches of sequences side by side: new tokens a second in all, prompts and steps.

    As `bench latency`: a process for every repetition, systems in turn, all of them given the same
    tokens. Prompts of different lengths are filled up to the longest of their batch, which counts
    as no work done. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    parse_budget(host_memory, name="--host-memory")
    if prompts is not None:
        words = "has no effect where --prompts says what to ask"
        refuse_given(ctx, {"prompt_tokens", "batches"}, words)
    limit = shared.cap_bytes(cap)
    from moe_runtime.bench.peer_files import find_peers, our_program

    # Who is unknown is refused before anything is read.
    shared.check_results(output, find_peers(peer or (), {}, "throughput"))
    quiet_transformers(session)
    from moe_runtime.bench.runner import Rules
    from moe_runtime.bench.throughput import ThroughputPlan, measure_throughput
    from moe_runtime.checkpoints.model_files import find_checkpoint

    num_built_in = batch * (batches or (1 if quick else 2))
    ids = shared.prompt_ids(model, prompts, prompt_tokens, num_built_in)
    plan = ThroughputPlan(
        batches=[ids[start : start + batch] for start in range(0, len(ids), batch)],
        num_new=max_new_tokens or (16 if quick else 32),
        agreement=agreement,
    )
    rules = Rules(
        judged=("new_tokens_per_s",),
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    given = shared.common_settings(str(find_checkpoint(model)), threads, ids, plan.num_new, limit)
    given["max_tokens"] *= min(batch, len(ids))
    ours = {name: given[name] for name in ("model", "num_threads", "max_tokens")}
    ours |= {"host_memory": host_memory, "policy": policy, "prefetch": prefetch, "device": "cpu"}
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_throughput(
            our_program(ours, limit),
            find_peers(peer or (), given, "throughput"),
            plan,
            rules,
            time.monotonic,
            settings={
                **{name: value for name, value in ours.items() if name != "model"},
                "model": Path(model).name,
                "cap_bytes": limit,
                "batch": batch,
                "prompt_tokens": [len(one) for one in ids],
                "new_tokens": plan.num_new,
                "precision": precision,
                "agreement": agreement,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_throughput, as_json=as_json)


def show_throughput(results: dict[str, Any]) -> None:
    """Prints a column for each system."""
    settings = results["settings"]
    title = f"throughput of {settings['model']}, {settings['batch']} sequences side by side"
    shared.show_systems(results, title, _SPREADS, _SINGLES, "likeliest tokens equal")
