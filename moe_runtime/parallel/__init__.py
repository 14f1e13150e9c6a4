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
    from moe_runtime.parallel.dispatching import (
        Dispatched,
        Overlap,
        PanelExperts,
        StackedPanels,
        combine,
        dispatch,
        expert_parallel,
    )
    from moe_runtime.parallel.groups import LayoutGroups, ParallelLayout
    from moe_runtime.parallel.parallel_experts import (
        ExpertGroup,
        ExpertSpread,
        ParallelExperts,
        Rebalanced,
        Rebalancer,
        slice_experts,
    )
    from moe_runtime.parallel.replicas import (
        ExpertMove,
        SlotExchange,
        keep_in_place,
        sum_replica_gradients,
    )
    from moe_runtime.parallel.slots import ExpertSlots
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".communication.transport": "FlatTransport HierarchicalTransport Transport "
            "measure_link time_exchanges",
            ".dispatching": "Dispatched Overlap PanelExperts StackedPanels combine dispatch "
            "expert_parallel",
            ".groups": "LayoutGroups ParallelLayout",
            ".parallel_experts": "ExpertGroup ExpertSpread ParallelExperts Rebalanced Rebalancer "
            "slice_experts",
            ".replicas": "ExpertMove SlotExchange keep_in_place sum_replica_gradients",
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
