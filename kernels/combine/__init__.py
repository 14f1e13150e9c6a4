"""`combine`: the weighted sum over the K expert outputs of each token."""

from moe_runtime.kernels.combine.op import IMPLS, combine
from moe_runtime.kernels.combine.slots import combine_slots, combine_slots_reference

__all__ = ["IMPLS", "combine", "combine_slots", "combine_slots_reference"]
