"""`latent_attention`: multi-head latent attention (DeepSeek-V2) of one query per sequence.

Shape suffixes: B queries, H heads, S cached tokens, R latent rank, N key width without positions,
P key width with positions, D = N + P, V value width, W = N + V.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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


class Tokens(NamedTuple):
    """The cached tokens of one query.

    Attributes:
        latents: `[S, R]`, S at least 1.
        turned: `[S, P]`: the rotated part of the keys, shared by all heads.
        mask: `[S]` fp32, added to the scores, or None.
    """

    latents: Tensor
    turned: Tensor
    mask: Tensor | None = None


def latent_attention(
    query_BHD: Tensor,
    tokens: Sequence[Tokens],
    weight_HWR: Tensor,
    scale: float,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes `softmax(scale * query . keys + mask) . values`, each query over its own tokens.

    A token's key is `weight[:N] . latent` followed by `turned`; its value is `weight[N:] . latent`.
    The native kernel multiplies the weights by queries and by mixed latents and expands no token
    (DeepSeek-V2, 2024, section 2.1.2).

    Args:
        query_BHD: fp32, bf16 or fp16.
        tokens: Of each query, in its dtype, with unit stride along columns.
        weight_HWR: In that dtype, heads one after another.
        impl: As in `attention_step`.

    Returns:
        `[B, H, V]` in the dtype of the query; sums are in fp32. With the native kernel, a query's
            bits do not depend on other queries or on threads.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    arguments = (query_BHD, tokens, weight_HWR, scale)
    problem = _problem(*arguments[:3])
    if problem:
        raise ValueError(problem)
    library = chosen_library(impl, _native_problem(*arguments[:3]))
    return _run(library, *arguments) if library else latent_attention_reference(*arguments)


def native_latent_attention(
    query_BHD: Tensor, tokens: Sequence[Tokens], weight_HWR: Tensor, scale: float
) -> Tensor | None:
    """`latent_attention` by the C kernel without further checks, or None if it cannot take
    these.
    """
    library = native_library()
    if library is None or _native_problem(query_BHD, tokens, weight_HWR):
        return None
    return _run(library, query_BHD, tokens, weight_HWR, scale)


def _problem(query: Tensor, tokens: Sequence[Tokens], weight: Tensor) -> str | None:
    """What is wrong with the arguments, or None."""
    if query.ndim != 3 or weight.ndim != 3 or not len(query) == len(tokens) > 0:
        return (
            f"expected query [B, H, D], B at least 1, tokens of as many and weight [H, W, R], got "
            f"{list(query.shape)}, {len(tokens)} and {list(weight.shape)}"
        )
    if weight.shape[0] != query.shape[1]:
        return f"weight must be of {query.shape[1]} heads, got {weight.shape[0]}"
    for latents, turned, mask in tokens:
        length, rank = len(latents), weight.shape[2]
        if length == 0 or latents.shape != (length, rank) or turned.shape[:-1] != (length,):
            return (
                f"latents and turned must be [S, {rank}] and [S, P], got {list(latents.shape)} and "
                f"{list(turned.shape)}"
            )
        key_dim = query.shape[2] - turned.shape[1]
        if not 0 <= key_dim <= weight.shape[1]:
            return f"a query of {query.shape[2]} values does not fit {turned.shape[1]} turned ones"
        if mask is not None and mask.shape != (length,):
            return f"mask must be [{length}], got {list(mask.shape)}"
    return None


def _native_problem(query: Tensor, tokens: Sequence[Tokens], weight: Tensor) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    parts = [weight, *(part for latents, turned, _ in tokens for part in (latents, turned))]
    if any(part.dtype is not query.dtype or part.stride(-1) != 1 for part in parts):
        return f"weights, latents and turned parts need unit stride and {query.dtype}"
    if weight.stride(0) != weight.shape[1] * weight.stride(1):
        return f"heads must lie one behind another, got strides {weight.stride()}"
    if len({turned.shape[1] for _, turned, _ in tokens}) != 1:
        return "it needs turned parts of one width"
    return kernel_problem(query, *parts)


def _run(
    library: NativeLibrary, query: Tensor, tokens: Sequence[Tokens], weight: Tensor, scale: float
) -> Tensor:
    query, size = query.contiguous(), query.element_size()
    masks = [None if t.mask is None else t.mask.float().contiguous() for t in tokens]
    places = array("q")
    for (latents, turned, _), mask in zip(tokens, masks, strict=True):
        places += array("q", (latents.data_ptr(), turned.data_ptr()))
        places += array("q", (latents.stride(0) * size, turned.stride(0) * size, len(latents)))
        places.append(0 if mask is None else mask.data_ptr())
    num_heads, width, rank = weight.shape
    turned_dim = tokens[0].turned.shape[1]
    key_dim = query.shape[2] - turned_dim
    out = query.new_empty((len(query), num_heads, width - key_dim))
    numbers = (
        query.data_ptr(), places.buffer_info()[0], weight.data_ptr(), weight.stride(1) * size,
        out.data_ptr(), len(query), num_heads, key_dim, turned_dim, width - key_dim, rank,
        DTYPE_CODES[query.dtype], library.shares_threads(),
    )  # fmt: skip
    if library.latent_attention(pack("13qd", *numbers, scale)) == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for the scores of {num_heads} heads")
    return out


def latent_attention_reference(
    query_BHD: Tensor, tokens: Sequence[Tokens], weight_HWR: Tensor, scale: float
) -> Tensor:
    """The specification in torch: expands keys and values, rounds once."""
    wide = precise_dtype(query_BHD)
    weight = weight_HWR.to(wide)
    mixed = []
    for query_HD, (latents_SR, turned_SP, mask_S) in zip(query_BHD.to(wide), tokens, strict=True):
        key_dim = query_HD.shape[1] - turned_SP.shape[1]
        expanded_HSW = latents_SR.to(wide) @ weight.mT
        keys_HSN, values_HSV = expanded_HSW[..., :key_dim], expanded_HSW[..., key_dim:]
        query_HN, query_HP = query_HD.split((key_dim, turned_SP.shape[1]), dim=-1)
        scores_HS = torch.einsum("hn,hsn->hs", query_HN, keys_HSN) + query_HP @ turned_SP.to(wide).T
        scores_HS = scores_HS * scale
        if mask_S is not None:
            scores_HS = scores_HS + mask_S.to(wide)
        mixed.append(torch.einsum("hs,hsv->hv", torch.softmax(scores_HS, dim=-1), values_HSV))
    return torch.stack(mixed).to(query_BHD.dtype)
