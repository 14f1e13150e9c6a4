"""`rotary_step`: what lies between the products of an attention layer and its attention.

Shape suffixes: B sequences, N values of all heads of a token, R turned values of a head, A rows of
angles, H query heads, G key heads, S places, D values of a query or key head, V of a value head.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.attention_step import RowNorm, normed, rotated
from moe_runtime.kernels.operands import check_like, check_shape
from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl

RotaryImpl = Literal["auto", "triton", "reference"]


def rotary_step(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[RowNorm | None, RowNorm | None] = (None, None),
    *,
    pairs_share: bool = False,
    arrivals: Tensor | None = None,
    impl: RotaryImpl = "auto",
) -> Tensor:
    """Normalises and turns one token's queries and keys, and puts keys and values into a cache.

    The rotary embedding (Su et al., 2021) is that of Llama: the first R values of a head are turned
    in halves, the others stay. Every operation is rounded to the dtype.

    Args:
        qkv: Queries `[B, H * D]`, keys `[B, G * D]` and values `[B, G * V]` of one token a
            sequence, all of one dtype.
        angles: Cosines and sines, `[A, R]` each, in that dtype; A is B, or 1 for all sequences.
        cache: Keys `[B, G, S, D]` and values `[B, G, S, V]`, contiguous, in that dtype.
        place: int64: where in S the token goes, without dimensions for all sequences, or `[B]` for
            each. It is read on the device.
        norms: Of queries and of keys, before they are turned.
        pairs_share: Whether angles come once for the two values of a pair, so that 2 R values are
            turned.
        arrivals: int32 `[1]`, zero before and after, of this place alone, which has no dimensions:
            with it the place is one more afterwards.
        impl: `triton` is one kernel, for inference only; `auto` takes it on a GPU. A named
            implementation never falls back.

    Returns:
        Queries `[B, H, 1, D]`. A place past the end is an error of the reference; the kernel,
        which nobody waits for, leaves the cache alone then and gives NaN.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the kernel cannot take the input.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
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
    if arrivals is not None and (
        place.ndim or arrivals.dtype != torch.int32 or arrivals.shape != (1,)
        or arrivals.device != query_BN.device
    ):  # fmt: skip
        raise ValueError(
            f"arrivals must be int32 [1] on {query_BN.device}, for a place without dimensions, got "
            f"{arrivals.dtype} {list(arrivals.shape)} on {arrivals.device}"
        )
    if resolve_impl(impl, query_BN.device, ("auto", "triton", "reference")) != "triton":
        out = rotary_step_reference(qkv, angles, cache, place, norms, pairs_share=pairs_share)
        if arrivals is not None:
            place.add_(1)
        return out
    check_triton_dtype(query_BN)
    if not all(part.is_contiguous() for part in cache) or torch.is_grad_enabled():
        raise ValueError(
            "impl='triton' takes a contiguous cache, without gradients: call it within "
            "torch.no_grad()"
        )
    from moe_runtime.kernels.decode_step.rotary_step_kernel import launch_rotary_step

    return launch_rotary_step(qkv, angles, cache, place, norms, num_turned, arrivals)


def rotary_step_reference(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[RowNorm | None, RowNorm | None] = (None, None),
    *,
    pairs_share: bool = False,
) -> Tensor:
    """The specification in plain torch; every operation rounds to the dtype of the queries."""
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
