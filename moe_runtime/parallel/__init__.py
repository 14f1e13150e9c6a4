"""Experts spread over processes: dispatch, layouts, placements."""

from typing import TYPE_CHECKING

from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.parallel.communication.transport import (
        FlatTransport,
        HierarchicalTransport,
        Transport,
        measure_link,
        time_exchanges,
    )
    from moe_runtime.parallel.dispatching import Dispatched, combine, dispatch
    from moe_runtime.parallel.groups import LayoutGroups
    from moe_runtime.parallel.parallel_experts import ExpertGroup, ExpertSpread, ParallelExperts
    from moe_runtime.parallel.parallel_layout import ParallelLayout
    from moe_runtime.parallel.pipeline import Overlap, PanelExperts, StackedPanels, expert_parallel
    from moe_runtime.parallel.rebalancing import Rebalanced, Rebalancer
    from moe_runtime.parallel.replicas import ExpertMove, keep_in_place, sum_replica_gradients
    from moe_runtime.parallel.slices import slice_experts
    from moe_runtime.parallel.slot_exchange import SlotExchange
    from moe_runtime.parallel.slots import ExpertSlots
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".communication.transport": "FlatTransport HierarchicalTransport Transport "
            "measure_link time_exchanges",
            ".dispatching": "Dispatched combine dispatch",
            ".groups": "LayoutGroups",
            ".parallel_experts": "ExpertGroup ExpertSpread ParallelExperts",
            ".parallel_layout": "ParallelLayout",
            ".pipeline": "Overlap PanelExperts StackedPanels expert_parallel",
            ".rebalancing": "Rebalanced Rebalancer",
            ".replicas": "ExpertMove keep_in_place sum_replica_gradients",
            ".slices": "slice_experts",
            ".slot_exchange": "SlotExchange",
            ".slots": "ExpertSlots",
        },
    )

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
