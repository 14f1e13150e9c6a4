"""The case ``policies``: how often eviction policies hit on a recorded trace, and how fast.

A repetition replays the whole trace from a cold start at every capacity. The beginning is also
served by the policy's object, as in a run: a policy whose hits differ gets no numbers.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks import suite
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import read_bounded
from moe_runtime.lab.replay.experiment import Experiment, policy_of, run_experiment
from moe_runtime.lab.replay.untimed import ask_policy, replay_demand
from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.prediction import Estimator, Routes
from moe_runtime.types import ExpertKey

_COMPARED_EVENTS = 4096


@dataclass(frozen=True, kw_only=True)
class PoliciesPlan:
    workload: Workload
    policies: Sequence[str]
    capacities: Sequence[float]
    scope: str
    training: Routes | None = None
    reset_per_sequence: bool = False
    predictor: Estimator | None = None
    sizes: Mapping[ExpertKey, int] | None = None

    def experiment(self, policy: str) -> Experiment:
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


def metrics_of(plan: PoliciesPlan) -> dict[str, suite.Metric]:
    """Speed, share of hits, share of layer visits without a load, bytes, at each capacity."""
    metrics: dict[str, suite.Metric] = {}
    for capacity in plan.capacities:
        metrics |= {
            f"accesses_per_s_at_{capacity:g}": suite.Metric("accesses/s", better="more"),
            f"hit_rate_at_{capacity:g}": suite.Metric("share", better="more"),
            f"all_resident_at_{capacity:g}": suite.Metric("share", better="more"),
        }
        if plan.sizes is not None:
            metrics[f"read_bytes_at_{capacity:g}"] = suite.Metric("bytes")
    return metrics


class PolicyReplays(suite.BenchSystem):
    """A policy under test; events that are served twice must have as many hits."""

    def __init__(self, name: str, plan: PoliciesPlan) -> None:
        super().__init__(name)
        self.plan = plan
        self._experiment = plan.experiment(name)

    def repeat(self) -> Mapping[str, suite.Number]:
        if not self.compared:
            self._compare()
        found: dict[str, suite.Number] = {}
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
            raise suite.PeerFailedError(
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
    plan: PoliciesPlan, rules: suite.Rules, settings: Mapping[str, Any]
) -> dict[str, Any]:
    systems = [PolicyReplays(name, plan) for name in plan.policies]
    return suite.measure_systems("policies", systems, metrics_of(plan), rules, settings)


_MAX_BYTES = 64 << 20
# What others call Belady's optimum with the right to keep a newcomer out, and the best fixed set.
_OTHER_NAMES = {"belady_bypass": "belady-bypass", "static_oracle_pop": "static"}
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "policy": str,
    "scope": str,
    "capacity": int,
    "reset_per_sequence": int,
    "accesses": int,
    "hits": int,
    "all_k_hit_rate": (int, float),
}


def require_golden(workload: Workload, path: Path) -> int:
    """Replays every row of a file of exact hit counts, which another replay of the trace found."""
    rows = _rows(path)
    for number, row in enumerate(rows):
        place = f"{path}: row {number} ({row['policy']}, {row['scope']}, {row['capacity']} slots)"
        try:
            found = _replay(workload, row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        wanted = (row["hits"], row["all_k_hit_rate"])
        if found != wanted:
            raise ValueError(
                f"{place}: expected {wanted[0]} hits and {wanted[1]} of the visits without a load, "
                f"the replay gives {found[0]} and {found[1]}"
            )
    return len(rows)


def _replay(workload: Workload, row: Mapping[str, Any]) -> tuple[int, float]:
    """Hits, and the share of visits without a load."""
    signature = workload.trace.signature
    slots = row["capacity"] * (signature.num_layers if row["scope"] == "per_layer" else 1)
    experiment = Experiment(
        policies=[_OTHER_NAMES.get(str(row["policy"]), str(row["policy"]))],
        capacities=[slots / (signature.num_layers * signature.num_experts)],
        scope=row["scope"].replace("_", "-"),
        reset_per_sequence=bool(row["reset_per_sequence"]),
    )
    (found,) = run_experiment(workload, experiment, bounds=False)
    return round(found.hit_rate * row["accesses"]), round(found.all_resident_rate, 6)


def _rows(path: Path) -> list[dict[str, Any]]:
    raw = read_bounded(path, max_bytes=_MAX_BYTES)
    with blamed_on(f"{path}: not JSON"):
        content = json.loads(raw)
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows:
        raise CheckpointError(f"{path}: expected a list of rows of hit counts")
    for number, row in enumerate(rows):
        for name, kind in _KINDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                wanted = "a text" if kind is str else "a number"
                raise CheckpointError(f"{path}: row {number}: expected {wanted} as {name!r}")
    return rows
