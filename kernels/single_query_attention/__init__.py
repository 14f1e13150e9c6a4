"""`single_query_attention`: attention of one query over cached keys and values, read once."""

from moe_runtime.kernels.single_query_attention.op import native_attention, single_query_attention

__all__ = ["native_attention", "single_query_attention"]
