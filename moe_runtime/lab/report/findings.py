"""Findings of a report on a trace: measured, replayed and predicted, in a bounded time.

In a trace of training a forward pass is one micro-batch; those with the same `step_update` are one
optimizer step.

Legend: T tokens, S steps, L layers, E experts of a layer, K experts that a token visits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.record_tiers import TierReplay, replay_tiers
from moe_runtime.lab.replay.evaluation import Evaluation, evaluate
from moe_runtime.lab.replay.experiment import Experiment, Row, run_experiment
from moe_runtime.lab.replay.timed import Machine, TimedReplay
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.routes import routes_of, split_numbers, unrepeated
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.prediction import make_estimator
from moe_runtime.policies.prediction.base import Routes
from moe_runtime.types import ExpertKey

CAPACITIES = (0.125, 0.25, 0.375, 0.5, 0.75)
DISTANCES = (1, 2, 4)
HOME_SHARES = (0.125, 0.25, 0.5, 0.75)
_EVALUATED_TOKENS = 1000
_SEQUENCE_TOKENS = 8_000
"""Predictors learn from, and are judged on, the last requests of about so many tokens."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Options of a report on a trace; ``capacity`` is the share of the experts that fit."""

    policies: Sequence[str]
    predictors: Sequence[str]
    machine: Machine
    capacity: float
    max_accesses: int
    assumes_size: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingReuse:
    """Experts that micro-batches and steps share; ``use`` ``[L, E]`` is a share of the steps."""

    num_steps: int
    num_passes: int
    pass_share: float
    step_share: float
    asked: int
    fetched: int
    returning: float
    use: np.ndarray
    tiers: dict[float, TierReplay]


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceFindings:
    """Everything that a report draws of a trace.

    Attributes:
        loads: ``[L, E]`` share of the tokens that visit each expert.
        popularity: ``[L, E + 1]`` share of the visits to the n most visited experts.
        overlap: ``[L]`` share of experts that the token before visited as well.
        distances: ``[L, E + 1]`` accesses by reuse distance, first uses last.
    """

    trace: Trace
    loads: np.ndarray
    popularity: np.ndarray
    overlap: np.ndarray
    distances: np.ndarray
    replayed_tokens: int
    rows: list[Row]
    evaluations: list[Evaluation]
    test_sequences: int
    timed: dict[str, TimedReplay]
    timed_workload: Workload
    training: TrainingReuse | None
    settings: ReportSettings


def find(
    trace: Trace, settings: ReportSettings, *, on_progress: Callable[[str], None] = lambda _: None
) -> TraceFindings:
    """Measures, replays and predicts."""
    on_progress("measuring the trace")
    loads = expert_loads(trace)
    sample = _latest_steps(trace, settings.max_accesses)
    workload = workload_of(sample)
    distances = reuse_distances(workload)
    least = trace.signature.top_k / trace.signature.num_experts
    rows = run_experiment(
        workload,
        Experiment(
            policies=list(settings.policies),
            capacities=[share for share in CAPACITIES if share >= least] or [1.0],
        ),
        on_progress=lambda what: on_progress(f"replaying {what}"),
    )
    evaluations, test_sequences = _judge(trace, settings, on_progress)
    on_progress("replaying in modelled time")
    timed_workload, timed = _replay_in_time(trace, settings)
    return TraceFindings(
        trace=trace,
        loads=loads,
        popularity=popularity_curves(loads),
        overlap=token_overlap(trace),
        distances=distances,
        replayed_tokens=sample.num_tokens,
        rows=rows,
        evaluations=evaluations,
        test_sequences=test_sequences,
        timed=timed,
        timed_workload=timed_workload,
        training=training_reuse(trace),
        settings=settings,
    )


def _latest_steps(trace: Trace, max_accesses: int) -> Trace:
    """The last steps that together ask for no more experts than this; at least one step."""
    per_token = trace.signature.num_layers * trace.signature.top_k
    wanted = trace.num_tokens - max_accesses // per_token
    first = int(np.searchsorted(trace.step_start[:-1], max(0, wanted)))
    return trace.steps(min(first, trace.num_steps - 1), trace.num_steps)


def _judge(
    trace: Trace, settings: ReportSettings, on_progress: Callable[[str], None]
) -> tuple[list[Evaluation], int]:
    """Recall on sequences that were held out; nothing where there is only one."""
    routes = _latest_sequences(routes_of(trace))
    unique = routes.select(unrepeated(routes))
    if unique.num_sequences < 2 or not settings.predictors:
        return [], 0
    train, test = map(unique.select, split_numbers(unique.num_sequences, test_share=0.5))
    estimators = []
    for name in settings.predictors:
        on_progress(f"training {name}")
        estimators.append(make_estimator(name, train.shape))
        estimators[-1].fit(train)
    on_progress("measuring recall")
    reachable = [distance for distance in DISTANCES if distance < train.shape.num_layers]
    found = evaluate(estimators, test, distances=reachable or [1], max_tokens=_EVALUATED_TOKENS)
    return found, test.num_sequences


def _latest_sequences(routes: Routes) -> Routes:
    """The last whole sequences that together are not too long; two at least, if there are two."""
    lengths = np.diff(routes.offsets)[::-1]
    fitting = int(np.searchsorted(np.cumsum(lengths), _SEQUENCE_TOKENS, side="right"))
    count = min(max(2, fitting), routes.num_sequences)
    return routes.select(range(routes.num_sequences - count, routes.num_sequences))


def _replay_in_time(
    trace: Trace, settings: ReportSettings
) -> tuple[Workload, dict[str, TimedReplay]]:
    """Replays the last requests, with a predictor trained on those before them."""
    first = trace.num_steps - _latest_steps(trace, settings.max_accesses).num_steps
    everything = workload_of(trace)
    starts = everything.step[everything.sequence_starts]
    later = starts[(starts >= max(first, starts[len(starts) // 2])) & (starts > 0)]
    cut = int(later[0]) if later.size else first
    predictor = settings.predictors[-1] if settings.predictors and later.size else None
    workload = workload_of(trace.steps(cut, trace.num_steps))
    experiment = Experiment(
        policies=["lru"],
        capacities=[settings.capacity],
        machine=settings.machine,
        predictor=predictor,
        training=_latest_sequences(routes_of(trace.steps(0, cut))) if predictor else None,
    )
    (row,) = run_experiment(workload, experiment, bounds=False)
    return workload, row.timed


def expert_loads(trace: Trace) -> np.ndarray:
    """Share of the tokens that visit each expert: ``[L, E]`` float64."""
    num_layers, num_experts = trace.signature.num_layers, trace.signature.num_experts
    loads = np.zeros((num_layers, num_experts))
    for layer in range(num_layers):
        ids = trace.expert_ids[:, layer].ravel()
        loads[layer] = np.bincount(ids[ids != trace.absent], minlength=num_experts)
    return loads / max(1, trace.num_tokens)


def popularity_curves(loads_LE: np.ndarray) -> np.ndarray:
    """Share of a layer's visits that go to its n most visited experts: ``[L, E + 1]``, n from 0."""
    ranked = -np.sort(-loads_LE, axis=1)
    totals = np.maximum(ranked.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.pad(np.cumsum(ranked / totals, axis=1), ((0, 0), (1, 0)))


def reuse_distances(workload: Workload) -> np.ndarray:
    """Number of other experts of the layer used since the last use of an expert.

    Returns:
        ``[L, E + 1]`` int64: accesses by distance; the last column counts first uses.
    """
    signature = workload.trace.signature
    num_experts = signature.num_experts
    counts = np.zeros((signature.num_layers, num_experts + 1), np.int64)
    last_use = np.full((signature.num_layers, num_experts), -1, np.int64)
    stamp = 0
    for keys in workload.keys:
        layer = keys[0].layer
        stamps = last_use[layer]
        experts = np.fromiter((key.expert for key in keys), np.int64, count=len(keys))
        own = stamps[experts]
        distances = (stamps > own[:, None]).sum(axis=1)
        distances[own < 0] = num_experts
        np.add.at(counts[layer], distances, 1)
        stamps[experts] = stamp + np.arange(len(experts))
        stamp += len(experts)
    return counts


def token_overlap(trace: Trace) -> np.ndarray:
    """Share of a token's experts that the token before, of the same request, visited: ``[L]``."""
    order = np.lexsort((trace.token_position, trace.token_request))
    ids = trace.expert_ids[order].astype(np.int64)
    follows = np.diff(trace.token_request[order]) == 0
    now, before = ids[1:][follows], ids[:-1][follows]
    known = now != trace.absent
    shared = (now[..., :, None] == before[..., None, :]).any(axis=-1) & known
    visits = known.sum(axis=(0, 2))
    return np.divide(
        shared.sum(axis=(0, 2)), visits, out=np.full(len(visits), np.nan), where=visits > 0
    )


def training_reuse(trace: Trace, *, shares: Sequence[float] = HOME_SHARES) -> TrainingReuse | None:
    """Measures reuse in a trace of training; None of other traces."""
    if trace.step_update is None or not trace.num_steps:
        return None
    signature = trace.signature
    used = np.zeros((trace.num_steps, signature.num_layers, signature.num_experts), bool)
    for step, layer, experts in trace.accesses():
        used[step, layer, experts] = True
    numbers, step_of_pass = np.unique(trace.step_update, return_inverse=True)
    by_step = np.zeros((len(numbers), *used.shape[1:]), bool)
    for step, found in zip(step_of_pass, used, strict=True):
        by_step[step] |= found
    again = by_step[1:] & by_step[:-1]
    keys = [ExpertKey(*place) for place in np.ndindex(*used.shape[1:])]
    steps = [[keys[place] for place in np.flatnonzero(found)] for found in by_step]
    return TrainingReuse(
        num_steps=len(numbers),
        num_passes=len(used),
        pass_share=float(used.mean()),
        step_share=float(by_step.mean()),
        asked=int(used.sum()),
        fetched=int(by_step.sum()),
        returning=float(again.sum() / max(1, by_step[1:].sum())) if len(again) else float("nan"),
        use=by_step.mean(axis=0),
        tiers={share: replay_tiers(steps, keys, round(share * len(keys))) for share in shares},
    )
