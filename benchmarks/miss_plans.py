"""Plan where missing experts are computed: `python benchmarks/miss_plans.py TRACE [--save]`.

The routing of a trace is replayed in virtual time, with links, processors and shares of resident
experts of many kinds. No clock and no device is used: the seconds follow from the speeds. Compared
are copies of every missing expert, the CPU for every missing expert, and what the runtime plans.

Shape suffixes: N sequences, S steps, L layers, K top-k.
"""

import itertools
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.device.misses import MissPlan, MissSpeeds
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.memory.device.device_store import BROUGHT_MARGIN
from moe_runtime.memory.device.recent_uses import RecentUses
from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.classic import AgingLFU
from moe_runtime.types import ExpertKey

Way = Literal["copied", "on the CPU", "planned"]


@dataclass(frozen=True)
class Machine:
    """The times of one expert, in seconds.

    Attributes:
        cpu_s: on the CPU, by number of rows: the mean of calls that differ by up to `spread`.
        copy_s: over the link, one after the other.
        product_s: of the device.
        return_s: rows to the device.
        spread: share of the mean.
    """

    cpu_s: Mapping[int, float]
    copy_s: float
    product_s: float
    return_s: float = 2e-5
    spread: float = 0.2


class Replayed(NamedTuple):
    """Seconds of all experts of each step, `[S]`."""

    predicted_S: np.ndarray
    spent_S: np.ndarray

    @property
    def mean_s(self) -> float:
        return float(self.spent_S.mean())

    @property
    def error(self) -> float:
        """Median relative error of the prediction over the steps."""
        return float(np.median(np.abs(self.predicted_S - self.spent_S) / self.spent_S))


class MissReplay:
    """The layers of a model, each with device slots for some of its experts."""

    def __init__(
        self,
        machine: Machine,
        num_slots: int,
        way: Way,
        new_policy: Callable[[], EvictionPolicy[int]],
        *,
        num_slow: int = 0,
    ) -> None:
        """The CPU is ten times slower for the first ``num_slow`` experts."""
        self._machine, self._way, self._num_slots = machine, way, num_slots
        self._new_policy, self._speeds, self._drawn = new_policy, MissSpeeds(), random.Random(0)
        self._uses, self._num_slow = RecentUses(), num_slow
        self._policies: list[EvictionPolicy[int]] = []
        self._behind_s = 0.0  # of the link, for copies that nothing waits for

    def run(self, paths_NSLK: np.ndarray, num_warm: int) -> Replayed:
        """Run the steps of all sequences together, one token each. Every layer starts with its most
        used experts of the first steps, which are not counted.
        """
        self._policies = [
            self._warm(layer, paths_NSLK[:, :num_warm, layer])
            for layer in range(paths_NSLK.shape[2])
        ]
        found = [
            np.sum([self._layer(*each) for each in enumerate(step)], axis=0)
            for step in paths_NSLK[:, num_warm:].transpose(1, 2, 0, 3)
        ]
        return Replayed(*np.array(found).T)

    def _warm(self, layer: int, ids_NSK: np.ndarray) -> EvictionPolicy[int]:
        """A policy that holds the most used experts and their last uses."""
        most = Counter(ids_NSK.ravel().tolist()).most_common(self._num_slots)
        policy = self._new_policy()
        for expert, _ in reversed(most):
            policy.insert(expert)
        for step_NK in ids_NSK.swapaxes(0, 1):
            self._uses.count(layer, step_NK.ravel().tolist())
            for expert in set(step_NK.ravel().tolist()):
                if expert in policy:
                    policy.touch(expert)
        return policy

    def _layer(self, layer: int, ids_NK: np.ndarray) -> tuple[float, float]:
        """Predicted and spent seconds."""
        policy = self._policies[layer]
        self._uses.count(layer, ids_NK.ravel().tolist())
        rows = Counter(ids_NK.ravel().tolist())
        missing = {expert: number for expert, number in rows.items() if expert not in policy}
        for expert in rows.keys() - missing.keys():
            policy.touch(expert)
        residents_s = self._machine.product_s * (len(missing) < len(rows))
        if not missing:
            self._behind_s = max(0.0, self._behind_s - residents_s)
            return residents_s, residents_s
        plan, kept = self._plan(missing, has_residents=residents_s > 0), list[int]()
        if not self._behind_s:
            kept = [expert for expert in plan.kept if self._is_worth(layer, expert)]
        spent_s = self._spend(plan, len(kept), rows, residents_s)
        for expert in (*plan.copied, *kept):
            self._insert(policy, expert, rows)
        return plan.seconds or spent_s, spent_s

    def _is_worth(self, layer: int, expert: int) -> bool:
        """The same decision as in `DeviceStore.bring`."""
        policy = self._policies[layer]
        if len(policy) < self._num_slots:
            return True
        victim = policy.victim(lambda _: True, expert)
        assert victim is not None
        uses = [self._uses.of(ExpertKey(layer, one)) for one in (expert, victim)]
        return uses[0] > uses[1] + BROUGHT_MARGIN

    def _insert(self, policy: EvictionPolicy[int], expert: int, rows: Mapping[int, int]) -> None:
        """Insert an expert. Experts in use stay, as in a store, unless there are no others."""
        if len(policy) == self._num_slots:
            victim = policy.victim(lambda key: key not in rows, expert)
            victim = policy.victim(lambda _: True, expert) if victim is None else victim
            assert victim is not None
            policy.remove(victim)
        policy.insert(expert)

    def _plan(self, missing: Mapping[int, int], *, has_residents: bool) -> MissPlan:
        if self._way == "copied":
            return MissPlan((*missing,), (), 0.0)
        if self._way == "on the CPU":
            return MissPlan((), (*missing,), 0.0)
        machine, speeds = self._machine, self._speeds
        speeds.launch.add(machine.product_s)
        speeds.back.add(machine.return_s)
        links = {"copy_s": machine.copy_s, "read_s": 0.0}
        return speeds.plan(missing, (), has_residents=has_residents, **links)

    def _spend(
        self, plan: MissPlan, num_kept: int, rows: Mapping[int, int], residents_s: float
    ) -> float:
        machine = self._machine
        link_s = self._behind_s if plan.copied else 0.0  # a started copy is not stopped
        device_s, cpu_s = residents_s, 0.0
        for _ in plan.copied:
            link_s += machine.copy_s
            device_s = max(device_s, link_s) + machine.product_s
        for expert in plan.computed:
            jitter = self._drawn.uniform(1 - machine.spread, 1 + machine.spread)
            own_s = machine.cpu_s[rows[expert]] * jitter * (10 if self._num_slow else 1)
            self._num_slow = max(0, self._num_slow - 1)
            self._speeds.computed(rows[expert], own_s)
            cpu_s += own_s
        spent_s = max(device_s, cpu_s + machine.return_s if cpu_s else 0.0)
        copies_s = (len(plan.copied) + num_kept) * machine.copy_s
        self._behind_s = max(0.0, self._behind_s + copies_s - spent_s)
        return spent_s


WEIGHT_BYTES = {"bf16": 2.0, "MXFP4": 17 / 32}
LINKS_GB_S, CPUS_GB_S, SHARES, SEQUENCES = (12, 25, 50), (36, 60), (0.25, 0.5, 0.75), (1, 4)
DEVICE_BYTES_S, LATENCY_S = 1e12, 1e-5
ROW = 0.1
"""Cost of each further row on the CPU, relative to the first."""
WARM_STEPS, COLD_STEPS = 32, 16
"""Steps that fill the slots, and uncounted steps that measure speeds."""
NUM_SLOW = 3
"""In the last column, this many first experts are ten times slower on the CPU."""
METRICS = facts("s", "copied_s", "cpu_s", "planned_s") | facts(
    "share", "of_the_better", "of_the_better_after_slow_samples"
)


def machine_of(expert_bytes: float, link_bytes_s: float, cpu_bytes_s: float) -> Machine:
    one_s = expert_bytes / cpu_bytes_s
    return Machine(
        cpu_s={rows: one_s * (1 + ROW * (rows - 1)) for rows in range(1, 1 + max(SEQUENCES))},
        copy_s=expert_bytes / link_bytes_s + LATENCY_S,
        product_s=expert_bytes / DEVICE_BYTES_S + LATENCY_S,
    )


def compare(machine: Machine, num_slots: int, paths_NSLK: np.ndarray) -> dict[str, float]:
    """Mean seconds of a step's experts, each way."""

    def mean_s(way: Way, num_slow: int = 0) -> float:
        replay = MissReplay(machine, num_slots, way, AgingLFU, num_slow=num_slow)
        return float(replay.run(paths_NSLK, WARM_STEPS).spent_S[COLD_STEPS:].mean())

    found = {"copied_s": mean_s("copied"), "cpu_s": mean_s("on the CPU")}
    better_s, planned_s = min(found.values()), mean_s("planned")
    ratios = planned_s / better_s, mean_s("planned", NUM_SLOW) / better_s
    return found | {"planned_s": planned_s, **dict(zip([*METRICS][-2:], ratios, strict=True))}


@script(
    trace=option(Path, "recorded routing"),
    steps=option(150, "of each sequence"),
    weights=option(3 * 2880 * 2880, "of one expert"),
)
def main(options: Namespace) -> int:
    routes = routes_of(read_any_trace(options.trace))
    spans = [routes.tokens_of(number) for number in range(routes.num_sequences)]
    long = [span for span in spans if span.stop - span.start >= options.steps]
    if len(long) < max(SEQUENCES) or options.steps <= WARM_STEPS + COLD_STEPS:
        raise UnsupportedUseError(
            f"expected {max(SEQUENCES)} sequences of --steps {options.steps}, more than "
            f"{WARM_STEPS + COLD_STEPS}; {options.trace} has {len(long)}"
        )
    paths_NSLK = np.stack([routes.expert_ids[span][: options.steps] for span in long[:4]])
    num_experts = int(paths_NSLK.max()) + 1
    settings = {"trace": options.trace.name, "steps": options.steps, "weights": options.weights}
    results = ScriptResults("miss-plans", options, settings, METRICS)
    cases = itertools.product(WEIGHT_BYTES.items(), LINKS_GB_S, CPUS_GB_S, SHARES, SEQUENCES)
    for (dtype, weight_bytes), link, cpu, share, number in cases:
        machine = machine_of(options.weights * weight_bytes, link * 1e9, cpu * 1e9)
        name = f"{dtype}, link {link} GB/s, CPU {cpu} GB/s, {share:.0%} resident, {number} at once"
        results.add(name, [compare(machine, round(share * num_experts), paths_NSLK[:number])])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
