"""``moe-runtime bench predictors``: predictors on sequences held out of the user's traces."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.policies import Quick, Time
from moe_runtime.benchmarks.commands.tables import mean_cell
from moe_runtime.cli import options
from moe_runtime.cli.commands.predictor import (
    Distances,
    MaxTokens,
    Names,
    Seed,
    TestShare,
    Traces,
    check_trainable,
    parse_distances,
    read_sequences,
    require_layers,
)
from moe_runtime.cli.commands.replay import (
    ASSUMED_EXPERT,
    Bandwidth,
    Capacity,
    ExpertSize,
    ExpertTime,
    KnownAhead,
    Latency,
    LayerTime,
    SideBySide,
    machine_of,
    parse_shares,
    read_routes_to_learn,
)
from moe_runtime.cli.console import Session, print_table, say_line
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.files import check_output_path

if TYPE_CHECKING:
    from moe_runtime.lab.replay.timed import Machine

Train = Annotated[
    Path | None, typer.Option(help="Trace to learn from, in the place of a part of TRACE.")
]
_QUICK = ("popularity", "token-identity", "layer-affinity")
_TIMED = ("latency", "expert_size", "layer_time", "known_ahead", "expert_time", "capacity")


def bench_predictors(
    ctx: typer.Context,
    traces: Traces = None,
    predictor: Names = None,
    train: Train = None,
    test_share: TestShare = 0.5,
    seed: Seed = 0,
    distances: Distances = "1,2,4",
    max_tokens: MaxTokens = None,
    side_by_side: SideBySide = None,
    bandwidth: Bandwidth = None,
    capacity: Capacity = None,
    latency: Latency = 1e-4,
    expert_size: ExpertSize = ASSUMED_EXPERT,
    layer_time: LayerTime = 5e-4,
    known_ahead: KnownAhead = 0.0,
    expert_time: ExpertTime = 1e-4,
    max_s: Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure predictors on held-out sequences of TRACE: recall, and seconds of a step.

    Recall is that of `predictor evaluate`. With --bandwidth the held-out sequences are also
    replayed with LRU on a modelled machine: which share of the prefetches was used, and reads and
    waits as shares of those without prefetching. --time begins when all recalls are counted.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if output is not None:
        check_output_path(output, "results")
    if not traces:
        raise ValueError("expected at least one TRACE, as `run --prompts FILE --trace` records it")
    if bandwidth is None:
        refuse_given(ctx, _TIMED, "is about prefetching in modelled time; give --bandwidth too")
    if train is not None:
        refuse_given(ctx, ("test_share",), "has no effect where --train gives what is learned from")
        if max_tokens is None:
            refuse_given(ctx, ("seed",), "has no effect with --train; give --max-tokens too")
    from moe_runtime.benchmarks.cases.predictor_recall import PredictorsPlan, measure_predictors
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.lab.replay.experiment import usual_capacities
    from moe_runtime.lab.traces.routes import (
        join_routes,
        split_unrepeated,
        trace_of_routes,
        unrepeated,
    )
    from moe_runtime.lab.traces.routes import side_by_side as serve_side_by_side
    from moe_runtime.lab.traces.workload import workload_of
    from moe_runtime.policies.prediction import PREDICTORS

    known = [name for name, kind in PREDICTORS.items() if not kind.needs_hidden]
    names = list(dict.fromkeys(predictor or (_QUICK if quick else known)))
    for name in names:
        check_trainable(name)
    ahead = parse_distances(distances)
    shares = None if capacity is None else parse_shares(capacity)
    machine = machine_of(bandwidth, latency, expert_size, layer_time, known_ahead, expert_time)
    routes, signature = read_sequences(traces)
    require_layers(ctx, ahead, signature.num_layers)
    if train is None:
        parts = split_unrepeated(routes, test_share=test_share, seed=seed)
        training, test = map(routes.select, parts)
    else:
        whole = trace_of_routes(routes, signature)
        training = read_routes_to_learn(train, None, whole, traces[0])
        first = training.num_sequences
        new = [number - first for number in unrepeated(join_routes([training, routes]))]
        test = routes.select([number for number in new if number >= 0])
        if not test.num_sequences:
            raise ValueError(f"every sequence repeats one of --train {train}; record other prompts")
    served = serve_side_by_side(trace_of_routes(test, signature), count=side_by_side or 1)
    if max_tokens is not None:
        served = served.steps(0, min(served.num_steps, -(-max_tokens // (side_by_side or 1))))
    plan = PredictorsPlan(
        predictors=names,
        training=training,
        test=test,
        served=workload_of(served),
        distances=ahead,
        max_tokens=max_tokens,
        seed=seed,
        machine=machine,
        capacities=list(dict.fromkeys(shares or usual_capacities(signature, "per-layer"))),
    )
    rules = Rules(
        judged=["prediction_s"], precision=precision, max_s=max_s or (30.0 if quick else 120.0)
    )
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_predictors(
            plan,
            rules,
            time.monotonic,
            settings={
                **shared.trace_settings(
                    ", ".join(path.name for path in traces), routes.num_tokens, signature
                ),
                "sequences": routes.num_sequences,
                "train": None if train is None else train.name,
                "training_sequences": training.num_sequences,
                "test_sequences": test.num_sequences,
                "test_share": test_share if train is None else None,
                "seed": seed,
                "distances": list(ahead),
                "max_tokens": max_tokens,
                "side_by_side": side_by_side,
                "link": None if machine is None else _in_words(machine),
                "capacities": [] if machine is None else plan.capacities,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_count=lambda name: say_line(f"{name}: fitting it, and counting its recall"),
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_predictors, as_json=as_json)


def _in_words(machine: "Machine") -> str:
    return (
        f"{machine.transfer_s:g} s a transfer, {machine.layer_s:g} s a layer, of which "
        f"{machine.known_ahead_s:g} s need no expert, {machine.expert_s:g} s an expert"
    )


def show_predictors(results: dict[str, Any]) -> None:
    """Prints recall and cost of each predictor, and what it does as a prefetcher."""
    settings = results["settings"]
    shown = [one for one in results["measurements"] if one["summary"]]

    def share(one: dict[str, Any], metric: str) -> str:
        summary = one["summary"].get(metric)
        return f"{summary['median']:.2%}" if summary else "–"

    rows = [
        [
            one["system"],
            str(distance),
            *(share(one, f"recall_at_{width}_ahead_{distance}") for width in ("k", "2k")),
            mean_cell(one, "prediction_s", 1e6),
        ]
        for one in shown
        for distance in settings["distances"]
    ]
    columns = [(name, "right") for name in ("layers ahead", "@K", "@2K", "µs a step")]
    title = f"recall on {settings['test_sequences']} held-out sequences of {settings['model']}"
    print_table(title, [("predictor", "left"), *columns], rows)
    if not settings["capacities"]:
        return
    prefetching = ("useful_prefetches", "reads_of_lru", "waits_of_lru")
    rows = [
        [
            one["system"],
            f"{capacity:.1%}",
            *(share(one, f"{metric}_at_{capacity:g}") for metric in prefetching),
        ]
        for one in shown
        for capacity in settings["capacities"]
    ]
    names = ("capacity", "used prefetches", "reads, of LRU's", "waits, of LRU's")
    columns = [(name, "right") for name in names]
    print_table("prefetching in modelled time", [("predictor", "left"), *columns], rows)
