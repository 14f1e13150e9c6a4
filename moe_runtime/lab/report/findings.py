"""What a report says about a trace: measured, replayed and predicted, in a bounded time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.replay.evaluation import Evaluation, evaluate
from moe_runtime.lab.replay.experiment import Experiment, Row, run_experiment
from moe_runtime.lab.replay.timed import Machine, TimedReplay
from moe_runtime.lab.report.measures import (
    expert_loads,
    popularity_curves,
    reuse_distances,
    token_overlap,
)
from moe_runtime.lab.report.training_reuse import TrainingReuse, training_reuse
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.routes import routes_of, split_sequences, without_repeats
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.prediction import make_estimator
from moe_runtime.policies.prediction.base import Routes
from moe_runtime.types import ModelSignature

CAPACITIES = (0.125, 0.25, 0.375, 0.5, 0.75)
DISTANCES = (1, 2, 4)
_EVALUATED_TOKENS = 1000
_SEQUENCE_TOKENS = 8_000
"""Predictors learn from, and are judged on, the last requests of about so many tokens."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What a report on a trace is asked for.

    Attributes:
        policies: eviction policies beside LRU, random eviction and Belady's optimum.
        predictors: predictors to fit and to judge; the last one also prefetches.
        machine: the modelled machine of bytes and timeline.
        capacity: share of the experts that fit, for bytes and timeline.
        max_accesses: experts asked for after which a replay stops; the most recent steps count.
        assumes_size: the trace does not say how large the machine's experts are.
    """

    policies: Sequence[str]
    predictors: Sequence[str]
    machine: Machine
    capacity: float
    max_accesses: int
    assumes_size: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceFindings:
    """Everything that is drawn of a trace.

    Attributes:
        signature: the model.
        num_tokens, num_requests, num_steps: how much was recorded.
        loads: ``[L, E]`` share of the tokens that visit each expert.
        popularity: ``[L, E + 1]`` share of the visits to the n most visited experts.
        overlap: ``[L]`` share of experts that the token before visited as well.
        distances: ``[L, E + 1]`` accesses by reuse distance, first uses last.
        replayed_tokens: tokens of the steps that were replayed.
        rows: hit rates by policy and capacity, from a cold cache.
        evaluations: recall of the predictors on held-out sequences, the control first; empty where
            there are too few sequences to hold any out.
        test_sequences: sequences that recall was measured on.
        timed: modelled outcome without and with prefetch, by its predictor's name; ``off`` first.
        timed_workload: the later requests, which ``timed`` replayed.
        training: reuse between micro-batches and steps; None where nothing was trained.
        settings: what was asked for.
    """

    signature: ModelSignature
    num_tokens: int
    num_requests: int
    num_steps: int
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
    """Measures, replays and predicts.

    Args:
        trace: what was recorded; must hold tokens.
        settings: what to find out.
        on_progress: called with what is done next.

    Raises:
        ValueError: a policy or predictor is not known, or the capacity leaves a layer without room
            for a token's experts.
    """
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
        signature=trace.signature,
        num_tokens=trace.num_tokens,
        num_requests=len(np.unique(trace.token_request)),
        num_steps=trace.num_steps,
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
    unique = without_repeats(_latest_sequences(routes_of(trace)))
    if unique.num_sequences < 2 or not settings.predictors:
        return [], 0
    train, test = split_sequences(unique, test_share=0.5)
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
    """Replays the last requests; what prefetches has learned from those before them."""
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
