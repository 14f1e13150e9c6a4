"""``moe-runtime bench policies``: eviction policies on the user's trace."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.tables import mean_cell
from moe_runtime.cli import options
from moe_runtime.cli.commands.predictor import check_trainable
from moe_runtime.cli.commands.replay import (
    LEARNERS,
    NumExperts,
    Reset,
    Scope,
    SideBySide,
    TraceFile,
    parse_shares,
    read_routes_to_learn,
    read_trace_to_replay,
    sizes_of,
)
from moe_runtime.cli.console import Session, print_table, say_line
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.config import format_bytes
from moe_runtime.files import at_home, check_output_path

_QUICK = ("lru", "lfu", "belady-bypass")

Policies = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Eviction policies, separated by commas, or all. [those with a compiled replay; "
        "quick: lru,lfu,belady-bypass]",
    ),
]
Capacity = Annotated[
    str | None,
    typer.Option(
        help="Shares of the experts that fit; when omitted, those of 12.5%,25%,50% that have room "
        "for a token's experts."
    ),
]
Golden = Annotated[
    Path | None,
    typer.Option(help="First hold the replay to a file of exact hit counts on TRACE (JSON rows)."),
]
Train = Annotated[
    Path | None,
    typer.Option(help="Trace that static, activation-aware and --predictor learn from first."),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        help="What the policy predicted asks: a name (needs --train), or the .npz file of a "
        "trained one."
    ),
]
ExpertSize = Annotated[
    str | None,
    typer.Option(
        help="One size, or sizes separated by commas for each layer or each expert of each layer: "
        "what is read is weighed by them, and lec and gdsf go by them."
    ),
]
Time = Annotated[
    float | None,
    typer.Option(
        "--time", min=1.0, help="Seconds after which no repetition begins. [120; quick: 30]"
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Three of them, half a minute.")]


def bench_policies(
    ctx: typer.Context,
    trace: TraceFile,
    policy: Policies = None,
    capacity: Capacity = None,
    scope: Scope = "per-layer",
    train: Train = None,
    predictor: Predictor = None,
    expert_size: ExpertSize = None,
    reset: Reset = False,
    side_by_side: SideBySide = None,
    num_experts: NumExperts = None,
    golden: Golden = None,
    max_s: Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Replay eviction policies on TRACE: hits at each capacity, and accesses a second.

    As `replay`, again and again until the speeds are certain, with a results file that `bench
    compare` and `bench report` read: a policy that hits less often than before is a regression.
    The beginning of the trace is served by the policies' objects as well; hits must be equal.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if output is not None:
        check_output_path(output, "results")
    from moe_runtime.benchmarks.cases.policy_replays import (
        PoliciesPlan,
        measure_policies,
        metrics_of,
    )
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.inference.prediction.predictors import is_file_name
    from moe_runtime.lab.replay.experiment import usual_capacities
    from moe_runtime.lab.traces.learned import read_predictor
    from moe_runtime.lab.traces.workload import workload_of
    from moe_runtime.policies.prediction import make_estimator

    predictor = predictor and at_home(predictor)
    names = _names(policy, quick=quick)
    if predictor is None and "predicted" in names:
        raise ValueError("the policy predicted asks a predictor: give --predictor, too")
    if predictor is not None and "predicted" not in names:
        raise ValueError("--predictor is for the policy predicted: name it in --policy, too")
    named = None if predictor is None or is_file_name(predictor) else check_trainable(predictor)
    if named is not None and train is None:
        raise ValueError(f"--predictor {named} needs --train, or give the file of a trained one")
    shares = None if capacity is None else parse_shares(capacity)
    if train is not None and named is None and not LEARNERS & set(names):
        raise ValueError(f"--train has nothing to train: of {', '.join(names)} nothing learns")
    recorded = read_trace_to_replay(trace, num_experts, side_by_side)
    training = None if train is None else read_routes_to_learn(train, num_experts, recorded, trace)
    trained = None
    if named is not None and training is not None:
        trained = make_estimator(named, training.shape)
        trained.fit(training)
    elif predictor is not None:
        trained = read_predictor(predictor, recorded.signature)
    plan = PoliciesPlan(
        workload=workload_of(recorded),
        policies=names,
        capacities=list(dict.fromkeys(shares or usual_capacities(recorded.signature, scope))),
        scope=scope,
        training=training,
        reset_per_sequence=reset,
        predictor=trained,
        sizes=None if expert_size is None else sizes_of(expert_size, recorded),
    )
    if golden is not None:
        from moe_runtime.benchmarks.cases.golden_counts import require_golden

        exact = require_golden(plan.workload, golden)
        say_line(f"{exact} rows of {golden.name} found again")
    speeds = [name for name in metrics_of(plan) if name.startswith("accesses")]
    rules = Rules(judged=speeds, precision=precision, max_s=max_s or (30.0 if quick else 120.0))
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_policies(
            plan,
            rules,
            time.monotonic,
            settings={
                **shared.trace_settings(trace.name, recorded.num_tokens, recorded.signature),
                "capacities": plan.capacities,
                "scope": scope,
                "train": None if train is None else train.name,
                "predictor": None if predictor is None else Path(predictor).name,
                "expert_size": expert_size,
                "reset": reset,
                "side_by_side": side_by_side,
                "precision": precision,
                "max_s": rules.max_s,
            },
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_policies, as_json=as_json)


def _names(policy: str | None, *, quick: bool) -> list[str]:
    from moe_runtime.policies.eviction import POLICIES
    from moe_runtime.policies.eviction.compiled import RULES

    if policy is None:
        return list(_QUICK if quick else RULES)
    if policy == "all":
        return [name for name in POLICIES if name != "predicted"]
    return list(dict.fromkeys(name.strip() for name in policy.split(",")))


def show_policies(results: dict[str, Any]) -> None:
    """Prints a row for each policy and capacity."""
    rows = []
    for capacity in results["settings"]["capacities"]:
        for one in results["measurements"]:
            if not one["summary"]:
                continue
            hits, resident = (
                f"{one['summary'][f'{name}_at_{capacity:g}']['median']:.2%}"
                for name in ("hit_rate", "all_resident")
            )
            speed = mean_cell(one, f"accesses_per_s_at_{capacity:g}", 1e-6)
            read = one["summary"].get(f"read_bytes_at_{capacity:g}")
            weighed = [] if read is None else [format_bytes(round(read["median"]))]
            rows.append([one["system"], f"{capacity:.1%}", hits, resident, *weighed, speed])
    sized = results["settings"].get("expert_size") is not None
    columns = ("capacity", "hits", "layers without a load", *["read"] * sized, "M accesses/s")
    print_table(
        f"policies on {results['settings']['model']}",
        [("policy", "left"), *((name, "right") for name in columns)],
        rows,
    )
