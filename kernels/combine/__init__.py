"""`combine`: the weighted sum over the K expert outputs of each token."""

from typing import TYPE_CHECKING

from moe_runtime.kernels.combine.assignments import (
    combine_assignments,
    combine_assignments_reference,
)
from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.kernels.combine.op import IMPLS, combine
else:
    # its Triton part is not for models from `load`
    __getattr__ = lazy_names(__name__, {".op": "IMPLS combine"})

__all__ = ["IMPLS", "combine", "combine_assignments", "combine_assignments_reference"]
