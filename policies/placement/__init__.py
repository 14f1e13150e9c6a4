"""Where experts and their replicas lie: pure decisions over loads, by name."""

from moe_runtime.policies.placement.algorithms import (
    EPLB,
    PACKINGS,
    AntiCorrelation,
    Greedy,
    PlacementOptions,
    RoundRobin,
    place_experts,
    rebalance,
)
from moe_runtime.policies.placement.base import (
    EMPTY,
    Devices,
    Placement,
    PlacementPolicy,
    RoutingProfile,
)

__all__ = [
    "EMPTY",
    "EPLB",
    "PACKINGS",
    "AntiCorrelation",
    "Devices",
    "Greedy",
    "Placement",
    "PlacementOptions",
    "PlacementPolicy",
    "RoundRobin",
    "RoutingProfile",
    "place_experts",
    "rebalance",
]
