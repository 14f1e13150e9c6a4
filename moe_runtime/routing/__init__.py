"""Routing: gates choose experts for tokens; all of them produce one `Routing` value."""

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.capacity import Capacity, DropPolicy, expert_slots
from moe_runtime.routing.losses import LOSSES, LossInputs
from moe_runtime.routing.moepp import MoEPlusPlus, ZeroExpertCounts
from moe_runtime.routing.registry import GATES, gate_options, make_gate
from moe_runtime.routing.reinforce import Reinforce
from moe_runtime.routing.topk import GroupLimitedTopK, SigmoidTopK, SoftmaxTopK
from moe_runtime.routing.value import Policy, Routing, ZeroRouting, expert_counts

__all__ = [
    "GATES",
    "LOSSES",
    "Capacity",
    "Choice",
    "DropPolicy",
    "Gate",
    "GateOptions",
    "GroupLimitedTopK",
    "LossInputs",
    "MoEPlusPlus",
    "Policy",
    "Reinforce",
    "Routing",
    "RoutingContext",
    "SigmoidTopK",
    "SoftmaxTopK",
    "ZeroExpertCounts",
    "ZeroRouting",
    "expert_counts",
    "expert_slots",
    "gate_options",
    "make_gate",
]
