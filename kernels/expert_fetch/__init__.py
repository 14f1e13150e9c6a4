"""`fetch_experts`: experts that a step lacks, read by the GPU where they lie in host memory."""

from moe_runtime.kernels.expert_fetch.op import FetchTables, fetch_experts, fetch_experts_reference

__all__ = ["FetchTables", "fetch_experts", "fetch_experts_reference"]
