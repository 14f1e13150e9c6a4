"""``moe-runtime bench throughput``: batches of prompts, tokens a second, beside other systems."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.asked_model import (
    Ids,
    asked_model,
    common_settings,
    own_settings,
    prompt_ids,
    require_one_model,
    split_off,
)
from moe_runtime.benchmarks.commands.chosen_device import choose_device
from moe_runtime.benchmarks.commands.tables import MEMORY_ROWS, show_systems
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, quiet_transformers
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget

_SPREADS = {"a step": "step_tokens_per_s"}
_SINGLES = {
    "new tokens in all": "new_tokens_per_s",
    "prompts": "prompt_tokens_per_s",
    **MEMORY_ROWS,
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
    model: shared.Model = None,
    shape: shared.Shape = None,
    layers: shared.Layers = None,
    keep_shape: shared.Keep = False,
    peer: shared.Peers = None,
    batch: Batch = 8,
    batches: Batches = None,
    prompts: shared.Prompts = None,
    prompt_tokens: shared.PromptTokens = 64,
    max_new_tokens: NewTokens = None,
    device: options.Device = "auto",
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    misses: options.Misses = "device",
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
    require_one_model(model, shape, layers, keep=keep_shape)
    parse_budget(host_memory, name="--host-memory")
    from moe_runtime.benchmarks.suite.peer_files import find_peers, our_program

    find_peers(peer or (), {}, "throughput")  # who is unknown is refused before torch is imported
    place = choose_device(ctx, device, device_memory)
    if prompts is not None:
        words = "has no effect where --prompts says what to ask"
        refuse_given(ctx, {"prompt_tokens", "batches"}, words)
    texts = None if prompts is None else read_prompts(None, None, prompts)
    limit = shared.cap_bytes(cap)
    peers = place.seen_by(find_peers(peer or (), {"device": place.setting}, "throughput"))
    shared.check_results(output, peers)
    quiet_transformers(session)
    from moe_runtime.benchmarks.cases.throughput import ThroughputPlan, measure_throughput
    from moe_runtime.benchmarks.suite.runner import Rules

    num_new = max_new_tokens or (16 if quick else 32)
    rules = Rules(
        judged=("new_tokens_per_s",),
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    num_built_in, has_after = batch * (batches or (1 if quick else 2)), shape is not None

    def read_ids(path: str) -> Ids:
        return prompt_ids(path, texts, prompt_tokens, num_built_in, num_new, has_after=has_after)

    about_model = asked_model(model, shape, layers, peers, read_ids, keep=keep_shape, output=output)
    with about_model as asked:
        given, after = split_off(asked.ids, num_new) if has_after else (asked.ids, None)
        plan = ThroughputPlan(
            batches=in_batches(given, batch),
            num_new=num_new,
            agreement=agreement,
            continuations=None if after is None else in_batches(after, batch),
        )
        of_all = common_settings(asked.path, threads, given, num_new, limit, place.setting)
        of_all["max_tokens"] *= min(batch, len(given))
        ours = own_settings(
            of_all,
            host_memory=host_memory,
            device_memory=place.memory,
            misses=misses,
            policy=policy,
            prefetch=prefetch,
        )
        programs = [our_program(ours, limit), *find_peers(peer or (), of_all | ours, "throughput")]
        measured, *beside = asked.with_files(place.seen_by(programs))
        with stop_on_signals(shared.STOPPING) as stop:
            results = measure_throughput(
                measured,
                beside,
                plan,
                rules,
                time.monotonic,
                settings={
                    **{name: value for name, value in ours.items() if name != "model"},
                    **asked.facts,
                    "device": place.name,
                    "cap_bytes": limit,
                    "batch": batch,
                    "prompt_tokens": [len(one) for one in given],
                    "new_tokens": plan.num_new,
                    "precision": precision,
                    "agreement": agreement,
                    "max_s": rules.max_s,
                },
                on_repetition=shared.say_repetition,
                is_stopping=lambda: stop.is_set,
            )
    shared.end_case(results, output, stop, show_throughput, as_json=as_json)


def in_batches(ids: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Sequences side by side, the last ones fewer if need be."""
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


def show_throughput(results: dict[str, Any]) -> None:
    """Prints a column for each system."""
    from moe_runtime.benchmarks.suite.measured_work import (
        cap_words,
        counted,
        device_words,
        model_words,
    )

    settings = results["settings"]
    batch = counted("{} sequences", settings["batch"])
    title = f"throughput of {model_words(settings)}, {batch} side by side"
    title = ", ".join([title, device_words(results), *cap_words(settings)])
    show_systems(results, title, _SPREADS, _SINGLES, "likeliest tokens equal")
