"""`single_query_attention`: attention of one query over cached keys and values, read once.

Shape suffixes: B batch, H query heads, G key heads, S cached tokens, D key width, V value width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.rounded_rows import widen_rows, width_of
from moe_runtime.kernels.native import (
    CACHED_CODES,
    DTYPE_CODES,
    NEEDS_TORCH,
    STATUS_NO_MEMORY,
    NativeLibrary,
    chosen_library,
    kernel_problem,
    native_library,
    needs_torch,
)
from moe_runtime.kernels.operands import precise_dtype

Impl = Literal["auto", "native", "reference"]
MAX_COLUMNS = 8192  # of a key, which the kernel keeps on the stack


def single_query_attention(
    query_BHD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes `softmax(scale * query . keys + mask) . values` for one query per head.

    Consecutive query heads share a key head (grouped-query attention, Ainslie et al., 2023). A sink
    is an extra score of its head that only adds to the softmax's sum (Xiao et al., 2023; gpt-oss).

    Args:
        query_BHD: H a multiple of G; fp32, bf16 or fp16.
        key_BGSD: S at least 1, unit stride along D. Keys and values have the dtype of the query, or
            are int8, as `round_rows` gives them.
        mask_BS: fp32, added to the scores, or None.
        sinks_H: fp32, bf16 or fp16, or None.
        impl: As in `attention_step`.

    Returns:
        `[B, H, V]` in the dtype of the query; sums are in fp32.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    arguments = (query_BHD, key_BGSD, value_BGSV, mask_BS, scale, sinks_H)
    problem = _problem(query_BHD, key_BGSD, value_BGSV, mask_BS, sinks_H)
    if problem:
        raise ValueError(problem)
    library = chosen_library(impl, _native_problem(query_BHD, key_BGSD, value_BGSV, sinks_H))
    if library is None:
        return single_query_attention_reference(*arguments)
    return _run_native(library, *arguments)


def native_attention(
    query_BHD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor | None:
    """`single_query_attention` by the C kernel, or None if it cannot take these."""
    library = native_library()
    if library is None or _native_problem(query_BHD, key_BGSD, value_BGSV, sinks_H):
        return None
    problem = _problem(query_BHD, key_BGSD, value_BGSV, mask_BS, sinks_H)
    if problem:
        raise ValueError(problem)
    return _run_native(library, query_BHD, key_BGSD, value_BGSV, mask_BS, scale, sinks_H)


def _problem(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> str | None:
    """What is wrong with the arguments, or None."""
    if query.ndim != 3 or key.ndim != 4 or value.ndim != 4:
        shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        return f"expected query [B, H, D], key [B, G, S, D] and value [B, G, S, V], got {shapes}"
    batch, heads, dim = query.shape
    groups, length = key.shape[1:3]
    is_fitting = len(key) == batch and width_of(key) == dim and key.dtype is value.dtype
    if not is_fitting or value.shape[:3] != key.shape[:3]:
        return (
            f"key and value must be [{batch}, G, S, {dim}] and [{batch}, G, S, V] of one dtype, "
            f"got {key.dtype} {list(key.shape)} and {value.dtype} {list(value.shape)}"
        )
    if groups == 0 or heads % groups or length == 0:
        return f"{heads} query heads need key heads that divide them, got {groups} of {length} keys"
    if mask is not None and (mask.shape != (batch, length) or mask.dtype != torch.float32):
        return f"mask must be fp32 [{batch}, {length}], got {mask.dtype} {list(mask.shape)}"
    if sinks is not None and sinks.shape != (heads,):
        return f"sinks must be [{heads}], got {list(sinks.shape)}"
    return None


def _native_problem(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    dtype = query.dtype
    is_known = dtype in DTYPE_CODES and {key.dtype, value.dtype} in ({dtype}, {torch.uint8})
    if not (is_known and query.is_cpu and key.is_cpu and value.is_cpu):
        return (
            f"it takes fp32, bf16 or fp16, and int8 caches, on the CPU, got {dtype} on {key.device}"
        )
    if query.shape[-1] > MAX_COLUMNS:
        return f"keys have at most {MAX_COLUMNS} elements, got {query.shape[-1]}"
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        return f"keys and values need unit stride, got {key.stride()} and {value.stride()}"
    if sinks is not None and (problem := kernel_problem(sinks)):
        return problem
    return NEEDS_TORCH if needs_torch(query, key, value, sinks) else None


def _run_native(
    library: NativeLibrary, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, scale: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    query = query.contiguous()
    mask = None if mask is None else mask.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    batch, heads, dim = query.shape
    groups, length = key.shape[1:3]
    value_dim = width_of(value)
    out = query.new_empty((batch, heads, value_dim))
    size = query.element_size()
    key_strides, value_strides = strides_in_bytes(key), strides_in_bytes(value)
    status = library.single_query_attention(
        query.data_ptr(), heads * dim * size,
        key.data_ptr(), *key_strides, value.data_ptr(), *value_strides,
        None if mask is None else mask.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        0 if sinks is None else DTYPE_CODES[sinks.dtype],
        out.data_ptr(),
        batch, groups, heads // groups, length, dim, value_dim,
        scale, DTYPE_CODES[query.dtype], CACHED_CODES[key.dtype], library.shares_threads(),
    )  # fmt: skip
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for the scores of {heads} heads and {length} keys")
    return out


def strides_in_bytes(cached: Tensor) -> tuple[int, int, int]:
    """Bytes between sequences, heads and tokens of keys or values `[B, G, S, D]`."""
    outer, inner, row, _ = cached.stride()
    size = cached.element_size()
    return outer * size, inner * size, row * size


def single_query_attention_reference(
    query_BHD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The specification in torch, in fp32 (fp64 for fp64), rounded once."""
    wide = precise_dtype(query_BHD)
    if key_BGSD.dtype is torch.uint8:
        key_BGSD, value_BGSV = widen_rows(key_BGSD, wide), widen_rows(value_BGSV, wide)
    shared = query_BHD.shape[1] // key_BGSD.shape[1]
    query_BGRD = query_BHD.to(wide).unflatten(1, (-1, shared)) * scale
    scores_BGRS = query_BGRD @ key_BGSD.to(wide).transpose(-1, -2)
    if mask_BS is not None:
        scores_BGRS = scores_BGRS + mask_BS[:, None, None].to(wide)
    if sinks_H is not None:
        sinks_BGR1 = sinks_H.to(wide).view(-1, shared, 1).expand(*scores_BGRS.shape[:-1], 1)
        scores_BGRS = torch.cat((scores_BGRS, sinks_BGR1), dim=-1)
    weights_BGRS = torch.softmax(scores_BGRS, dim=-1)[..., : key_BGSD.shape[2]]
    mixed_BGRV = weights_BGRS @ value_BGSV.to(wide)
    return mixed_BGRV.flatten(1, 2).to(query_BHD.dtype)
