"""`split_attention`: attention of one new token per sequence on a GPU, between the linear layers.

Shape suffixes: B sequences, N values of all heads of a token, R rotated values of a head, A rows of
angles, H query heads, G key heads, S places, D width of queries and keys, V width of values.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.attention_step import RowNorm, normed, rotated
from moe_runtime.kernels.decode_step.single_query_attention import (
    single_query_attention_reference,
)
from moe_runtime.kernels.operands import check_like, check_shape
from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl

SplitImpl = Literal["auto", "triton", "reference"]


def split_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[RowNorm | None, RowNorm | None] = (None, None),
    *,
    scale: float,
    mask_BS: Tensor | None = None,
    sinks_H: Tensor | None = None,
    window: int = 0,
    pairs_share: bool = False,
    counters: Tensor | None = None,
    impl: SplitImpl = "auto",
) -> Tensor:
    """Attention of one token per sequence; its key and value are written to the cache.

    Queries and keys are normalised and rotated first (RoPE in halves, as in Llama); every such
    operation is rounded to the dtype. A token sees its own place and those before it. The kernel
    splits the cached tokens into parts whose length depends on S, G and the GPU (Flash-Decoding,
    Dao et al., 2023).

    Args:
        qkv: Queries `[B, H * D]`, keys `[B, G * D]` and values `[B, G * V]`, of one dtype.
        angles: Cosines and sines `[A, R]` in that dtype; A is B, or 1 for all sequences.
        cache: Keys `[B, G, S, D]` and values `[B, G, S, V]`, contiguous, in that dtype.
        place: int64, read on the device: index of the new token, one number or `[B]`.
        norms: Of queries and of keys.
        mask_BS: Visible places as bool, or numbers added to the scores. A token that sees nothing
            and has no sink gives zeros.
        sinks_H: Extra score per head, which only adds to the softmax's sum.
        window: Visible tokens, the new one included; 0: all.
        pairs_share: Angles are given once for both values of a pair, so 2 R values are rotated.
        counters: int32 `[1 + B * G]`, zeros before and after, used by this call alone. If given, a
            `place` without dimensions is advanced by one.
        impl: `triton` (inference only), `reference`, or `auto`: triton on a GPU.

    Returns:
        `[B, H, V]`. For a place past the end the reference raises; the kernel leaves the cache
            alone and gives NaN.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the kernel cannot take the input.
        TritonUnavailableError: Triton is needed and not installed.
    """
    query_BN, key_BN, value_BN = qkv
    keys_BGSD, values_BGSV = cache
    batch, num_key_heads, _, dim = keys_BGSD.shape
    if query_BN.ndim != 2 or query_BN.shape[1] % (num_key_heads * dim):
        raise ValueError(
            f"queries must be [{batch}, H * {dim}], H a multiple of {num_key_heads}, got "
            f"{list(query_BN.shape)}"
        )
    check_shape("queries", query_BN, (batch, query_BN.shape[1]))
    check_shape("keys", key_BN, (batch, num_key_heads * dim))
    check_shape("values", value_BN, (batch, num_key_heads * values_BGSV.shape[-1]))
    check_shape("the cache of values", values_BGSV[..., 0], keys_BGSD.shape[:3])
    cos_AR, sin_AR = angles
    num_turned = cos_AR.shape[-1] * (2 if pairs_share else 1)
    if cos_AR.shape != sin_AR.shape or cos_AR.shape[:-1] not in ((1,), (batch,)):
        raise ValueError(
            f"cosines and sines must be [1, R] or [{batch}, R], got {list(cos_AR.shape)} and "
            f"{list(sin_AR.shape)}"
        )
    if num_turned > dim or num_turned % 2:
        raise ValueError(f"an even number of up to {dim} values can be turned, got {num_turned}")
    for name, norm, row_BN in zip(("queries", "keys"), norms, (query_BN, key_BN), strict=True):
        if norm is not None and norm.weight.shape not in ((dim,), (row_BN.shape[1],)):
            raise ValueError(
                f"the weight of the norm of {name} must be [{dim}] or [{row_BN.shape[1]}], got "
                f"{list(norm.weight.shape)}"
            )
    weights = [norm.weight for norm in norms if norm is not None]
    for tensor in (key_BN, value_BN, *angles, *cache, *weights):
        check_like("every tensor", tensor, query_BN, "the queries")
    is_known = place.dtype == torch.int64 and place.device == query_BN.device
    if place.shape not in ((), (batch,)) or not is_known:
        raise ValueError(
            f"place must be one int64 on {query_BN.device} or [{batch}], got {place.dtype} "
            f"{list(place.shape)} on {place.device}"
        )
    num_heads, num_places = query_BN.shape[1] // dim, keys_BGSD.shape[2]
    if mask_BS is not None:
        check_shape("the mask", mask_BS, (batch, num_places))
        if mask_BS.dtype != torch.bool and not mask_BS.is_floating_point():
            raise ValueError(f"the mask must be bool or floating-point, got {mask_BS.dtype}")
    if sinks_H is not None:
        check_shape("sinks", sinks_H, (num_heads,))
    if window < 0:
        raise ValueError(f"a window has at least one token, or is 0 for all, got {window}")
    shape = (1 + batch * num_key_heads,)
    if counters is not None and (
        counters.dtype != torch.int32 or counters.shape != shape
        or counters.device != query_BN.device
    ):  # fmt: skip
        raise ValueError(
            f"counters must be int32 {list(shape)} on {query_BN.device}, got {counters.dtype} "
            f"{list(counters.shape)} on {counters.device}"
        )
    if resolve_impl(impl, query_BN.device, ("auto", "triton", "reference")) != "triton":
        query_BH1D = turned_step(qkv, angles, cache, place, norms, pairs_share=pairs_share)
        out = _attend(query_BH1D[:, :, 0], cache, place, scale, mask_BS, sinks_H, window)
        if counters is not None and not place.ndim:
            place.add_(1)
        return out
    check_triton_dtype(query_BN)
    if not all(part.is_contiguous() for part in cache) or torch.is_grad_enabled():
        raise ValueError(
            "impl='triton' takes a contiguous cache, without gradients: call it within "
            "torch.no_grad()"
        )
    from moe_runtime.kernels.decode_step.split_attention_kernel import launch_split_attention

    return launch_split_attention(
        qkv, angles, cache, place, norms, num_turned, scale, mask_BS, sinks_H, window, counters
    )


def _attend(
    query_BHD: Tensor, cache: tuple[Tensor, Tensor], place: Tensor, scale: float,
    mask_BS: Tensor | None, sinks_H: Tensor | None, window: int,
) -> Tensor:  # fmt: skip
    """The specification in torch, over the visible places only."""
    keys_BGSD, values_BGSV = cache
    places_S = torch.arange(keys_BGSD.shape[2], device=place.device)
    last_B1 = place.reshape(-1, 1)
    seen_BS = (places_S <= last_B1) & (places_S > last_B1 - (window or len(places_S)))
    seen_BS = seen_BS.expand(len(query_BHD), -1)
    added_BS = torch.zeros(seen_BS.shape, dtype=torch.float32, device=place.device)
    if mask_BS is not None and mask_BS.dtype == torch.bool:
        seen_BS = seen_BS & mask_BS
    elif mask_BS is not None:
        added_BS = mask_BS.float()
        seen_BS = seen_BS & (added_BS > -torch.inf)
    # nothing that is not seen is read: it may be NaN
    hidden_BGS1 = ~seen_BS[:, None, :, None]
    out_BHV = single_query_attention_reference(
        query_BHD, keys_BGSD.masked_fill(hidden_BGS1, 0), values_BGSV.masked_fill(hidden_BGS1, 0),
        added_BS.masked_fill(~seen_BS, -torch.inf), scale, sinks_H,
    )  # fmt: skip
    if sinks_H is None:
        out_BHV = out_BHV.masked_fill(~seen_BS.any(1)[:, None, None], 0)
    return out_BHV


def turned_step(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[RowNorm | None, RowNorm | None] = (None, None),
    *,
    pairs_share: bool = False,
) -> Tensor:
    """Rotates queries to `[B, H, 1, D]` and writes keys and values to the cache, in torch.

    Every operation is rounded to the dtype of the queries.
    """
    query_BN, key_BN, value_BN = qkv
    keys_BGSD, values_BGSV = cache
    cos_AR, sin_AR = (torch.cat((a, a), dim=-1) if pairs_share else a for a in angles)
    query_BHD, key_BGD = (
        rotated(normed(row_BN, norm).unflatten(1, (-1, keys_BGSD.shape[-1])), cos_AR, sin_AR)
        for row_BN, norm in zip((query_BN, key_BN), norms, strict=True)
    )
    value_BGV = value_BN.unflatten(1, (-1, values_BGSV.shape[-1]))
    for cached, new in ((keys_BGSD, key_BGD), (values_BGSV, value_BGV)):
        if place.ndim:
            cached[torch.arange(len(cached), device=place.device), :, place] = new
        else:
            cached.index_copy_(2, place.view(1), new.unsqueeze(2))
    return query_BHD.unsqueeze(2)
