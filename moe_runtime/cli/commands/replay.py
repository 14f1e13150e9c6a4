"""``moe-runtime replay``: the cost of a recorded trace with other policies."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import loading_bar, print_json, print_table, say_line
from moe_runtime.cli.strict import argument, option, refuse_given
from moe_runtime.config import format_bytes
from moe_runtime.files import at_home
from moe_runtime.lazy import is_code_file

if TYPE_CHECKING:
    from moe_runtime.lab.replay.experiment import Experiment, Row
    from moe_runtime.lab.replay.timed import Machine
    from moe_runtime.lab.traces.format import Trace
    from moe_runtime.policies.prediction import Routes
    from moe_runtime.types import ExpertKey

TraceFile = Annotated[
    Path,
    argument(
        "A trace of `run --trace`, a plain .npz of ids, or Megatron's router trace (.jsonl).",
        metavar="TRACE",
    ),
]
Capacity = Annotated[
    str | None,
    option(
        "Shares of the experts that fit in memory; when omitted, those of 12.5%,25%,50% "
        "that hold a token's experts."
    ),
]
Scope = Annotated[str, option("per-layer: a share for each layer; global: one pool for all.")]
Reset = Annotated[bool, option("Empty the cache at the beginning of each request.", "--reset")]
SideBySide = Annotated[
    int | None,
    option(
        "Replay this many requests of the trace at a time, a token of each in a step, "
        "instead of the recorded steps.",
        min=1,
        max=4096,
    ),
]
NumExperts = Annotated[
    int | None, option("Experts of a layer, for files that lack the number.", min=1)
]
ASSUMED_EXPERT = "16MiB"
"""Bytes of an expert if the trace has no size."""
LEARNERS = frozenset({"static", "activation-aware", "reuse"})
"""Policies that learn from `--train`."""


@dataclass(frozen=True, kw_only=True)
class ModelledTime:
    """A modelled link and computation; without a bandwidth no time is modelled.

    Args:
        bandwidth: Bytes per second of the link, such as 3GB. With it, time is modelled.
        latency: Seconds of a transfer in addition to its bytes.
        expert_size: Bytes of one expert; the trace's own when omitted, or 16MiB without
            it. Without --bandwidth also sizes separated by commas, one for each layer or each
            expert: reads are weighed by them, and lec and gdsf use them.
        layer_time: Seconds that a layer computes without experts.
        known_ahead: Part of --layer-time that comes after the choice of experts and needs none of
            them, as with ScMoE's shortcut.
        expert_time: Seconds that one expert computes.
    """

    bandwidth: str | None = None
    latency: options.NotNegative = 1e-4
    expert_size: str | None = None
    layer_time: options.NotNegative = 5e-4
    known_ahead: options.NotNegative = 0.0
    expert_time: options.NotNegative = 1e-4

    def check(self, ctx: typer.Context) -> None:
        has_sizes = "," in (self.expert_size or "")
        if self.bandwidth is None:
            times = {"latency", "layer_time", "known_ahead", "expert_time"}
            times |= set() if has_sizes else {"expert_size"}
            refuse_given(ctx, times, "is about modelled time; give --bandwidth too")
        elif has_sizes:
            raise ValueError("--expert-size must be one size where --bandwidth models time")

    def machine(self) -> "Machine | None":
        """The modelled machine; None without a bandwidth."""
        if self.bandwidth is None:
            return None
        from moe_runtime.lab.replay.timed import Machine

        if self.known_ahead > self.layer_time:
            raise ValueError(
                f"--known-ahead must be a part of --layer-time {self.layer_time:g}, got "
                f"{self.known_ahead:g}"
            )
        rate = options.bytes_of(self.bandwidth.removesuffix("/s"), "--bandwidth", needs_unit=True)
        return Machine(
            bytes_per_s=rate,
            latency_s=self.latency,
            expert_bytes=options.bytes_of(self.expert_size or ASSUMED_EXPERT, "--expert-size"),
            layer_s=self.layer_time,
            known_ahead_s=self.known_ahead,
            expert_s=self.expert_time,
        )


def replay(
    *,
    trace: TraceFile,
    policy: str = "reuse",
    predictor: str | None = None,
    train: Path | None = None,
    capacity: Capacity = None,
    scope: Scope = "per-layer",
    shares: str = "even",
    reset: Reset = False,
    side_by_side: SideBySide = None,
    num_experts: NumExperts = None,
    modelled: ModelledTime,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Replay a recorded trace: hits, bytes and time with other policies and capacities.

    The table always includes LRU, random eviction and Belady's optimum (with and without bypass).
    With --bandwidth the link and the computation are modelled too.

    Args:
        policy: Eviction policies or your FILE.py, separated by commas; or all.
        predictor: Also prefetch with this predictor: a name or your FILE.py (these need --train),
            or an .npz file.
        train: Trace to train predictors, static and activation-aware on.
        shares: even, or adaptive: layers whose misses cost more get more slots.
    """
    from moe_runtime.lab.replay.experiment import Experiment, run_experiment, usual_capacities
    from moe_runtime.lab.traces.learned import read_predictor
    from moe_runtime.lab.traces.workload import workload_of
    from moe_runtime.policies.eviction import POLICIES
    from moe_runtime.policies.prediction import is_file_name

    if shares not in ("even", "adaptive"):
        raise ValueError(f"--shares must be even or adaptive, got {shares!r}")
    machine, expert_size = modelled.machine(), modelled.expert_size
    all_names = [name for name in POLICIES if name != "predicted" or predictor is not None]
    names = all_names if policy == "all" else [name.strip() for name in policy.split(",")]
    predictor = predictor and at_home(predictor)
    is_trained = predictor is not None and is_file_name(predictor)
    learns = bool(LEARNERS & set(names)) or any(map(is_code_file, names))
    if train is not None and (predictor is None or is_trained) and not learns:
        known = f"{predictor} is trained already" if is_trained else "nothing that is named learns"
        raise ValueError(f"--train has nothing to train: {known}; leave one out")
    with loading_bar() as progress:
        progress(f"reading {trace.name}", 0, 0)
        recorded = read_trace_to_replay(trace, num_experts, side_by_side)
        own_bytes = None if expert_size else recorded.expert_bytes
        if machine is not None and own_bytes is not None:
            machine = dataclasses.replace(machine, expert_bytes=own_bytes)
        training = None
        if train is not None:
            training = read_routes_to_learn(train, num_experts, recorded, trace)
            warn_of_itself(train, trace)
        trained = None
        if predictor is not None and is_trained:
            trained = read_predictor(predictor, recorded.signature)
        experiment = Experiment(
            policies=names,
            capacities=(
                usual_capacities(recorded.signature, scope)
                if capacity is None
                else parse_shares(capacity)
            ),
            scope=scope,
            adaptive=shares == "adaptive",
            reset_per_sequence=reset,
            training=training,
            predictor=predictor if trained is None else trained.name,
            trained=trained,
            machine=machine,
            sizes=sizes_of(expert_size, recorded) if expert_size and machine is None else None,
        )
        rows = run_experiment(
            workload_of(recorded), experiment, on_progress=lambda what: progress(what, 0, 0)
        )
    if machine is not None and not (expert_size or own_bytes):
        say_line(
            f"warning: {trace} does not say how large an expert is, so {ASSUMED_EXPERT} are "
            "assumed; give --expert-size"
        )
    if not as_json:
        _print(trace, recorded, experiment, rows)
        return
    expert_bytes = machine.expert_bytes if machine else 0

    def timing(row: "Row") -> dict[str, Any]:
        return {
            name: {
                "tokens_per_s": timed.tokens_per_s,
                "seconds": timed.seconds,
                **timed.total.summary(expert_bytes),
                "by_layer": [layer.summary(expert_bytes) for layer in timed.layers],
            }
            for name, timed in row.timed.items()
        }

    signature = recorded.signature
    print_json(
        {
            "trace": str(trace),
            "tokens": recorded.num_tokens,
            "layers": signature.num_layers,
            "experts": signature.num_experts,
            "top_k": signature.top_k,
            "scope": experiment.scope,
            "reset_per_sequence": experiment.reset_per_sequence,
            "rows": [
                {**row.__dict__, "uniform_random_hit_rate": row.capacity, "timed": timing(row)}
                for row in rows
            ],
        }
    )


def read_trace_to_replay(path: Path, num_experts: int | None, count: int | None) -> "Trace":
    """A trace as recorded, or with ``count`` of its requests side by side."""
    from moe_runtime.lab.traces.readers import read_any_trace
    from moe_runtime.lab.traces.routes import side_by_side

    recorded = read_any_trace(path, num_experts=num_experts)
    recorded.require_choices(path)
    return recorded if count is None else side_by_side(recorded, count=count)


def read_routes_to_learn(
    path: Path, num_experts: int | None, trace: "Trace", trace_path: Path
) -> "Routes":
    """The sequences of another trace of the same model."""
    from moe_runtime.lab.traces.readers import read_trace_of
    from moe_runtime.lab.traces.routes import routes_of

    return routes_of(read_trace_of(path, trace.signature, str(trace_path), num_experts=num_experts))


def warn_of_itself(train: Path, trace: Path) -> None:
    """Says that hit rates are of what was learned by heart."""
    if os.path.samefile(train, trace):
        say_line(
            f"warning: --train {train} is the replayed trace itself, so what learns from it has "
            "seen what it is measured on; record other prompts for it"
        )


def parse_shares(text: str) -> list[float]:
    """Reads ``12.5%,0.25`` as shares."""

    def share(part: str) -> float:
        value = float(part.removesuffix("%"))
        return value / 100 if part.endswith("%") else value

    return options.numbers_of(text, "--capacity", "shares such as 12.5%,25%,50%", share)


def sizes_of(text: str, trace: "Trace") -> "dict[ExpertKey, int]":
    """Bytes of each expert, from one size, one for each layer, or one for each expert of all."""
    from moe_runtime.types import ExpertKey

    layers, experts = trace.signature.num_layers, trace.signature.num_experts
    sizes = [options.bytes_of(part.strip(), "--expert-size") for part in text.split(",")]
    if len(sizes) == 1:
        sizes *= layers
    if len(sizes) == layers:
        sizes = [size for size in sizes for _ in range(experts)]
    if len(sizes) != layers * experts:
        raise ValueError(
            f"--expert-size must be one size, {layers} for the layers, or {layers * experts} for "
            f"the experts; got {text.count(',') + 1} sizes"
        )
    return {ExpertKey(*divmod(place, experts)): size for place, size in enumerate(sizes)}


def _print(path: Path, trace: "Trace", experiment: "Experiment", rows: "list[Row]") -> None:
    signature, weighed = trace.signature, experiment.sizes is not None
    headers = ("capacity", "hits", "of LRU to optimum", "no load needed", "loads/layer")
    cells = [
        [
            row.policy + "*" * (row.policy == "static" and experiment.training is None),
            f"{row.capacity:.1%}",
            f"{row.hit_rate:.2%}",
            "" if row.gap_closed is None else f"{row.gap_closed:+.0%}",
            f"{row.all_resident_rate:.1%}",
            f"{row.loads_per_layer_token:.3f}",
            *([format_bytes(row.loaded_bytes or 0)] * weighed),
        ]
        for row in rows
    ]
    title = (
        f"{path.name}: {trace.num_tokens} tokens, {signature.num_layers} layers of "
        f"{signature.num_experts} experts, {signature.top_k} for each token; {experiment.scope}"
    )
    print_table(title, _columns("policy", *headers, *["read"] * weighed), cells)
    if any("*" in row[0] for row in cells):
        print("* trained on the replayed trace itself; --train gives it another one to learn from")
    if experiment.machine is None:
        return
    cells = []
    for row in rows:
        for name, replay in row.timed.items():
            total = replay.total.summary(experiment.machine.expert_bytes)
            cells.append(
                [
                    row.policy,
                    name,
                    f"{row.capacity:.1%}",
                    f"{replay.tokens_per_s:.2f}",
                    f"{total['stall_s']:.2f} s",
                    f"{total['loads_per_layer_token']:.3f}",
                    f"{total['late_hit_rate']:.2%}",
                    format_bytes(total["demand_bytes"]),
                    format_bytes(total["wasted_bytes"]),
                ]
            )
    headers = ("capacity", "tokens/s", "stall", "loads/layer", "late", "demand", "wasted")
    print_table("modelled time", [("policy", "left"), *_columns("prefetch", *headers)], cells)


def _columns(first: str, *others: str) -> list[tuple[str, str]]:
    return [(first, "left"), *((header, "right") for header in others)]
