"""The case ``predictors``: recall on held-out sequences, and the cost of a prediction.

A control that knows the answer must reach full recall, or no predictor gets numbers. A repetition
asks the live object for every layer of the first held-out steps.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_runtime.benchmarks import suite
from moe_runtime.lab.replay.evaluation import Evaluation, evaluate
from moe_runtime.lab.replay.experiment import Experiment, run_experiment
from moe_runtime.lab.replay.timed import Machine
from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.prediction import Estimator, Routes, TrackedPredictor, make_estimator

_TIMED_STEPS = 256


@dataclass(frozen=True, kw_only=True)
class PredictorsPlan:
    predictors: Sequence[str]
    training: Routes
    test: Routes
    served: Workload
    distances: Sequence[int]
    max_tokens: int | None = None
    seed: int = 0
    machine: Machine | None = None
    capacities: Sequence[float] = ()


def metrics_of(plan: PredictorsPlan) -> dict[str, suite.Metric]:
    """Seconds of a step, recall at each distance, effect of prefetching at each capacity."""
    metrics = {"prediction_s": suite.Metric("s")}
    for distance in plan.distances:
        for width in ("k", "2k"):
            metrics[f"recall_at_{width}_ahead_{distance}"] = suite.Metric("share", better="more")
    for capacity in plan.capacities if plan.machine else ():
        metrics[f"useful_prefetches_at_{capacity:g}"] = suite.Metric("share", better="more")
        metrics[f"reads_of_lru_at_{capacity:g}"] = suite.Metric("share")
        metrics[f"waits_of_lru_at_{capacity:g}"] = suite.Metric("share")
    return metrics


class MeasuredPredictor(suite.BenchSystem):
    """A predictor under test. The control's recalls must be complete."""

    def __init__(self, name: str, plan: PredictorsPlan) -> None:
        super().__init__(name)
        self._plan, self.is_timed = plan, False
        self.estimator = make_estimator(name, plan.training.shape)
        self.estimator.fit(plan.training)
        control, counted = evaluate(
            [self.estimator],
            plan.test,
            distances=plan.distances,
            max_tokens=plan.max_tokens,
            seed=plan.seed,
        )
        complete = [share == 1 for share in _recalls(control).values()]
        self.compared, self.equal = len(complete), sum(complete)
        # values that are equal in every repetition
        self._found = _recalls(counted) | _prefetching(name, self.estimator, plan)

    def repeat(self) -> Mapping[str, suite.Number]:
        """Ask for the next layer before and after every layer, as a run does."""
        if self.equal < self.compared or not self.compared:
            raise suite.PeerFailedError(
                f"the control, which knows the answer, found it in {self.equal} of {self.compared} "
                "recalls"
            )
        served, seconds = self._plan.served, list[float]()
        predictor = TrackedPredictor(copy.deepcopy(self.estimator))
        num_events = int(served.step.searchsorted(_TIMED_STEPS))
        for number, (begins, routed) in enumerate(list(served.routing(0, num_events))):
            start = time.perf_counter()
            if begins is not None:
                seconds.append(0.0)
                served.begin(number, begins, [predictor])
                predictor.predict(-1, 1)
            predictor.observe(routed)
            predictor.predict(routed.layer, 1)
            seconds[-1] += time.perf_counter() - start
        self.is_timed = True
        return {"prediction_s": seconds, **self._found}


def _recalls(counted: Evaluation) -> dict[str, suite.Number]:
    """Means over layers, for distances that have any."""
    shares = {
        f"recall_at_{width}_ahead_{recall.distance}": share
        for recall in counted.recalls
        for width, share in (("k", recall.mean_at_k), ("2k", recall.mean_at_2k))
    }
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def _prefetching(name: str, estimator: Estimator, plan: PredictorsPlan) -> dict[str, suite.Number]:
    """Shares of the replay with LRU; nothing if no prefetch, read or wait occurred."""
    if plan.machine is None:
        return {}
    experiment = Experiment(
        policies=["lru"],
        capacities=plan.capacities,
        predictor=name,
        trained=estimator,
        machine=plan.machine,
    )
    found: dict[str, suite.Number] = {}
    for row in run_experiment(plan.served, experiment, bounds=False):
        without, with_it = row.timed["off"].total, row.timed[name].total
        shares = {
            "useful_prefetches": (with_it.useful, with_it.prefetches),
            "reads_of_lru": (with_it.misses + with_it.prefetches, without.misses),
            "waits_of_lru": (with_it.stall_s, without.stall_s),
        }
        found |= {
            f"{metric}_at_{row.capacity:g}": part / whole
            for metric, (part, whole) in shares.items()
            if whole
        }
    return found


def measure_predictors(
    plan: PredictorsPlan,
    rules: suite.Rules,
    settings: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    systems: list[MeasuredPredictor] = []
    for name in plan.predictors:
        say(f"{name}: fitting it, and counting its recall")
        systems.append(MeasuredPredictor(name, plan))
        if rules.is_stopping():
            break

    def is_stopping() -> bool:
        return rules.is_stopping() and all(one.is_timed for one in systems)

    until_timed = replace(rules, is_stopping=is_stopping)
    return suite.measure_systems("predictors", systems, metrics_of(plan), until_timed, settings)
