"""`linear`: a matrix product with row-major weights, at the speed of memory for few rows."""

from moe_runtime.kernels.linear.op import linear, native_row_limit

__all__ = ["linear", "native_row_limit"]
