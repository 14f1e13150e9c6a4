"""`batched_matmul`: a few rows times each of a batch of matrices that are read where they lie."""

from moe_runtime.kernels.batched_matmul.op import batched_matmul
from moe_runtime.kernels.batched_matmul.reference import batched_matmul_reference

__all__ = ["batched_matmul", "batched_matmul_reference"]
