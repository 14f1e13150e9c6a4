"""`grouped_gemm`: rows sorted by expert times expert weights, read through a slot table."""

from moe_runtime.kernels.grouped_gemm.op import IMPLS, grouped_gemm

__all__ = ["IMPLS", "grouped_gemm"]
