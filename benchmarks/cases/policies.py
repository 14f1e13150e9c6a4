"""The case ``policies``: hit rates and speed of eviction policies on a recorded trace.

A repetition replays the whole trace from a cold start at every capacity. The policy's live object
also serves the start of the trace; if its hits differ, the policy gets no numbers.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.suite import (
    BenchSystem,
    Metric,
    Number,
    Rules,
    measure_systems,
)
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import read_bounded
from moe_runtime.lab.replay.experiment import Experiment, policy_of, run_experiment
from moe_runtime.lab.replay.untimed import ask_policy, replay_demand
from moe_runtime.lab.traces.workload import Workload

_COMPARED_EVENTS = 4096


def metrics_of(asked: Experiment) -> dict[str, Metric]:
    """Speed, hit rate, share of layer visits without a load, and bytes, at each capacity."""
    kinds = {"accesses_per_s": Metric("accesses/s", better="more")}
    kinds |= dict.fromkeys(("hit_rate", "all_resident"), Metric("share", better="more"))
    kinds |= {} if asked.sizes is None else {"read_bytes": Metric("bytes")}
    every = [(name, capacity) for capacity in asked.capacities for name in kinds]
    return {f"{name}_at_{capacity:g}": kinds[name] for name, capacity in every}


class PolicyReplays(BenchSystem):
    """A policy under test; the replay and the live object must have equal hits."""

    def __init__(self, name: str, asked: Experiment, workload: Workload) -> None:
        super().__init__(name)
        trained = asked.trained if name == "predicted" else None
        own: dict[str, Any] = {"trained": trained, "predictor": trained and trained.name}
        self._asked, self._workload = dataclasses.replace(asked, policies=[name], **own), workload

    def repeat(self) -> Mapping[str, Number]:
        if not self.compared:
            self._compare()
        found: dict[str, Number] = {}
        for row in run_experiment(self._workload, self._asked, bounds=False):
            of_row = {"accesses_per_s": row.accesses_per_s, "hit_rate": row.hit_rate}
            of_row["all_resident"] = row.all_resident_rate
            if row.loaded_bytes is not None:
                of_row["read_bytes"] = row.loaded_bytes
            found |= {f"{name}_at_{row.capacity:g}": value for name, value in of_row.items()}
        return found

    def _compare(self) -> None:
        first, signature = (
            beginning(self._workload, _COMPARED_EVENTS),
            self._workload.trace.signature,
        )
        for capacity in self._asked.capacities:
            slots = round(capacity * signature.num_layers * signature.num_experts)
            make = partial(policy_of, self._workload, self._asked, self.name, slots)
            timed = replay_demand(first, make, slots)
            asked = ask_policy(first, make, slots, [0, first.num_events])
            equal = int((timed.hits == asked.hits).sum())
            difference = "events differ between the replay and the policy"
            self.count(first.num_events, equal, difference)


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
    asked: Experiment, rules: Rules, settings: Mapping[str, Any], workload: Workload
) -> dict[str, Any]:
    systems = [PolicyReplays(name, asked, workload) for name in asked.policies]
    return measure_systems("policies", systems, metrics_of(asked), rules, settings)


_MAX_BYTES = 64 << 20
# Other names for Belady's optimum with bypassing, and for the best fixed set.
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
    """Replay every row of a file of exact hit counts made by another replay of the trace."""
    rows, signature = _rows(path), workload.trace.signature
    for number, row in enumerate(rows):
        place = f"{path}: row {number} ({row['policy']}, {row['scope']}, {row['capacity']} slots)"
        slots = row["capacity"] * (signature.num_layers if row["scope"] == "per_layer" else 1)
        try:
            experiment = Experiment(
                policies=[_OTHER_NAMES.get(str(row["policy"]), str(row["policy"]))],
                capacities=[slots / (signature.num_layers * signature.num_experts)],
                scope=row["scope"].replace("_", "-"),
                reset_per_sequence=bool(row["reset_per_sequence"]),
            )
            (one,) = run_experiment(workload, experiment, bounds=False)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        found = round(one.hit_rate * row["accesses"]), round(one.all_resident_rate, 6)
        wanted = row["hits"], row["all_k_hit_rate"]
        if found != wanted:
            raise ValueError(
                f"{place}: expected {wanted[0]} hits and {wanted[1]} of the visits without a load, "
                f"the replay gives {found[0]} and {found[1]}"
            )
    return len(rows)


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
