"""`linear`: a matrix product with row-major weights, at the speed of memory for few rows."""

from moe_runtime.kernels.linear.frozen import frozen_linear
from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    UNLIMITED,
    is_faster_widened,
    linear,
    native_row_limit,
)
from moe_runtime.kernels.linear.quantized import (
    ReusedValues,
    quantized_linear,
    quantized_row_limit,
)

__all__ = [
    "ROWS_PER_CALL",
    "UNLIMITED",
    "ReusedValues",
    "frozen_linear",
    "is_faster_widened",
    "linear",
    "native_row_limit",
    "quantized_linear",
    "quantized_row_limit",
]
