"""Routing replayed on a device in virtual time: who computes missing experts, and for how long.

Shape suffixes: N sequences, T steps, L layers, K top-k.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moe_runtime.planning.hybrid import MissPlan
from moe_runtime.planning.miss_speeds import MissSpeeds

HOW = ("all copied", "all on the CPU", "hybrid", "hybrid, one split")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of what happens to one expert.

    Attributes:
        cpu_s: measured on the CPU, by number of rows: a sample a call, gone through in turn.
        copy_s: over the link, one after the other.
        product_s: of the device.
        return_s: rows to the device.
    """

    cpu_s: Mapping[int, Sequence[float]]
    copy_s: float
    product_s: float
    return_s: float = 2e-5

    def samples(self) -> dict[int, Iterator[float]]:
        """Endless ones."""
        return {rows: itertools.cycle(found) for rows, found in self.cpu_s.items()}


class Split(NamedTuple):
    """A plan of which one more expert is divided (HeteGen): its first columns are the CPU's."""

    plan: MissPlan
    expert: int
    share: float


@dataclass
class Outcome:
    """Seconds of each step, predicted and spent, and misses by who computed them."""

    predicted_s: list[float] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    copied: int = 0
    computed: int = 0

    @property
    def step_s(self) -> float:
        """Of all experts of a step, on average."""
        return float(np.mean(self.spent_s))

    @property
    def error(self) -> float:
        """Median over the steps of how far the prediction was off, as a share of what was spent."""
        spent = np.array(self.spent_s)
        return float(np.median(np.abs(np.array(self.predicted_s) - spent) / spent))


class Replay:
    """The layers of a model, each with slots on the device for some of its experts (LRU)."""

    def __init__(self, machine: Machine, num_slots: int, num_experts: int, how: str) -> None:
        """Takes the number of slots of a layer, and one of `HOW`."""
        self.speeds = MissSpeeds()
        self._machine, self._how, self._slots = machine, how, num_slots
        self._samples = machine.samples()
        self._num_experts = num_experts
        self._caches: list[OrderedDict[int, None]] = []
        self._behind_s = 0.0  # of the link, for what nobody waits for

    def start(self, paths_NTLK: np.ndarray) -> None:
        """Every layer holds what these steps used most."""
        for layer in range(paths_NTLK.shape[2]):
            counts = Counter(paths_NTLK[:, :, layer].ravel().tolist())
            best = [e for e, _ in counts.most_common() if e < self._num_experts][: self._slots]
            self._caches.append(OrderedDict.fromkeys(reversed(best)))

    def run(self, paths_NTLK: np.ndarray) -> Outcome:
        """Steps of all sequences together, one token of each."""
        outcome = Outcome()
        for step in range(paths_NTLK.shape[1]):
            predicted = spent = 0.0
            for layer, cache in enumerate(self._caches):
                rows = Counter(paths_NTLK[:, step, layer].ravel().tolist())
                rows.pop(self._num_experts, None)
                of_layer = self._layer(cache, rows, outcome)
                predicted, spent = predicted + of_layer[0], spent + of_layer[1]
            outcome.predicted_s.append(predicted)
            outcome.spent_s.append(spent)
        return outcome

    def _layer(
        self, cache: OrderedDict[int, None], rows: Mapping[int, int], outcome: Outcome
    ) -> tuple[float, float]:
        missing = {expert: number for expert, number in rows.items() if expert not in cache}
        has_residents = len(missing) < len(rows)
        for expert in rows:
            if expert in cache:
                cache.move_to_end(expert)
        launch_s = self._machine.product_s * has_residents
        if not missing:
            self._behind_s = max(0.0, self._behind_s - launch_s)
            return launch_s, launch_s
        split = None
        plan = self._plan(missing, has_residents=has_residents)
        if self._how == "hybrid, one split" and plan.seconds:
            split = self._split(missing, plan, launch_s)
            plan = split.plan if split else plan
        spent = self._spend(plan, split, rows, launch_s)
        for expert in (*plan.copied, *plan.kept):
            cache[expert] = None
            while len(cache) > self._slots:
                cache.popitem(last=False)
        outcome.copied += len(plan.copied)
        outcome.computed += len(plan.computed)
        return plan.seconds or spent, spent

    def _plan(self, missing: Mapping[int, int], *, has_residents: bool) -> MissPlan:
        if self._how == "all copied":
            return MissPlan((*missing,), (), 0.0)
        if self._how == "all on the CPU":
            return MissPlan((), (*missing,), 0.0)
        machine, speeds = self._machine, self.speeds
        speeds.launch.add(machine.product_s)
        speeds.back.add(machine.return_s)
        return speeds.plan(
            missing, (), copy_s=machine.copy_s, read_s=0.0, has_residents=has_residents
        )

    def _split(self, missing: Mapping[int, int], plan: MissPlan, launch_s: float) -> Split | None:
        """The division of one expert that ends before the plan does; both sides end together.

        The part that was copied makes no whole expert, so that it does not stay.
        """
        machine = self._machine
        order = sorted(missing, key=lambda expert: (-missing[expert], expert))
        best, best_s = None, plan.seconds
        for number, expert in enumerate(order):
            rest_s = sum(self.speeds.cpu_s(missing[other]) for other in order[number + 1 :])
            own_s, copies_s = self.speeds.cpu_s(missing[expert]), number * machine.copy_s
            # rest + share * own + back = copies + (1 - share) * copy + product
            there_s = copies_s + machine.copy_s + machine.product_s
            share = (there_s - rest_s - machine.return_s) / (own_s + machine.copy_s)
            end_s = max(launch_s, rest_s + share * own_s + machine.return_s)
            if 0.0 < share < 1.0 and end_s < best_s:
                whole = MissPlan((*order[:number],), (*order[number + 1 :],), end_s)
                best, best_s = Split(whole, expert, share), end_s
        return best

    def _spend(
        self, plan: MissPlan, split: Split | None, rows: Mapping[int, int], launch_s: float
    ) -> float:
        """Seconds of the layer, with the next samples of the CPU."""
        machine = self._machine
        link_s = self._behind_s if plan.copied or split else 0.0  # a copy that began is not stopped
        device_s, cpu_s = launch_s, 0.0
        parts = [1.0] * len(plan.copied) + ([1.0 - split.share] if split else [])
        for part in parts:
            link_s += part * machine.copy_s
            device_s = max(device_s, link_s) + machine.product_s
        for expert in plan.computed:
            own_s = next(self._samples[rows[expert]])
            self.speeds.computed(rows[expert], own_s)
            cpu_s += own_s
        if split:
            cpu_s += split.share * next(self._samples[rows[split.expert]])
        spent = max(device_s, cpu_s + machine.return_s if cpu_s else 0.0)
        copies_s = (sum(parts) + len(plan.kept)) * machine.copy_s
        self._behind_s = max(0.0, self._behind_s + copies_s - spent)
        return spent
