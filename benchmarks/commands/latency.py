"""``moe-runtime bench latency``: first token and time between tokens, beside other systems."""

import time
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
from moe_runtime.cli.console import Session, quiet_transformers, say_line
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget

_SPREADS = {"first token": "first_token_s", "between tokens": "between_tokens_s"}

NewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", min=2, help="Tokens after each prompt. [32; quick: 16]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts, about a minute.")]


def bench_latency(
    ctx: typer.Context,
    model: shared.Model = None,
    shape: shared.Shape = None,
    layers: shared.Layers = None,
    keep_shape: shared.Keep = False,
    peer: shared.Peers = None,
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
    """Time one sequence at a time: the first token, each further one, memory and bytes read.

    Every repetition is a process of its own, systems in turn, until the means are certain to
    --precision or the time is up. All are given the same tokens; a system that would have said
    others gets no numbers. With --shape they are text, and what each finds likeliest after them is
    compared, unless a peer writes its own text. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    require_one_model(model, shape, layers, keep=keep_shape)
    parse_budget(host_memory, name="--host-memory")
    from moe_runtime.benchmarks.suite.peer_files import find_peers, our_program, writes_own_text

    find_peers(peer or (), {}, "latency")  # who is unknown is refused before torch is imported
    place = choose_device(ctx, device, device_memory)
    if prompts is not None:
        refuse_given(ctx, {"prompt_tokens"}, "has no effect where --prompts says what to ask")
    texts = None if prompts is None else read_prompts(None, None, prompts)
    limit = shared.cap_bytes(cap)
    peers = place.seen_by(find_peers(peer or (), {"device": place.setting}))
    shared.check_results(output, peers)
    quiet_transformers(session)
    from moe_runtime.benchmarks.cases.latency import LatencyPlan, measure_latency
    from moe_runtime.benchmarks.suite.runner import Rules

    num_new = max_new_tokens or (16 if quick else 32)
    rules = Rules(
        judged=("first_token_s", "between_tokens_s"),
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    num_built_in, has_after = 2 if quick else 4, shape is not None

    def read_ids(path: str) -> Ids:
        return prompt_ids(path, texts, prompt_tokens, num_built_in, num_new, has_after=has_after)

    about_model = asked_model(model, shape, layers, peers, read_ids, keep=keep_shape, output=output)
    with about_model as asked:
        given, after = split_off(asked.ids, num_new) if has_after else (asked.ids, None)
        alone = [
            one.name for one in peers if writes_own_text(one) and not asked.failures.get(one.name)
        ]
        followed = {"followed_by": "likeliest tokens"} if has_after and alone else {}
        if followed:
            say_line(
                f"{alone[0]} writes its own text: prompts go on as this project finds likeliest"
            )
            after = None
        plan = LatencyPlan(prompts=given, num_new=num_new, agreement=agreement, continuations=after)
        of_all = common_settings(asked.path, threads, plan.prompts, num_new, limit, place.setting)
        ours = own_settings(
            of_all,
            host_memory=host_memory,
            device_memory=place.memory,
            misses=misses,
            policy=policy,
            prefetch=prefetch,
        )
        programs = [our_program(ours, limit), *find_peers(peer or (), of_all | ours)]
        measured, *beside = asked.with_files(place.seen_by(programs))
        with stop_on_signals(shared.STOPPING) as stop:
            results = measure_latency(
                measured,
                beside,
                plan,
                rules,
                time.monotonic,
                settings={
                    **{name: value for name, value in ours.items() if name != "model"},
                    **asked.facts,
                    **followed,
                    "device": place.name,
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
    from moe_runtime.benchmarks.suite.measured_work import cap_words, device_words, model_words

    settings = results["settings"]
    followed = [f"the {settings['followed_by']}"] if "followed_by" in settings else []
    words = [f"latency of {model_words(settings)}", *followed, device_words(results)]
    title = ", ".join([*words, *cap_words(settings)])
    show_systems(results, title, _SPREADS, MEMORY_ROWS, "likeliest tokens equal")
