"""Experts spread over processes: dispatch, layouts, placements."""

from moe_runtime.parallel.dispatch import Dispatched, combine, dispatch
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.parallel.transport import FlatTransport, HierarchicalTransport, Transport

__all__ = [
    "Dispatched",
    "ExpertSlots",
    "FlatTransport",
    "HierarchicalTransport",
    "Transport",
    "combine",
    "dispatch",
]
