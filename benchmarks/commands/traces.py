"""``bench policies``, ``predictors`` and ``placements``: evaluations on recorded routing."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.benchmarks.commands.shared import TimedRun
from moe_runtime.cli.commands import predictor as of_predictor
from moe_runtime.cli.commands import replay as of_replay
from moe_runtime.cli.commands.place import Placing
from moe_runtime.cli.console import say_line
from moe_runtime.cli.strict import refuse_given
from moe_runtime.files import at_home

if TYPE_CHECKING:
    from moe_runtime.lab.replay.timed import Machine
    from moe_runtime.types import ModelSignature

_QUICK_POLICIES = ("lru", "lfu", "belady-bypass")
_QUICK_PREDICTORS = ("popularity", "token-identity", "layer-affinity")


def bench_policies(
    run: TimedRun,
    trace: of_replay.TraceFile,
    policy: str | None = None,
    capacity: str | None = None,
    scope: of_replay.Scope = "per-layer",
    train: Path | None = None,
    predictor: str | None = None,
    expert_size: str | None = None,
    reset: of_replay.Reset = False,
    side_by_side: of_replay.SideBySide = None,
    num_experts: of_replay.NumExperts = None,
    golden: Path | None = None,
) -> None:
    """Replay eviction policies on TRACE: hit rates at each capacity, and accesses per second.

    Repeats `replay` until the speeds are certain, and writes a results file for `bench compare`
    and `bench report`. The policies' live objects serve the start of the trace too; their hits
    must equal the replay's.

    Args:
        policy: Eviction policies, separated by commas, or all. [those with a compiled replay;
            quick: lru,lfu,belady-bypass]
        capacity: Shares of the experts that fit. [those of 12.5%,25%,50% with room for a token]
        train: Trace that static, activation-aware and --predictor learn from first.
        predictor: Predictor of the policy `predicted`: a name (needs --train), or the .npz file
            of a trained one.
        expert_size: One size, or sizes separated by commas for each layer or for each expert of
            each layer. They weigh the bytes read, and lec and gdsf use them.
        golden: First check the replay against exact hit counts on TRACE (JSON rows).
    """
    from moe_runtime.benchmarks.cases.policies import measure_policies, metrics_of, require_golden
    from moe_runtime.lab.replay.experiment import Experiment, usual_capacities
    from moe_runtime.lab.traces.learned import read_predictor
    from moe_runtime.lab.traces.workload import workload_of
    from moe_runtime.policies.prediction import is_file_name, make_estimator

    predictor = predictor and at_home(predictor)
    names = _policy_names(policy, quick=run.quick)
    if (predictor is None) == ("predicted" in names):
        raise ValueError("the policy predicted and --predictor, which it asks, belong together")
    named = (
        None
        if predictor is None or is_file_name(predictor)
        else of_predictor.check_trainable(predictor)
    )
    if named is not None and train is None:
        raise ValueError(f"--predictor {named} needs --train, or give the file of a trained one")
    shares = None if capacity is None else of_replay.parse_shares(capacity)
    if train is not None and named is None and not of_replay.LEARNERS & set(names):
        raise ValueError(f"--train has nothing to train: of {', '.join(names)} nothing learns")
    recorded = of_replay.read_trace_to_replay(trace, num_experts, side_by_side)
    training = (
        None
        if train is None
        else of_replay.read_routes_to_learn(train, num_experts, recorded, trace)
    )
    if train is not None:
        of_replay.warn_of_itself(train, trace)
    trained = None
    if named is not None and training is not None:
        trained = make_estimator(named, training.shape)
        trained.fit(training)
    elif predictor is not None:
        trained = read_predictor(predictor, recorded.signature)
    asked = Experiment(
        policies=names,
        capacities=shares or usual_capacities(recorded.signature, scope),
        scope=scope,
        training=training,
        reset_per_sequence=reset,
        predictor=trained and trained.name,
        trained=trained,
        sizes=None if expert_size is None else of_replay.sizes_of(expert_size, recorded),
    )
    workload = workload_of(recorded)
    if golden is not None:
        say_line(f"{require_golden(workload, golden)} rows of {golden.name} found again")
    speeds = [name for name in metrics_of(asked) if name.startswith("accesses")]
    settings = {
        **trace_settings(trace.name, recorded.num_tokens, recorded.signature),
        "capacities": asked.capacities,
        "train": train and train.name,
        "predictor": predictor and Path(predictor).name,
        **run.asked("scope", "expert_size", "reset", "side_by_side"),
    }
    run.measure(measure_policies, asked, settings, speeds, workload)


def _policy_names(policy: str | None, *, quick: bool) -> list[str]:
    from moe_runtime.policies.eviction import POLICIES
    from moe_runtime.policies.eviction.compiled import RULES

    if policy is None:
        return list(_QUICK_POLICIES if quick else RULES)
    if policy == "all":
        return [name for name in POLICIES if name != "predicted"]
    return list(dict.fromkeys(name.strip() for name in policy.split(",")))


def bench_predictors(
    run: TimedRun,
    *,
    traces: of_predictor.Traces = None,
    measuring: of_predictor.Measuring,
    train: Path | None = None,
    side_by_side: of_replay.SideBySide = None,
    capacity: of_replay.Capacity = None,
    modelled: of_replay.ModelledTime,
) -> None:
    """Measure predictors on held-out sequences of TRACE: recall, and seconds of a step.

    Recall is that of `predictor evaluate`. --bandwidth also replays the held-out sequences with LRU
    on a modelled machine: the share of useful prefetches, and reads and waits relative to no
    prefetching. --time starts once all recalls are counted.

    Args:
        train: Trace to learn from, instead of a part of TRACE.
    """
    if not traces:
        raise ValueError("expected at least one TRACE, as `run --prompts FILE --trace` records it")
    machine, max_tokens, seed = modelled.machine(), measuring.max_tokens, measuring.seed
    if machine is None:
        timed = ("expert_size", "capacity")
        refuse_given(run.ctx, timed, "is about prefetching in modelled time; give --bandwidth too")
    if train is not None:
        refuse_given(
            run.ctx, ("test_share",), "has no effect where --train gives what is learned from"
        )
        if max_tokens is None:
            refuse_given(run.ctx, ("seed",), "has no effect with --train; give --max-tokens too")
    from moe_runtime.benchmarks.cases.predictors import PredictorsPlan, measure_predictors
    from moe_runtime.lab.replay.experiment import usual_capacities
    from moe_runtime.lab.traces import routes as recorded
    from moe_runtime.lab.traces.workload import workload_of
    from moe_runtime.policies.prediction import PREDICTORS

    known = [name for name, kind in PREDICTORS.items() if not kind.needs_hidden]
    quick = _QUICK_PREDICTORS if run.quick else known
    names = list(dict.fromkeys(measuring.predictor or quick))
    for name in names:
        of_predictor.check_trainable(name)
    ahead, test_share = measuring.ahead, measuring.test_share
    shares = None if capacity is None else of_replay.parse_shares(capacity)
    routes, signature = of_predictor.read_sequences(traces)
    measuring.require_layers(run.ctx, signature.num_layers)
    if train is None:
        parts = recorded.split_unrepeated(routes, test_share=test_share, seed=seed)
        training, test = map(routes.select, parts)
    else:
        whole = recorded.trace_of_routes(routes, signature)
        training = of_replay.read_routes_to_learn(train, None, whole, traces[0])
        first = training.num_sequences
        new = [
            number - first
            for number in recorded.unrepeated(recorded.join_routes([training, routes]))
        ]
        test = routes.select([number for number in new if number >= 0])
        if not test.num_sequences:
            raise ValueError(f"every sequence repeats one of --train {train}; record other prompts")
    served = recorded.trace_of_routes(test, signature)
    served = recorded.side_by_side(served, count=side_by_side or 1)
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
        capacities=shares or usual_capacities(signature, "per-layer"),
    )
    settings = {
        **trace_settings(", ".join(path.name for path in traces), routes.num_tokens, signature),
        "sequences": routes.num_sequences,
        "train": train and train.name,
        "training_sequences": training.num_sequences,
        "test_sequences": test.num_sequences,
        "test_share": test_share if train is None else None,
        "distances": list(ahead),
        **run.asked("seed", "max_tokens", "side_by_side"),
        "link": None if machine is None else _in_words(machine),
        "capacities": [] if machine is None else plan.capacities,
    }

    run.measure(measure_predictors, plan, settings, ["prediction_s"], say_line)


def _in_words(machine: "Machine") -> str:
    return (
        f"{machine.transfer_s:g} s a transfer, {machine.layer_s:g} s a layer, of which "
        f"{machine.known_ahead_s:g} s need no expert, {machine.expert_s:g} s an expert"
    )


def bench_placements(
    run: TimedRun,
    *,
    trace: of_replay.TraceFile,
    placing: Placing,
    num_experts: of_replay.NumExperts = None,
) -> None:
    """Measure all algorithms of `place` on TRACE: balance, hops, seconds of the search.

    Each algorithm places the experts by the first part of the trace and is scored on the rest,
    like random placements. Algorithms that make copies also run with --replicas.
    """
    devices = placing.devices()
    from moe_runtime.benchmarks.cases.placements import PlacementsPlan, measure_placements
    from moe_runtime.policies.placement import RoutingProfile
    from moe_runtime.policies.placement.base import slots_needed
    from moe_runtime.policies.placement.scoring import split_window

    recorded = of_replay.read_trace_to_replay(trace, num_experts, None)
    signature = recorded.signature
    # Refuses replicas that no algorithm could place.
    slots_needed(signature.num_experts, placing.replicas, placing.gpus)
    past, future = split_window(recorded.expert_ids, placing.fit)
    options = dataclasses.asdict(placing.options())
    del options["num_groups"]  # already recorded as groups
    plan = PlacementsPlan(
        profile=RoutingProfile.from_ids(past, signature.num_experts),
        future=future,
        devices=devices,
        num_replicas=placing.replicas,
        options=placing.options(),
        searches=not run.quick,
    )
    settings = trace_settings(trace.name, recorded.num_tokens, signature)
    settings |= {
        "devices": placing.gpus,
        **run.asked("fit", "nodes", "replicas", "groups"),
        **options,
    }
    names = [one.name for one in plan.systems()]
    run.measure(measure_placements, plan, settings, ["place_s"], unasked=names)


def trace_settings(names: str, num_tokens: int, signature: "ModelSignature") -> dict[str, Any]:
    sizes = {"layers": signature.num_layers, "experts": signature.num_experts}
    return {"model": names, "tokens": num_tokens, **sizes, "top_k": signature.top_k}
