"""``moe-runtime bench placements``: where experts lie by each algorithm, on the user's trace."""

import time
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.tables import mean_cell
from moe_runtime.cli import options
from moe_runtime.cli.commands.place import (
    Align,
    Fit,
    Gpus,
    Groups,
    Nodes,
    Replicas,
    Slack,
    TimeLimit,
    devices_of,
)
from moe_runtime.cli.commands.replay import NumExperts, TraceFile, read_trace_to_replay
from moe_runtime.cli.console import Session, print_table
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.files import check_output_path

_COLUMNS = {
    "balancedness": "balance",
    "mean_max_load": "peak load",
    "hops": "hops",
    "primary_hops": "first-choice hops",
    "node_hops": "node hops",
    "devices_per_token": "devices/token",
}

Quick = Annotated[
    bool, typer.Option("--quick", help="Without the algorithms that search, half a minute.")
]


def bench_placements(
    ctx: typer.Context,
    trace: TraceFile,
    gpus: Gpus,
    nodes: Nodes = 1,
    replicas: Replicas = 0,
    groups: Groups = 1,
    fit: Fit = 0.5,
    load_slack: Slack = 0.1,
    time_limit: TimeLimit = 30.0,
    align: Align = True,
    num_experts: NumExperts = None,
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure all algorithms of `place` on TRACE: balance, hops, seconds of the search.

    Each places the experts by the first part of the trace and is scored on the rest, beside random
    placements. Those that make copies are measured with --replicas, too.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if output is not None:
        check_output_path(output, "results")
    devices = devices_of(gpus, nodes)
    from moe_runtime.benchmarks.cases.placement_scores import PlacementsPlan, measure_placements
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.policies.placement import PlacementOptions, RoutingProfile
    from moe_runtime.policies.placement.base import slots_needed
    from moe_runtime.policies.placement.scoring import split_window

    recorded = read_trace_to_replay(trace, num_experts, None)
    signature = recorded.signature
    # Else no algorithm would have what was asked for.
    slots_needed(signature.num_experts, replicas, gpus)
    past, future = split_window(recorded.expert_ids, fit)
    plan = PlacementsPlan(
        profile=RoutingProfile.from_ids(past, signature.num_experts),
        future=future,
        devices=devices,
        num_replicas=replicas,
        told=PlacementOptions(
            num_groups=groups, time_limit_s=time_limit, load_slack=load_slack, aligned=align
        ),
        searches=not quick,
    )
    rules = Rules(
        judged=["place_s"], precision=precision, max_s=max_s or (60.0 if quick else 300.0)
    )
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_placements(
            plan,
            rules,
            time.monotonic,
            settings={
                **shared.trace_settings(trace.name, recorded.num_tokens, signature),
                "fit": fit,
                "devices": gpus,
                "nodes": nodes,
                "replicas": replicas,
                "groups": groups,
                "load_slack": load_slack,
                "time_limit_s": time_limit,
                "aligned": align,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    unasked = [one["system"] for one in results["measurements"]]
    shared.end_case(results, output, stop, show_placements, as_json=as_json, unasked=unasked)


def show_placements(results: dict[str, Any]) -> None:
    """Prints a row for each algorithm."""
    rows = [
        [
            one["system"],
            *(f"{one['summary'][metric]['median']:.3f}" for metric in _COLUMNS),
            mean_cell(one, "place_s", 1e3),
        ]
        for one in results["measurements"]
        if one["summary"]
    ]
    settings = results["settings"]
    title = f"{settings['model']} on {settings['devices']} devices"
    columns = [(name, "right") for name in (*_COLUMNS.values(), "ms to place")]
    print_table(title, [("placement", "left"), *columns], rows)
