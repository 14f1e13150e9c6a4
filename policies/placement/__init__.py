"""Where experts and their replicas lie: pure decisions over loads, by name.

Placements that need a solver (ExFlow's and MoETuner's) are in
``moe_runtime.research.placement_solvers``.
"""

from moe_runtime.policies.placement.balancing import AntiCorrelation, Greedy, RoundRobin
from moe_runtime.policies.placement.base import EMPTY, Devices, Placement, PlacementPolicy
from moe_runtime.policies.placement.eplb import EPLB, rebalance
from moe_runtime.policies.placement.packing import PACKINGS
from moe_runtime.policies.placement.profile import RoutingProfile

__all__ = [
    "EMPTY",
    "EPLB",
    "PACKINGS",
    "AntiCorrelation",
    "Devices",
    "Greedy",
    "Placement",
    "PlacementPolicy",
    "RoundRobin",
    "RoutingProfile",
    "rebalance",
]
