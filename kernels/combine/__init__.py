"""`combine`: the weighted sum over the K expert outputs of each token."""

from moe_runtime.kernels.combine.op import (
    IMPLS,
    combine,
    combine_assignments,
    combine_assignments_reference,
)

__all__ = ["IMPLS", "combine", "combine_assignments", "combine_assignments_reference"]
