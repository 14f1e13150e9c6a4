"""`linear`: a product with row-major weights, at the speed of memory for few rows."""

from typing import TYPE_CHECKING

from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    UNLIMITED,
    is_faster_widened,
    linear,
    native_row_limit,
)
from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.kernels.linear.quantized import (
        frozen_linear,
        quantized_linear,
        quantized_row_limit,
        values_of,
    )
else:
    __getattr__ = lazy_names(
        __name__, {".quantized": "frozen_linear quantized_linear quantized_row_limit values_of"}
    )

__all__ = [
    "ROWS_PER_CALL",
    "UNLIMITED",
    "frozen_linear",
    "is_faster_widened",
    "linear",
    "native_row_limit",
    "quantized_linear",
    "quantized_row_limit",
    "values_of",
]
