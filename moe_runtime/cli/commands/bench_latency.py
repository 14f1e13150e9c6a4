"""``moe-runtime bench latency``: first token and time between tokens, beside other systems."""

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, quiet_transformers
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget
from moe_runtime.files import check_output_path

_STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"
_ROWS = {
    "first token, ms": ("first_token_s", 1e3),
    "between tokens, ms": ("between_tokens_s", 1e3),
}
_SINGLE = {
    "load without imports, s": ("load_s", 1.0),
    "imports, s": ("import_s", 1.0),
    "peak memory, GB": ("peak_rss_bytes", 1e-9),
    "after imports, GB": ("rss_after_imports_bytes", 1e-9),
    "read by calls, GB": ("read_call_bytes", 1e-9),
    "of these from the page cache, GB": ("page_cache_bytes", 1e-9),
    "read from storage, GB": ("storage_bytes", 1e-9),
}

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[:VARIANT][@PYTHON]",
        help="Another system beside this one, several times if wanted: transformers (variants "
        "eager, grouped_mm), llama_cpp, or a file PEER.py; PYTHON is its environment's.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="File with a prompt in each line, as for `run`; built-in text when omitted."),
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Length of the built-in prompts.")]
NewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", min=2, help="Tokens after each prompt. [32; quick: 16]"),
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Threads of every system; all when omitted.")
]
Time = Annotated[
    float | None,
    typer.Option(
        "--time", min=1.0, help="Seconds after which no repetition begins. [300; quick: 60]"
    ),
]
Precision = Annotated[
    float,
    typer.Option(
        min=0.0001, max=1.0, help="Half of the confidence interval that is narrow enough."
    ),
]
Agreement = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Share of likeliest tokens that a peer must have in common with us."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts, about a minute.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write everything measured to this file.")
]


def bench_latency(
    ctx: typer.Context,
    model: options.Model,
    peer: Peers = None,
    prompts: Prompts = None,
    prompt_tokens: PromptTokens = 64,
    max_new_tokens: NewTokens = None,
    host_memory: options.HostMemory = "auto",
    policy: options.Policy = "auto",
    prefetch: options.Prefetch = "auto",
    threads: Threads = None,
    max_s: Time = None,
    precision: Precision = 0.05,
    agreement: Agreement = 0.9,
    quick: Quick = False,
    output: Output = None,
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
    from moe_runtime.bench.peer_files import find_peer, our_program

    # Who is unknown is refused before anything is read.
    for asked in peer or ():
        find_peer(asked, {})
    if output is not None:
        check_output_path(output, "results")
    quiet_transformers(session)
    from moe_runtime.bench.latency import LatencyPlan, measure_latency
    from moe_runtime.bench.results import write_results
    from moe_runtime.bench.runner import Rules
    from moe_runtime.checkpoints.model_files import find_checkpoint

    plan = LatencyPlan(
        prompts=_prompt_ids(model, prompts, prompt_tokens, quick=quick),
        num_new=max_new_tokens or (16 if quick else 32),
        agreement=agreement,
    )
    rules = Rules(
        judged=("first_token_s", "between_tokens_s"),
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    given = _common(model=str(find_checkpoint(model)), threads=threads, plan=plan)
    ours = {name: given[name] for name in ("model", "num_threads", "max_tokens")}
    ours |= {"host_memory": host_memory, "policy": policy, "prefetch": prefetch, "device": "cpu"}
    with stop_on_signals(_STOPPING) as stop:
        results = measure_latency(
            our_program(ours),
            [find_peer(asked, given) for asked in peer or ()],
            plan,
            rules,
            time.monotonic,
            settings={
                **{name: value for name, value in ours.items() if name != "model"},
                "model": Path(model).name,
                "prompt_tokens": [len(ids) for ids in plan.prompts],
                "new_tokens": plan.num_new,
                "precision": precision,
                "agreement": agreement,
                "max_s": rules.max_s,
            },
            on_repetition=_say,
            is_stopping=lambda: stop.is_set,
        )
    results["command"] = shlex.join(["moe-runtime", *sys.argv[1:]])
    if output is not None:
        write_results(output, results)
    if as_json:
        print_json(results)
    else:
        show_latency(results)
    for one in results["measurements"]:
        if one["failure"] is not None:
            print(f"moe-runtime: {one['system']}: {one['failure']}", file=sys.stderr)
    if stop.is_set:
        raise typer.Exit(stop.exit_code)
    if results["ended"] == "failed":
        raise typer.Exit(2)


def _prompt_ids(
    model: str, prompts: Path | None, num_tokens: int, *, quick: bool
) -> list[list[int]]:
    from moe_runtime.bench.texts import cut_prompts
    from moe_runtime.cli.commands.run import load_tokenizer
    from moe_runtime.inference.generation import encode_prompt

    tokenizer = load_tokenizer(model)
    if prompts is None:
        return cut_prompts(tokenizer, 2 if quick else 4, num_tokens)
    texts = read_prompts(None, None, prompts)
    return [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in texts]


def _common(*, model: str, threads: int | None, plan: Any) -> dict[str, Any]:
    """Settings of every system."""
    from moe_runtime.lab.this_machine import num_usable_cores

    return {
        "model": model,
        "num_threads": threads or num_usable_cores(),
        "max_tokens": max(map(len, plan.prompts)) + plan.num_new,
    }


def _say(name: str, number: int) -> None:
    done = f"repetition {number}" if number else "has the text that all are given"
    print(f"moe-runtime: {name}: {done}", file=sys.stderr, flush=True)


def show_latency(results: dict[str, Any]) -> None:
    """Prints a column for each system."""
    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    rows = [["repetitions", *(str(len(one["repetitions"])) for one in shown)]]
    for what, (metric, scale) in _ROWS.items():
        for part in ("p50", "p90", "p99"):
            values = (one["summary"][metric][part] * scale for one in shown)
            rows.append([f"{what}: {part}", *(f"{value:.4g}" for value in values)])
        rows.append([f"{what}: mean", *(_with_interval(one, metric, scale) for one in shown)])
    for what, (metric, scale) in _SINGLE.items():
        values = (one["summary"][metric]["median"] * scale for one in shown)
        rows.append([what, *(f"{value:.3g}" for value in values)])
    equal = (f"{one['quality']['equal']} of {one['quality']['compared']}" for one in shown)
    rows.append(["likeliest tokens equal", *equal])
    header = [("", "left"), *((one["system"], "right") for one in shown)]
    print_table(f"latency of {results['settings']['model']}", header, rows)


def _with_interval(one: dict[str, Any], metric: str, scale: float) -> str:
    found = one["summary"][metric]
    if found["low"] is None:
        return f"{found['mean'] * scale:.4g}"
    half = (found["high"] - found["low"]) / 2
    return f"{found['mean'] * scale:.4g} ± {half * scale:.2g}"
