"""The case ``placements``: placements by each algorithm, scored on later routing.

A repetition places experts by the first part of the trace and scores the placement on the rest.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moe_runtime.benchmarks import suite
from moe_runtime.policies.placement import Devices, Placement, PlacementOptions, RoutingProfile
from moe_runtime.policies.placement.scoring import (
    gpus_of_tokens,
    mean_score,
    random_placements,
    score_placement,
)
from moe_runtime.research.placement_solvers import ALGORITHMS, SEARCHING, place_experts

RANDOM = "random"
METRICS = {
    "place_s": suite.Metric("s"),
    "balancedness": suite.Metric("share", better="more"),
    "mean_max_load": suite.Metric("share"),
    "hops": suite.Metric("share"),
    "primary_hops": suite.Metric("share"),
    "node_hops": suite.Metric("share"),
    "devices_per_token": suite.Metric("count"),
    "staying_rows": suite.Metric("count"),
}
"""Seconds of the algorithm, and the scores of `PlacementScore`."""
_REPLICATING = ("round-robin", "eplb")


@dataclass(frozen=True, kw_only=True)
class PlacementsPlan:
    """The experts to place; ``future`` is the routing ``[T, L, K]`` that scores them."""

    profile: RoutingProfile
    future: np.ndarray
    devices: Devices
    options: PlacementOptions
    num_replicas: int = 0
    searches: bool = True

    def systems(self) -> "list[PlacedExperts]":
        """The baseline and every algorithm, with and without copies where it makes them."""
        size = self.future.shape[1], self.profile.num_experts
        found = [PlacedExperts(RANDOM, self, lambda: [*random_placements(*size, self.devices)])]
        for name in ALGORITHMS:
            if name in SEARCHING and not self.searches:
                continue
            found.append(PlacedExperts(name, self, partial(self._place, name, 0)))
            if self.num_replicas and name in _REPLICATING:
                make = partial(self._place, name, self.num_replicas)
                found.append(PlacedExperts(f"{name}, {self.num_replicas} replicas", self, make))
        return found

    def _place(self, algorithm: str, num_replicas: int) -> list[Placement]:
        rest = {"num_replicas": num_replicas, "options": self.options}
        return [place_experts(algorithm, self.profile, self.devices, **rest)]


class PlacedExperts(suite.BenchSystem):
    """An algorithm under test; the scored visits are checked against the placement."""

    def __init__(
        self, name: str, plan: PlacementsPlan, make: Callable[[], Sequence[Placement]]
    ) -> None:
        super().__init__(name)
        self._plan, self._make = plan, make

    def repeat(self) -> Mapping[str, suite.Number]:
        plan = self._plan
        start = time.perf_counter()
        with suite.peer_failures():
            placements = self._make()
        elapsed_s = time.perf_counter() - start
        for placement in placements if not self.compared else ():
            self._compare(placement)
        score = mean_score([score_placement(one, plan.future, plan.devices) for one in placements])
        found: dict[str, suite.Number] = {} if self.name == RANDOM else {"place_s": elapsed_s}
        return found | {name: getattr(score, name) for name in METRICS if name != "place_s"}

    def _compare(self, placement: Placement) -> None:
        slots = placement.expert_of_slot.reshape(placement.num_layers, placement.num_gpus, 1, -1)
        holds_LGE = (slots == np.arange(placement.num_experts)[:, None]).any(axis=-1)
        gpus = gpus_of_tokens(placement, self._plan.future)
        is_real = gpus >= 0
        layers = np.broadcast_to(np.arange(placement.num_layers)[:, None], gpus.shape)
        ids = self._plan.future[is_real].astype(np.int64)
        equal = int(holds_LGE[layers[is_real], gpus[is_real], ids].sum())
        difference = "visits were counted where their experts do not lie"
        self.count(int(is_real.sum()), equal, difference)


def measure_placements(
    plan: PlacementsPlan, rules: suite.Rules, settings: Mapping[str, Any]
) -> dict[str, Any]:
    importlib.import_module("scipy.optimize")  # else the time of the first one that solves
    return suite.measure_systems("placements", plan.systems(), METRICS, rules, settings)
