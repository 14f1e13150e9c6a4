"""`linear`: a matrix product with row-major weights, at the speed of memory for few rows."""

from moe_runtime.kernels.linear.frozen import frozen_linear
from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    UNLIMITED,
    is_faster_widened,
    linear,
    native_row_limit,
)

__all__ = [
    "ROWS_PER_CALL",
    "UNLIMITED",
    "frozen_linear",
    "is_faster_widened",
    "linear",
    "native_row_limit",
]
