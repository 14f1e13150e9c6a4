"""Routing replayed on a device in virtual time: who computes missing experts, and for how long.

Shape suffixes: N sequences, S steps, L layers, K top-k.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from moe_runtime.inference.device.misses import MissPlan, MissSpeeds
from moe_runtime.policies.eviction.base import EvictionPolicy

Way = Literal["copied", "on the CPU", "planned"]


@dataclass(frozen=True)
class Machine:
    """Seconds of what happens to one expert.

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
        """Median over the steps of how far the prediction was off, as a share of what was spent."""
        return float(np.median(np.abs(self.predicted_S - self.spent_S) / self.spent_S))


class MissReplay:
    """The layers of a model, each with slots on the device for some of its experts."""

    def __init__(
        self,
        machine: Machine,
        num_slots: int,
        way: Way,
        new_policy: Callable[[], EvictionPolicy[int]],
    ) -> None:
        self._machine, self._way, self._num_slots = machine, way, num_slots
        self._new_policy = new_policy
        self._speeds, self._drawn = MissSpeeds(), random.Random(0)
        self._policies: list[EvictionPolicy[int]] = []
        self._behind_s = 0.0  # of the link, for what nobody waits for

    def run(self, paths_NSLK: np.ndarray, num_warm: int) -> Replayed:
        """Steps of all sequences together, one token of each.

        Every layer begins with the experts that it used most in the first steps, which go before.
        """
        self._policies = [
            self._warm(paths_NSLK[:, :num_warm, layer]) for layer in range(paths_NSLK.shape[2])
        ]
        found = [
            np.sum([self._layer(*each) for each in zip(self._policies, step, strict=True)], axis=0)
            for step in paths_NSLK[:, num_warm:].transpose(1, 2, 0, 3)
        ]
        return Replayed(*np.array(found).T)

    def _warm(self, ids_NSK: np.ndarray) -> EvictionPolicy[int]:
        """A policy that holds the experts that were used most, and knows when."""
        most = Counter(ids_NSK.ravel().tolist()).most_common(self._num_slots)
        policy = self._new_policy()
        for expert, _ in reversed(most):
            policy.insert(expert)
        for step_NK in ids_NSK.swapaxes(0, 1):
            for expert in set(step_NK.ravel().tolist()):
                if expert in policy:
                    policy.touch(expert)
        return policy

    def _layer(self, policy: EvictionPolicy[int], ids_NK: np.ndarray) -> tuple[float, float]:
        """Predicted and spent seconds."""
        rows = Counter(ids_NK.ravel().tolist())
        missing = {expert: number for expert, number in rows.items() if expert not in policy}
        for expert in rows.keys() - missing.keys():
            policy.touch(expert)
        residents_s = self._machine.product_s * (len(missing) < len(rows))
        plan, spent_s = MissPlan((), (), residents_s), residents_s
        if missing:
            plan = self._plan(missing, has_residents=residents_s > 0)
            spent_s = self._spend(plan, rows, residents_s)
        else:
            self._behind_s = max(0.0, self._behind_s - spent_s)
        for expert in (*plan.copied, *plan.kept):
            self._insert(policy, expert, rows)
        return plan.seconds or spent_s, spent_s

    def _insert(self, policy: EvictionPolicy[int], expert: int, rows: Mapping[int, int]) -> None:
        """What the layer has just used stays, as in a store; if that is all, one of it goes."""
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
        return speeds.plan(
            missing, (), copy_s=machine.copy_s, read_s=0.0, has_residents=has_residents
        )

    def _spend(self, plan: MissPlan, rows: Mapping[int, int], residents_s: float) -> float:
        machine = self._machine
        link_s = self._behind_s if plan.copied else 0.0  # a copy that began is not stopped
        device_s, cpu_s = residents_s, 0.0
        for _ in plan.copied:
            link_s += machine.copy_s
            device_s = max(device_s, link_s) + machine.product_s
        for expert in plan.computed:
            jitter = self._drawn.uniform(1 - machine.spread, 1 + machine.spread)
            own_s = machine.cpu_s[rows[expert]] * jitter
            self._speeds.computed(rows[expert], own_s)
            cpu_s += own_s
        spent_s = max(device_s, cpu_s + machine.return_s if cpu_s else 0.0)
        copies_s = (len(plan.copied) + len(plan.kept)) * machine.copy_s
        self._behind_s = max(0.0, self._behind_s + copies_s - spent_s)
        return spent_s
