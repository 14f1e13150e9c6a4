"""Placements that integer programmes and assignment problems find: ExFlow and MoETuner."""

from functools import partial

from moe_runtime.policies.placement import algorithms
from moe_runtime.policies.placement.algorithms import Algorithms
from moe_runtime.research.placement_solvers.exflow import Affinity
from moe_runtime.research.placement_solvers.moetuner import TwoStage

SEARCHING: Algorithms = {
    "exflow": lambda options: Affinity(time_limit_s=options.time_limit_s),
    "moetuner": lambda options: TwoStage(
        load_slack=options.load_slack, time_limit_s=options.time_limit_s
    ),
}
"""The algorithms that search until their time is over, if they do not end before."""
ALGORITHMS: Algorithms = {**algorithms.ALGORITHMS, **SEARCHING}

place_experts = partial(algorithms.place_experts, algorithms=ALGORITHMS)
check_algorithm = partial(algorithms.check_algorithm, algorithms=ALGORITHMS)
