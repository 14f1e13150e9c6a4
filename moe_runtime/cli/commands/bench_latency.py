"""``moe-runtime bench latency``: first token and time between tokens, beside other systems."""

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

_SPREADS = {
    "first token, ms": ("first_token_s", 1e3),
    "between tokens, ms": ("between_tokens_s", 1e3),
}

NewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", min=2, help="Tokens after each prompt. [32; quick: 16]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts, about a minute.")]


def bench_latency(
    ctx: typer.Context,
    model: options.Model,
    peer: shared.Peers = None,
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
    """Time one sequence at a time: the first token, each further one, memory and bytes read.

    Every repetition is a process of its own, systems in turn, until the means are certain to
    --precision or the time is up. All are given the same tokens; a system that would have said
    others gets no numbers. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    parse_budget(host_memory, name="--host-memory")
    if prompts is not None:
        refuse_given(ctx, {"prompt_tokens"}, "has no effect where --prompts says what to ask")
    limit = shared.cap_bytes(cap)
    from moe_runtime.bench.peer_files import find_peers, our_program

    # Who is unknown is refused before anything is read.
    shared.check_results(output, find_peers(peer or (), {}))
    quiet_transformers(session)
    from moe_runtime.bench.latency import LatencyPlan, measure_latency
    from moe_runtime.bench.runner import Rules
    from moe_runtime.checkpoints.model_files import find_checkpoint

    plan = LatencyPlan(
        prompts=shared.prompt_ids(model, prompts, prompt_tokens, 2 if quick else 4),
        num_new=max_new_tokens or (16 if quick else 32),
        agreement=agreement,
    )
    rules = Rules(
        judged=("first_token_s", "between_tokens_s"),
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    given = shared.common_settings(
        str(find_checkpoint(model)), threads, plan.prompts, plan.num_new, limit
    )
    ours = {name: given[name] for name in ("model", "num_threads", "max_tokens")}
    ours |= {"host_memory": host_memory, "policy": policy, "prefetch": prefetch, "device": "cpu"}
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_latency(
            our_program(ours, limit),
            find_peers(peer or (), given),
            plan,
            rules,
            time.monotonic,
            settings={
                **{name: value for name, value in ours.items() if name != "model"},
                "model": Path(model).name,
                "cap_bytes": limit,
                "prompt_tokens": [len(ids) for ids in plan.prompts],
                "new_tokens": plan.num_new,
                "precision": precision,
                "agreement": agreement,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_latency, as_json=as_json)


def show_latency(results: dict[str, Any]) -> None:
    """Prints a column for each system."""
    title = f"latency of {results['settings']['model']}"
    shared.show_systems(results, title, _SPREADS, shared.MEMORY_ROWS, "likeliest tokens equal")
