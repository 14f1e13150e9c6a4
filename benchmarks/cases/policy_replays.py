"""The case ``policies``: eviction policies on a recorded trace, how often they hit and how fast.

A repetition replays the whole trace from a cold start at every capacity. Before the first one the
beginning of the trace is served twice, by the replay that is timed and by the policy's object, as
in a run: a policy whose hits differ at any event gets no numbers. Hit rates are the same in every
repetition; speeds are not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_runtime.benchmarks.suite.results import (
    Metric,
    describe_system,
    make_results,
    quality_of,
    versions,
)
from moe_runtime.benchmarks.suite.runner import Number, PeerFailedError, Rules, run_in_turn
from moe_runtime.lab.replay.experiment import Experiment, policy_of, run_experiment
from moe_runtime.lab.replay.untimed import ask_policy, replay_demand
from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.prediction import Estimator, Routes
from moe_runtime.types import ExpertKey

_COMPARED_EVENTS = 4096


@dataclass(frozen=True, kw_only=True)
class PoliciesPlan:
    """What is replayed.

    Attributes:
        workload: the events.
        policies: names, each once.
        capacities: shares of all experts that fit.
        scope: ``per-layer`` or ``global``.
        training: what learners are taught first; None leaves them to the workload.
        reset_per_sequence: each request has a cache and policies of its own.
        predictor: a trained one, which ``predicted`` asks.
        sizes: bytes of each expert, where they differ: what is read is weighed by them.
    """

    workload: Workload
    policies: Sequence[str]
    capacities: Sequence[float]
    scope: str
    training: Routes | None = None
    reset_per_sequence: bool = False
    predictor: Estimator | None = None
    sizes: Mapping[ExpertKey, int] | None = None

    def experiment(self, policy: str) -> Experiment:
        """The replays of a policy.

        Raises:
            ValueError: there is no such policy, scope or capacity.
        """
        asked = self.predictor if policy == "predicted" else None
        return Experiment(
            policies=[policy],
            capacities=self.capacities,
            scope=self.scope,
            training=self.training,
            reset_per_sequence=self.reset_per_sequence,
            predictor=None if asked is None else asked.name,
            trained=asked,
            sizes=self.sizes,
        )


def metrics_of(plan: PoliciesPlan) -> dict[str, Metric]:
    """Speed, share of hits, share of layer visits without a load, bytes, at each capacity."""
    metrics: dict[str, Metric] = {}
    for capacity in plan.capacities:
        metrics |= {
            f"accesses_per_s_at_{capacity:g}": Metric("accesses/s", better="more"),
            f"hit_rate_at_{capacity:g}": Metric("share", better="more"),
            f"all_resident_at_{capacity:g}": Metric("share", better="more"),
        }
        if plan.sizes is not None:
            metrics[f"read_bytes_at_{capacity:g}"] = Metric("bytes")
    return metrics


class PolicyReplays:
    """A policy under test.

    Attributes:
        name: the policy's.
        compared, equal: events that were served twice, and how many with as many hits.
    """

    def __init__(self, name: str, plan: PoliciesPlan) -> None:
        self.name, self.plan = name, plan
        self.compared = self.equal = 0
        self._experiment = plan.experiment(name)

    def repeat(self) -> Mapping[str, Number]:
        """Replays the trace at every capacity.

        Raises:
            PeerFailedError: the replay is not what the policy does.
        """
        if not self.compared:
            self._compare()
        found: dict[str, Number] = {}
        for row in run_experiment(self.plan.workload, self._experiment, bounds=False):
            found |= {
                f"accesses_per_s_at_{row.capacity:g}": row.accesses_per_s,
                f"hit_rate_at_{row.capacity:g}": row.hit_rate,
                f"all_resident_at_{row.capacity:g}": row.all_resident_rate,
            }
            if row.loaded_bytes is not None:
                found[f"read_bytes_at_{row.capacity:g}"] = row.loaded_bytes
        return found

    def _compare(self) -> None:
        whole = self.plan.workload
        first = beginning(whole, _COMPARED_EVENTS)
        signature = whole.trace.signature
        for capacity in self.plan.capacities:
            slots = round(capacity * signature.num_layers * signature.num_experts)
            make = partial(policy_of, whole, self._experiment, self.name, slots)
            timed = replay_demand(first, make, slots)
            asked = ask_policy(first, make, slots, [0, first.num_events])
            self.compared += first.num_events
            self.equal += int((timed.hits == asked.hits).sum())
        if self.equal < self.compared:
            raise PeerFailedError(
                f"the replay and the policy differ at {self.compared - self.equal} of "
                f"{self.compared} events"
            )


def beginning(workload: Workload, num_events: int) -> Workload:
    """The first events of a workload."""
    end = min(num_events, workload.num_events)
    return dataclasses.replace(
        workload,
        keys=workload.keys[:end],
        step=workload.step[:end],
        layer=workload.layer[:end],
        key_numbers=workload.key_numbers[: workload.starts[end]],
        starts=workload.starts[: end + 1],
    )


def measure_policies(
    plan: PoliciesPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures the policies; the content of a results file.

    Raises:
        ValueError: an unknown policy or scope, or a capacity without room for a token's experts.
    """
    systems = [PolicyReplays(name, plan) for name in plan.policies]
    found, ended = run_in_turn(
        systems, rules, clock, on_repetition=on_repetition, is_stopping=is_stopping
    )
    return make_results(
        "policies",
        settings,
        ended,
        [
            describe_system(
                one.name,
                found[one.name],
                metrics_of(plan),
                system_versions=versions(),
                quality=quality_of(one),
            )
            for one in systems
        ],
    )
