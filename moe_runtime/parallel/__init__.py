"""Experts spread over processes: dispatch, layouts, placements."""

from moe_runtime.parallel.dispatch import Dispatched, combine, dispatch
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.layout import ParallelLayout, legal_layouts
from moe_runtime.parallel.pipeline import Overlap, expert_parallel
from moe_runtime.parallel.slices import slice_experts
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.parallel.transport import FlatTransport, HierarchicalTransport, Transport

__all__ = [
    "Dispatched",
    "ExpertSlots",
    "FlatTransport",
    "HierarchicalTransport",
    "LayoutGroups",
    "Overlap",
    "ParallelLayout",
    "Transport",
    "combine",
    "dispatch",
    "expert_parallel",
    "legal_layouts",
    "slice_experts",
]
