"""The Triton kernel of `rotary_step`: a program a head of queries, keys or values."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.rms_norm.kernel import scaled_row
from moe_runtime.kernels.triton_support import PreparedLaunch, dependent_launch, power_of_2

_MOST_PREPARED = 512
"""Layers of other sizes, times numbers of sequences, times lengths of caches."""
_BLOCK_N = 2048
"""Values at a time of a row that is normalised as a whole."""
_Norm = tuple[Tensor, float, str]
"""The fields of `RowNorm`."""


@triton.jit
def _turned_head(
    row_ptr, weight_ptr, cos_ptr, sin_ptr, head, num_values, dim, num_angles, num_turned, eps,
    FORM: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One head of a row, normalised and turned, each operation rounded to its type."""
    offs = tl.arange(0, BLOCK_D)
    half = num_turned // 2
    other = tl.where(offs < half, offs + half, offs - half)
    mask, is_turned = offs < dim, offs < num_turned
    x = tl.load(row_ptr + head * dim + offs, mask=mask, other=0.0)
    y = tl.load(row_ptr + head * dim + other, mask=is_turned, other=0.0)
    if FORM != "none":
        if IS_WHOLE:
            squares = tl.zeros([BLOCK_N], dtype=tl.float32)
            for first in range(0, num_values, BLOCK_N):
                offs_n = first + tl.arange(0, BLOCK_N)
                part = tl.load(row_ptr + offs_n, mask=offs_n < num_values, other=0.0)
                squares += part.to(tl.float32) * part.to(tl.float32)
            mean = tl.sum(squares, axis=0) / num_values
            weight_ptr += head * dim
        else:
            wide = x.to(tl.float32)
            mean = tl.sum(wide * wide, axis=0) / dim
        scale = 1.0 / tl.sqrt_rn(mean + eps)
        x = scaled_row(x, tl.load(weight_ptr + offs, mask=mask, other=0.0), scale, FORM)
        y = scaled_row(y, tl.load(weight_ptr + other, mask=is_turned, other=0.0), scale, FORM)
    place = offs % num_angles
    cos = tl.load(cos_ptr + place, mask=is_turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place, mask=is_turned, other=0.0).to(tl.float32)
    crossed = tl.where(offs < half, -y.to(tl.float32), y.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    found = straight + (crossed * sin).to(x.dtype).to(tl.float32)
    return tl.where(is_turned, found.to(x.dtype), x)


@triton.jit(do_not_specialize=["num_places"])
def rotary_step_fwd(
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, place_ptr, query_weight_ptr, key_weight_ptr,
    out_ptr, keys_ptr, values_ptr, arrivals_ptr,
    num_heads, num_key_heads, dim, value_dim, num_angles, num_turned, num_places,
    query_eps, key_eps, stride_angles, stride_place,
    QUERY_FORM: tl.constexpr, KEY_FORM: tl.constexpr,
    IS_QUERY_WHOLE: tl.constexpr, IS_KEY_WHOLE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    ADVANCES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Heads of queries go to `out`, those of keys and values to their place in the cache.

    ADVANCES: The program that arrives last, when all have read the place, moves it on.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    place = tl.load(place_ptr + sequence * stride_place)
    is_there = (place >= 0) & (place < num_places)
    cos_ptr += sequence * stride_angles
    sin_ptr += sequence * stride_angles
    offs = tl.arange(0, BLOCK_D)
    if head < num_heads:
        row = num_heads * dim
        turned = _turned_head(
            query_ptr + sequence * row, query_weight_ptr, cos_ptr, sin_ptr,
            head, row, dim, num_angles, num_turned, query_eps,
            QUERY_FORM, IS_QUERY_WHOLE, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        turned = tl.where(is_there, turned.to(tl.float32), float("nan")).to(turned.dtype)
        tl.store(out_ptr + sequence * row + head * dim + offs, turned, mask=offs < dim)
    elif head < num_heads + num_key_heads:
        row, key_head = num_key_heads * dim, head - num_heads
        turned = _turned_head(
            key_ptr + sequence * row, key_weight_ptr, cos_ptr, sin_ptr,
            key_head, row, dim, num_angles, num_turned, key_eps,
            KEY_FORM, IS_KEY_WHOLE, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        into = ((sequence * num_key_heads + key_head) * num_places + place) * dim
        tl.store(keys_ptr + into + offs, turned, mask=offs < tl.where(is_there, dim, 0))
    else:
        value_head = head - num_heads - num_key_heads
        offs_v = tl.arange(0, BLOCK_V)
        mask = offs_v < value_dim
        first = (sequence * num_key_heads + value_head) * value_dim
        value = tl.load(value_ptr + first + offs_v, mask=mask, other=0.0)
        into = ((sequence * num_key_heads + value_head) * num_places + place) * value_dim
        tl.store(values_ptr + into + offs_v, value, mask=offs_v < tl.where(is_there, value_dim, 0))
    if ADVANCES:
        tl.debug_barrier()  # every thread of this program has read the place
        num_before = tl.atomic_add(arrivals_ptr, 1)
        if num_before == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.store(arrivals_ptr, 0)
            tl.store(place_ptr, place + 1)


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare(
    num_heads: int,
    cache_shape: tuple[int, int, int, int],
    value_dim: int,
    num_angles: int,
    num_turned: int,
    stride_angles: int,
    stride_place: int,
    norms: tuple[tuple[str, float, bool], tuple[str, float, bool]],
    advances: bool,
    device: torch.device,
) -> PreparedLaunch:
    num_sequences, num_key_heads, num_places, dim = cache_shape
    (query_form, query_eps, is_query_whole), (key_form, key_eps, is_key_whole) = norms
    return PreparedLaunch(
        rotary_step_fwd, (num_sequences, num_heads + 2 * num_key_heads),
        num_heads=num_heads, num_key_heads=num_key_heads, dim=dim, value_dim=value_dim,
        num_angles=num_angles, num_turned=num_turned, num_places=num_places,
        query_eps=query_eps, key_eps=key_eps, stride_angles=stride_angles,
        stride_place=stride_place,
        QUERY_FORM=query_form, KEY_FORM=key_form,
        IS_QUERY_WHOLE=is_query_whole, IS_KEY_WHOLE=is_key_whole,
        BLOCK_D=power_of_2(dim), BLOCK_V=power_of_2(value_dim), BLOCK_N=_BLOCK_N,
        ADVANCES=advances,
        num_warps=4 if is_query_whole or is_key_whole else 1,
        # each operation is rounded by itself, in fp32 too
        enable_fp_fusion=False, **dependent_launch(device),
    )  # fmt: skip


def launch_rotary_step(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[_Norm | None, _Norm | None],
    num_turned: int,
    arrivals: Tensor | None = None,
) -> Tensor:
    """As `rotary_step`, for what it has checked."""
    query_BN, key_BN, value_BN = (row_BN.contiguous() for row_BN in qkv)
    cos_AR, sin_AR = (part.contiguous() for part in angles)
    keys_BGSD, values_BGSV = cache
    batch, _, _, dim = keys_BGSD.shape
    num_heads, num_angles = query_BN.shape[1] // dim, cos_AR.shape[1]
    out = query_BN.new_empty((batch, num_heads, 1, dim))
    if not out.numel():
        if arrivals is not None:
            place.add_(1)
        return out
    query_norm, key_norm = norms
    prepared = _prepare(
        num_heads, (*keys_BGSD.shape,), values_BGSV.shape[-1], max(num_angles, 1), num_turned,
        num_angles if len(cos_AR) > 1 else 0, place.ndim,
        (_numbers(query_norm, dim), _numbers(key_norm, dim)), arrivals is not None,
        query_BN.device,
    )  # fmt: skip
    prepared(
        query_ptr=query_BN, key_ptr=key_BN, value_ptr=value_BN, cos_ptr=cos_AR, sin_ptr=sin_AR,
        place_ptr=place if place.ndim == 0 else place.contiguous(),
        query_weight_ptr=query_BN if query_norm is None else query_norm[0].contiguous(),
        key_weight_ptr=key_BN if key_norm is None else key_norm[0].contiguous(),
        out_ptr=out, keys_ptr=keys_BGSD, values_ptr=values_BGSV,
        arrivals_ptr=place if arrivals is None else arrivals,
    )  # fmt: skip
    return out


def _numbers(norm: _Norm | None, dim: int) -> tuple[str, float, bool]:
    if norm is None:
        return "none", 0.0, False
    weight, eps, form = norm
    return form, float(eps), len(weight) != dim
