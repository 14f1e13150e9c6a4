"""Experts spread over processes: dispatch, layouts, placements."""

from moe_runtime.parallel.communication.measure import measure_link, time_exchanges
from moe_runtime.parallel.communication.transport import (
    FlatTransport,
    HierarchicalTransport,
    Transport,
)
from moe_runtime.parallel.dispatch import Dispatched, combine, dispatch
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.panels import PanelExperts, StackedPanels
from moe_runtime.parallel.parallel_experts import ExpertGroup, ExpertSpread, ParallelExperts
from moe_runtime.parallel.parallel_layout import ParallelLayout
from moe_runtime.parallel.pipeline import Overlap, expert_parallel
from moe_runtime.parallel.rebalancing import Rebalanced, Rebalancer
from moe_runtime.parallel.replicas import ExpertMove, keep_in_place, sum_replica_gradients
from moe_runtime.parallel.slices import slice_experts
from moe_runtime.parallel.slot_exchange import SlotExchange
from moe_runtime.parallel.slots import ExpertSlots

__all__ = [
    "Dispatched",
    "ExpertGroup",
    "ExpertMove",
    "ExpertSlots",
    "ExpertSpread",
    "FlatTransport",
    "HierarchicalTransport",
    "LayoutGroups",
    "Overlap",
    "PanelExperts",
    "ParallelExperts",
    "ParallelLayout",
    "Rebalanced",
    "Rebalancer",
    "SlotExchange",
    "StackedPanels",
    "Transport",
    "combine",
    "dispatch",
    "expert_parallel",
    "keep_in_place",
    "measure_link",
    "slice_experts",
    "sum_replica_gradients",
    "time_exchanges",
]
