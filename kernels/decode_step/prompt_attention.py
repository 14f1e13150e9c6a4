"""`prompt_attention`: attention of many queries without a mask in memory.

Shape suffixes: B batch, H query heads, G key heads, Q queries, S tokens, D key width, V value
width.
"""

from __future__ import annotations

import sys
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.single_query_attention import Impl
from moe_runtime.kernels.native import (
    DTYPE_CODES,
    STATUS_NO_MEMORY,
    NativeLibrary,
    chosen_library,
    kernel_problem,
    native_library,
)
from moe_runtime.kernels.operands import precise_dtype


class Sight(NamedTuple):
    """The keys that queries see: query q sees keys up to `place + q`, the last `window` of them.

    Attributes:
        place: Index of the first query among the keys.
        window: None for all keys.
    """

    place: int
    window: int | None = None

    def allows(self, num_queries: int, length: int) -> Tensor:
        """`[Q, S]` bool: which keys each query sees."""
        keys = torch.arange(length)
        ends = torch.arange(self.place, self.place + num_queries)[:, None]
        allowed = keys <= ends
        return allowed if self.window is None else allowed & (keys > ends - self.window)


def prompt_attention(
    query_BHQD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    sight: Sight,
    scale: float,
    sinks_H: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes `softmax(scale * query . keys) . values` over the keys that each query sees.

    Consecutive query heads share a key head; sinks are as in `single_query_attention`. Scores exist
    for a few queries and keys at a time (FlashAttention, Dao et al., 2022).

    Args:
        query_BHQD: H a multiple of G; fp32, bf16 or fp16.
        key_BGSD: In that dtype; all three have unit stride along columns.
        sinks_H: fp32, bf16 or fp16, or None.
        impl: As in `attention_step`.

    Returns:
        `[B, Q, H, V]` in the dtype of the query. Sums are in fp32; the kernel rounds exponentials
            to bf16 before their product with bf16 values. With it, a query's bits do not depend on
            other queries or on threads.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    arguments = (query_BHQD, key_BGSD, value_BGSV, sight, scale, sinks_H)
    problem = _problem(query_BHQD, key_BGSD, value_BGSV, sight, sinks_H)
    if problem:
        raise ValueError(problem)
    unable = _native_problem(query_BHQD, key_BGSD, value_BGSV, sinks_H)
    library = chosen_library(impl, unable)
    return _run(library, *arguments) if library else prompt_attention_reference(*arguments)


def native_prompt_attention(
    query_BHQD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    sight: Sight,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor | None:
    """`prompt_attention` by the C kernel, or None if it cannot take these."""
    if native_library() is None or _native_problem(query_BHQD, key_BGSD, value_BGSV, sinks_H):
        return None
    arguments = (query_BHQD, key_BGSD, value_BGSV, sight, scale, sinks_H)
    return prompt_attention(*arguments, impl="native")


def _problem(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, sinks: Tensor | None
) -> str | None:
    """What is wrong with the arguments, or None."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        return f"expected query [B, H, Q, D], key [B, G, S, D], value [B, G, S, V], got {shapes}"
    batch, heads, _, dim = query.shape
    groups, length = key.shape[1:3]
    if key.shape != (batch, groups, length, dim) or value.shape[:3] != key.shape[:3]:
        return (
            f"key and value must be [{batch}, G, S, {dim}] and [{batch}, G, S, V], got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    if groups == 0 or heads % groups or length == 0:
        return f"{heads} query heads need key heads that divide them, got {groups} of {length} keys"
    if sight.place < 0 or (sight.window is not None and sight.window < 1):
        return f"place must be at least 0 and window at least 1, got {sight}"
    if sinks is not None and sinks.shape != (heads,):
        return f"sinks must be [{heads}], got {list(sinks.shape)}"
    return None


def _native_problem(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    for tensor in (query, key, value):
        if tensor.dtype is not query.dtype or tensor.stride(-1) != 1:
            return f"queries, keys and values need unit stride and {query.dtype}"
    return kernel_problem(query, key, value, sinks)


def _run(
    library: NativeLibrary, query: Tensor, key: Tensor, value: Tensor,
    sight: Sight, scale: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    sinks = None if sinks is None else sinks.contiguous()
    (batch, heads, num_queries, dim), size = query.shape, query.element_size()
    width = value.shape[-1]
    out = query.new_empty((batch, num_queries, heads, width))
    strides = [stride * size for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    numbers = (
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), *strides,
        batch, heads, key.shape[1], num_queries, key.shape[2], dim, width,
        sight.place, sys.maxsize // 2 if sight.window is None else sight.window,
        DTYPE_CODES[query.dtype], 0 if sinks is None else DTYPE_CODES[sinks.dtype],
        library.shares_threads(),
    )  # fmt: skip
    if library.prompt_attention(pack("26qd", *numbers, scale)) == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for the scores of {heads} heads")
    return out


def prompt_attention_reference(
    query_BHQD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    sight: Sight,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The specification in torch, in fp32 (fp64 for fp64), rounded once."""
    wide, shared = precise_dtype(query_BHQD), query_BHQD.shape[1] // key_BGSD.shape[1]
    key_BHSD, value_BHSV = (
        part.to(wide).repeat_interleave(shared, dim=1) for part in (key_BGSD, value_BGSV)
    )
    scores_BHQS = query_BHQD.to(wide) @ key_BHSD.mT * scale
    allowed = sight.allows(query_BHQD.shape[2], key_BGSD.shape[2]).to(scores_BHQS.device)
    scores_BHQS = scores_BHQS.masked_fill(~allowed, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(wide).view(-1, 1, 1).expand(*scores_BHQS.shape[:-1], 1)
        scores_BHQS = torch.cat((scores_BHQS, sinks), dim=-1)
    weights_BHQS = torch.softmax(scores_BHQS, dim=-1)[..., : key_BGSD.shape[2]]
    return (weights_BHQS @ value_BHSV).transpose(1, 2).to(query_BHQD.dtype)
