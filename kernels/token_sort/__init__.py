"""`token_sort`: expert ids of a batch to rows grouped by expert."""

from moe_runtime.kernels.token_sort.op import IMPLS, SortedTokens, token_sort

__all__ = ["IMPLS", "SortedTokens", "token_sort"]
