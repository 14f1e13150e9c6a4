"""Compares eviction policies on one workload: capacities, bounds, time on a modelled machine."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_runtime.config import nearest
from moe_runtime.lab.replay.timed import Machine, TimedReplay, replay_timed
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.eviction import (
    POLICIES,
    EvictionPolicy,
    Setting,
    make_global_policy,
    make_policy,
)
from moe_runtime.policies.eviction.base import Events
from moe_runtime.policies.prediction import PREDICTORS, Estimator, TrackedPredictor, make_estimator
from moe_runtime.policies.prediction.base import Routes, shape_of
from moe_runtime.types import ExpertKey, ModelSignature

ALWAYS = ("random", "lru", "belady", "belady-bypass")
"""Policies that are replayed for comparison."""
SCOPES = ("per-layer", "global")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings of a replay."""

    policies: Sequence[str]
    capacities: Sequence[float]
    scope: str = "per-layer"
    adaptive: bool = False
    reset_per_sequence: bool = False
    training: Routes | None = None
    predictor: str | None = None
    trained: Estimator | None = None
    machine: Machine | None = None
    sizes: Mapping[ExpertKey, int] | None = None

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICIES:
                raise ValueError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
        if self.scope not in SCOPES:
            raise ValueError(f"unknown scope {self.scope!r}: {nearest(self.scope, SCOPES)}")
        for capacity in self.capacities:
            if not 0 < capacity <= 1:
                raise ValueError(
                    f"a capacity is a share of all experts, more than 0 and at most 1 (or 100 %), "
                    f"got {capacity:g}"
                )
        if self.adaptive and self.scope == "global":
            raise ValueError("adaptive shares divide layers; scope 'global' has none to divide")
        if self.predictor is not None and self.predictor not in PREDICTORS:
            raise ValueError(
                f"unknown predictor {self.predictor!r}: {nearest(self.predictor, PREDICTORS)}"
            )
        asked = "predicted" in self.policies
        if self.predictor is not None and self.machine is None and not asked:
            raise ValueError("a predictor needs modelled time; give --bandwidth too")
        if self.predictor is not None and self.training is None and self.trained is None:
            raise ValueError(
                f"predictor {self.predictor!r} needs a training trace, other than the replayed one "
                "(--train), or the file of a trained one (`moe-runtime predictor fit`)"
            )
        if self.sizes is not None and self.machine is not None:
            raise ValueError(
                "modelled time knows one size of all experts; leave out one of the two"
            )
        if self.reset_per_sequence and self.machine is not None:
            raise ValueError(
                "reset empties the cache at each request, and modelled time (bandwidth) goes on "
                "over all of them; leave out one of the two"
            )
        if asked and self.predictor is None:
            raise ValueError("policy 'predicted' needs a predictor; give --predictor too")

    @property
    def names(self) -> list[str]:
        """The policies to replay, each once, the bounds last."""
        return list(dict.fromkeys([*self.policies, *ALWAYS]))


@dataclass(frozen=True, kw_only=True)
class Row:
    policy: str
    capacity: float
    num_slots: int
    hit_rate: float
    all_resident_rate: float
    loads_per_layer_token: float
    gap_closed: float | None
    hit_rate_by_layer: list[float]
    accesses_per_s: float
    timed: dict[str, TimedReplay]
    loaded_bytes: int | None = None


def usual_capacities(signature: ModelSignature, scope: str) -> list[float]:
    """An eighth, a quarter and a half of all experts, as far as a token's experts fit."""
    total, least = signature.num_layers * signature.num_experts, least_slots(signature, scope)
    fitting = [share for share in (0.125, 0.25, 0.5) if round(share * total) >= least]
    return fitting or [least / total]


def least_slots(signature: ModelSignature, scope: str) -> int:
    """Slots without which a token's experts do not fit."""
    return signature.top_k * (signature.num_layers if scope == "per-layer" else 1)


def run_experiment(
    workload: Workload,
    experiment: Experiment,
    *,
    bounds: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Replays every policy at every capacity."""
    signature = workload.trace.signature
    total = signature.num_layers * signature.num_experts
    rows: list[Row] = []
    experiment = _with_predictor(workload, experiment, on_progress)
    for capacity in experiment.capacities:
        num_slots = round(capacity * total)
        least = least_slots(signature, experiment.scope)
        if num_slots < least:
            raise ValueError(
                f"a capacity of {capacity:.3g} is {num_slots} of {total} experts; a token needs "
                f"{least}, which is {least / total:.3g}"
            )
        rates: dict[str, float] = {}
        found: list[Row] = []
        for name in experiment.names if bounds else experiment.policies:
            on_progress(f"{name} at {capacity:.1%}")
            found.append(_row(workload, experiment, name, capacity, num_slots))
            rates[name] = found[-1].hit_rate
        low, high = rates.get("lru", 0.0), rates.get("belady-bypass", 0.0)
        for row in found:
            closed = (row.hit_rate - low) / (high - low) if bounds and high > low else None
            rows.append(replace(row, gap_closed=closed))
    return rows


def _row(
    workload: Workload, experiment: Experiment, name: str, capacity: float, num_slots: int
) -> Row:
    def make(events: Events) -> EvictionPolicy[ExpertKey]:
        return policy_of(workload, experiment, name, num_slots, events)

    start = time.perf_counter()
    replay = replay_demand(
        workload,
        make,
        num_slots,
        reset_per_sequence=experiment.reset_per_sequence,
        sizes=experiment.sizes,
    )
    elapsed_s = time.perf_counter() - start
    timed: dict[str, TimedReplay] = {}
    if experiment.machine is not None:
        kinds = ["off"]
        if experiment.predictor is not None and name in (*experiment.policies, "lru"):
            kinds.append(experiment.predictor)
        for kind in kinds:
            timed[kind] = replay_timed(
                workload,
                make(workload.keys),
                num_slots,
                experiment.machine,
                predictor=None if kind == "off" else _predictor(experiment),
            )
    return Row(
        policy=name,
        capacity=capacity,
        num_slots=num_slots,
        hit_rate=replay.hit_rate,
        all_resident_rate=replay.all_resident_rate,
        loads_per_layer_token=replay.loads_per_event,
        gap_closed=None,
        hit_rate_by_layer=[round(rate, 6) for rate in replay.hit_rate_by_layer().tolist()],
        accesses_per_s=replay.num_accesses / max(elapsed_s, 1e-9),
        timed=timed,
        loaded_bytes=replay.loaded_bytes,
    )


def policy_of(
    workload: Workload, experiment: Experiment, name: str, num_slots: int, events: Events
) -> EvictionPolicy[ExpertKey]:
    """An empty policy for a run of events."""
    training = experiment.training
    if name == "static" and training is None:
        training = routes_of(workload.trace)
    setting = Setting(
        shape=shape_of(workload.trace.signature),
        training=training,
        future=events,
        predictor=_predictor(experiment) if name == "predicted" else None,
        costs=experiment.sizes,
    )
    if experiment.scope == "global":
        return make_global_policy(name, setting=setting)
    return make_policy(name, num_slots=num_slots, setting=setting, adaptive=experiment.adaptive)


def _with_predictor(
    workload: Workload, experiment: Experiment, on_progress: Callable[[str], None]
) -> Experiment:
    """Trains the named predictor, once for all rows, where it is not trained yet."""
    if experiment.predictor is None or experiment.trained is not None:
        return experiment
    assert experiment.training is not None
    on_progress(f"training {experiment.predictor}")
    estimator = make_estimator(experiment.predictor, shape_of(workload.trace.signature))
    estimator.fit(experiment.training)
    return replace(experiment, trained=estimator)


def _predictor(experiment: Experiment) -> TrackedPredictor:
    assert experiment.trained is not None
    # A copy: a predictor learns from the requests that end in a replay.
    return TrackedPredictor(copy.deepcopy(experiment.trained))
