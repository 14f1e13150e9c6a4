"""The Triton kernel of `split_attention`: one program per key head and part of the cached tokens.

Every program rotates the queries of its head. The program whose part has the new token also rotates
its key and writes key and value to the cache. The last program of a head to finish combines the
parts, in their order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.tile import describe_device
from moe_runtime.kernels.rms_norm.kernel import scaled_row
from moe_runtime.kernels.triton_support import PreparedLaunch, cdiv, dependent_launch, power_of_2

_MOST_PREPARED = 512  # layer sizes times numbers of sequences times cache lengths
_BLOCK_N = 2048  # values at a time of a row that is normalised as a whole
_LEAST_ROWS = 16  # of a matrix instruction: query heads of a key head, values of a head
_BLOCK_BYTES = 16384  # of a step's keys, at most
_MOST_PARTS = 64
_PROGRAMS_EACH = 2  # per multiprocessor, for one sequence
# pyright: reportArgumentType=false
# Triton makes a constexpr of a number, which the type checker does not know of.
_Norm = tuple[Tensor, float, str]  # the fields of `RowNorm`


@triton.jit
def _turned_heads(
    row_ptr, weight_ptr, cos_ptr, sin_ptr, first_head, num_rows, num_values, dim, num_angles,
    num_turned, eps, FORM: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Heads `[ROWS, BLOCK_D]` of a row, normalised and rotated; zero beyond `num_rows`.

    Each operation is rounded to the row's dtype.
    """
    rows, offs = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    half = num_turned // 2
    other = tl.where(offs < half, offs + half, offs - half)
    mask = (rows < num_rows) & (offs < dim)
    is_turned = (rows < num_rows) & (offs < num_turned)
    begin = (first_head + rows) * dim
    x = tl.load(row_ptr + begin + offs, mask=mask, other=0.0)
    y = tl.load(row_ptr + begin + other, mask=is_turned, other=0.0)
    if FORM != "none":
        if IS_WHOLE:
            squares = tl.zeros([BLOCK_N], dtype=tl.float32)
            for first in range(0, num_values, BLOCK_N):
                offs_n = first + tl.arange(0, BLOCK_N)
                part = tl.load(row_ptr + offs_n, mask=offs_n < num_values, other=0.0)
                squares += part.to(tl.float32) * part.to(tl.float32)
            mean = tl.sum(squares, axis=0) / num_values
        else:
            wide = x.to(tl.float32)
            mean = (tl.sum(wide * wide, axis=1) / dim)[:, None]
            begin = begin * 0
        scale = 1.0 / tl.sqrt_rn(mean + eps)
        weight = tl.load(weight_ptr + begin + offs, mask=mask, other=0.0)
        x = scaled_row(x, weight, scale, FORM)
        weight = tl.load(weight_ptr + begin + other, mask=is_turned, other=0.0)
        y = scaled_row(y, weight, scale, FORM)
    place = offs % num_angles
    cos = tl.load(cos_ptr + place, mask=offs < num_turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place, mask=offs < num_turned, other=0.0).to(tl.float32)
    crossed = tl.where(offs < half, -y.to(tl.float32), y.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    found = straight + (crossed * sin).to(x.dtype).to(tl.float32)
    return tl.where(is_turned, found.to(x.dtype), x)


@triton.jit
def _seen(scores, mask_ptr, places, is_there, MASK: tl.constexpr):
    """Scores with the mask of some places, `-inf` where hidden; and which places are visible."""
    if MASK == "bool":
        is_there = is_there & (tl.load(mask_ptr + places, mask=is_there, other=0) != 0)
    elif MASK == "added":
        added = tl.load(mask_ptr + places, mask=is_there, other=0.0).to(tl.float32)
        is_there = is_there & (added > float("-inf"))
        scores += added[None, :]
    return tl.where(is_there[None, :], scores, float("-inf")), is_there


@triton.jit
def _finite(largest):
    """The number subtracted from scores: 0 where no score is visible."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _with_sinks(
    largest, total, mixed, sinks_ptr, first_head, is_row, HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The weighted mean; zeros where nothing is visible."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + first_head + tl.arange(0, ROWS), mask=is_row, other=0.0)
        sinks = sinks.to(tl.float32)
        above = tl.maximum(largest, sinks)
        factor = tl.exp(largest - above)
        total, mixed = total * factor + tl.exp(sinks - above), mixed * factor[:, None]
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["num_places"])
def split_attention_fwd(
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, place_ptr, query_weight_ptr, key_weight_ptr,
    keys_ptr, values_ptr, mask_ptr, sinks_ptr, parts_ptr, sums_ptr, out_ptr, counters_ptr,
    num_shared, dim, value_dim, num_angles, num_turned, num_places, window,
    scale, query_eps, key_eps, stride_angles, stride_place, stride_mask,
    QUERY_FORM: tl.constexpr, KEY_FORM: tl.constexpr,
    IS_QUERY_WHOLE: tl.constexpr, IS_KEY_WHOLE: tl.constexpr, MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, PART: tl.constexpr, BLOCK_P: tl.constexpr,
    ADVANCES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Each part of PART places stores its largest score, sum of weights and weighted sum of values.

    MASK: `none`, `bool` or `added`. BLOCK_P: most parts, a power of two. ADVANCES: the program that
    finishes last increments the place, which all have read by then.
    """
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_key_heads = tl.num_programs(1)
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    given = tl.load(place_ptr + sequence * stride_place)
    is_there = (given >= 0) & (given < num_places)
    place = tl.where(is_there, given, 0).to(tl.int32)
    begin = tl.maximum(place + 1 - window, 0)
    first_part, last_part = begin // PART, place // PART
    rows, offs, offs_v = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    is_row, mask_v = rows < num_shared, offs_v < value_dim
    first_head = head * num_shared
    cache_head = sequence * num_key_heads + head
    heads = num_key_heads * num_shared
    out_ptrs = out_ptr + (sequence * heads + first_head + rows)[:, None] * value_dim
    out_ptrs += offs_v[None, :]
    mask_out = is_row[:, None] & mask_v[None, :]
    if (is_there == 0) & (part == 0):
        nothing = tl.full([ROWS, BLOCK_V], float("nan"), dtype=tl.float32)
        tl.store(out_ptrs, nothing, mask=mask_out)
    if is_there & (part >= first_part) & (part <= last_part):
        cos_ptr += sequence * stride_angles
        sin_ptr += sequence * stride_angles
        mask_ptr += sequence * stride_mask
        keys_ptr += cache_head * num_places * dim
        values_ptr += cache_head * num_places * value_dim
        query = _turned_heads(
            query_ptr + sequence * heads * dim, query_weight_ptr, cos_ptr, sin_ptr,
            first_head, num_shared, heads * dim, dim, num_angles, num_turned, query_eps,
            QUERY_FORM, IS_QUERY_WHOLE, ROWS, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
        if part == last_part:
            width = num_key_heads * dim
            key = _turned_heads(
                key_ptr + sequence * width, key_weight_ptr, cos_ptr, sin_ptr,
                head, 1, width, dim, num_angles, num_turned, key_eps,
                KEY_FORM, IS_KEY_WHOLE, 1, BLOCK_D, BLOCK_N,
            )  # fmt: skip
            into = tl.cast(place, tl.int64)
            tl.store(keys_ptr + into * dim + offs[None, :], key, mask=(offs < dim)[None, :])
            value = tl.load(value_ptr + cache_head * value_dim + offs_v, mask=mask_v, other=0.0)
            tl.store(values_ptr + into * value_dim + offs_v, value, mask=mask_v)
            own = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[:, None] * scale
            own, _ = _seen(own, mask_ptr, place + tl.arange(0, 1), tl.arange(0, 1) == 0, MASK)
            largest = tl.max(own, axis=1)
            total = tl.where(largest == float("-inf"), 0.0, 1.0)
            mixed = tl.where(total[:, None] > 0.0, value.to(tl.float32)[None, :], 0.0)
        start = tl.maximum(begin // BLOCK_S * BLOCK_S, part * PART)
        for first in range(start, tl.minimum((part + 1) * PART, place), BLOCK_S):
            places = first + tl.arange(0, BLOCK_S)
            is_old = (places >= begin) & (places < place)
            at = places.to(tl.int64)[:, None]
            mask_k = is_old[:, None] & (offs < dim)[None, :]
            keys = tl.load(keys_ptr + at * dim + offs[None, :], mask=mask_k, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            scores, is_seen = _seen(scores, mask_ptr, places, is_old, MASK)
            above = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp(scores - _finite(above)[:, None])
            factor = tl.exp(largest - _finite(above))
            largest, total = above, total * factor + tl.sum(weights, axis=1)
            ptrs_v = values_ptr + at * value_dim + offs_v[None, :]
            # what is hidden may be NaN, whose product with a weight of 0 is none
            values = tl.load(ptrs_v, mask=is_seen[:, None] & mask_v[None, :], other=0.0)
            mixed *= factor[:, None]
            mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
        if BLOCK_P == 1:
            mixed = _with_sinks(
                largest, total, mixed, sinks_ptr, first_head, is_row, HAS_SINKS, ROWS
            )
            tl.store(out_ptrs, mixed, mask=mask_out)
        else:
            sums_ptr += cache_head * BLOCK_P * 2 * num_shared
            parts_ptr += cache_head * BLOCK_P * num_shared * value_dim
            sums_ptrs = sums_ptr + part * 2 * num_shared + rows
            tl.store(sums_ptrs, largest, mask=is_row)
            tl.store(sums_ptrs + num_shared, total, mask=is_row)
            parts_ptrs = parts_ptr + rows[:, None] * value_dim + offs_v[None, :]
            step = num_shared * value_dim
            tl.store(parts_ptrs + part * step, mixed, mask=mask_out)
            tl.debug_barrier()  # every thread of this program has written
            num_before = tl.atomic_add(counters_ptr + 1 + cache_head, 1)
            if num_before == last_part - first_part:
                tl.store(counters_ptr + 1 + cache_head, 0)
                offs_p = tl.arange(0, BLOCK_P)[:, None]
                mask = (offs_p >= first_part) & (offs_p <= last_part) & is_row[None, :]
                ptrs = sums_ptr + offs_p * 2 * num_shared + rows[None, :]
                each = tl.load(ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(ptrs + num_shared, mask=mask, other=0.0, cache_modifier=".cg")
                largest = tl.max(each, axis=0)
                total = tl.sum(totals * tl.exp(each - _finite(largest)[None, :]), axis=0)
                mixed = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
                for one in tl.range(first_part, last_part + 1, loop_unroll_factor=4):  # type: ignore[attr-defined]
                    own_ptr = sums_ptr + one * 2 * num_shared
                    own = tl.load(own_ptr + rows, mask=is_row, other=0.0, cache_modifier=".cg")
                    factor = tl.exp(own - _finite(largest))
                    row_ptrs = parts_ptrs + one * step
                    row = tl.load(row_ptrs, mask=mask_out, other=0.0, cache_modifier=".cg")
                    mixed += factor[:, None] * row
                mixed = _with_sinks(
                    largest, total, mixed, sinks_ptr, first_head, is_row, HAS_SINKS, ROWS
                )
                tl.store(out_ptrs, mixed, mask=mask_out)
    if ADVANCES:
        tl.debug_barrier()  # every thread of this program has read the place
        num_before = tl.atomic_add(counters_ptr, 1)
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        if num_before == programs - 1:
            tl.store(counters_ptr, 0)
            tl.store(place_ptr, given + 1)


class _Sizes(NamedTuple):
    """A launch's parameters except its tensors."""

    num_heads: int
    cache_shape: tuple[int, ...]
    value_dim: int
    itemsize: int
    num_angles: int
    num_turned: int
    stride_angles: int
    stride_place: int
    stride_mask: int
    norms: tuple[tuple[str, float, bool], tuple[str, float, bool]]
    mask: str
    has_sinks: bool
    scale: float
    window: int
    advances: bool
    device: torch.device


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare(sizes: _Sizes) -> tuple[PreparedLaunch, int]:
    """The launch, and the number of parts per head."""
    num_sequences, num_key_heads, num_places, dim = sizes.cache_shape
    (query_form, query_eps, is_query_whole), (key_form, key_eps, is_key_whole) = sizes.norms
    block_d, block_v = (max(_LEAST_ROWS, power_of_2(n)) for n in (dim, sizes.value_dim))
    block_s = max(16, min(64, _BLOCK_BYTES // (max(block_d, block_v) * sizes.itemsize)))
    # the parts of a sequence do not depend on others
    programs = describe_device(sizes.device).num_multiprocessors * _PROGRAMS_EACH
    most = min(_MOST_PARTS, power_of_2(cdiv(programs, num_key_heads)))
    # few lengths, each of which is compiled
    part = power_of_2(cdiv(cdiv(num_places, most), block_s)) * block_s
    num_parts = cdiv(num_places, part)
    prepared = PreparedLaunch(
        split_attention_fwd, (num_sequences, num_key_heads, num_parts),
        num_shared=sizes.num_heads // num_key_heads, dim=dim, value_dim=sizes.value_dim,
        num_angles=sizes.num_angles, num_turned=sizes.num_turned, num_places=num_places,
        window=sizes.window or num_places, scale=sizes.scale, query_eps=query_eps, key_eps=key_eps,
        stride_angles=sizes.stride_angles, stride_place=sizes.stride_place,
        stride_mask=sizes.stride_mask,
        QUERY_FORM=query_form, KEY_FORM=key_form, IS_QUERY_WHOLE=is_query_whole,
        IS_KEY_WHOLE=is_key_whole, MASK=sizes.mask, HAS_SINKS=sizes.has_sinks,
        ROWS=max(_LEAST_ROWS, power_of_2(sizes.num_heads // num_key_heads)),
        BLOCK_D=block_d, BLOCK_V=block_v, BLOCK_N=_BLOCK_N, BLOCK_S=block_s, PART=part,
        BLOCK_P=power_of_2(num_parts), ADVANCES=sizes.advances,
        # sums in fp32 take registers
        num_warps=8 if sizes.itemsize == 4 else 4, num_stages=2,
        # each operation is rounded by itself, in fp32 too
        enable_fp_fusion=False, **dependent_launch(sizes.device),
    )  # fmt: skip
    return prepared, num_parts


def launch_split_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[_Norm | None, _Norm | None],
    num_turned: int,
    scale: float,
    mask_BS: Tensor | None,
    sinks_H: Tensor | None,
    window: int,
    counters: Tensor | None,
) -> Tensor:
    """`split_attention` for checked arguments."""
    query_BN, key_BN, value_BN = (row_BN.contiguous() for row_BN in qkv)
    cos_AR, sin_AR = (part.contiguous() for part in angles)
    keys_BGSD, values_BGSV = cache
    batch, num_key_heads, _, dim = keys_BGSD.shape
    num_heads, value_dim = query_BN.shape[1] // dim, values_BGSV.shape[-1]
    out = query_BN.new_empty((batch, num_heads, value_dim))
    advances = counters is not None and not place.ndim
    if not out.numel():
        if advances:
            place.add_(1)
        return out
    kind, stride_mask = "none", 0
    if mask_BS is not None:
        mask_BS = mask_BS if mask_BS.stride(1) == 1 else mask_BS.contiguous()
        kind, stride_mask = "added", mask_BS.stride(0)
        if mask_BS.dtype == torch.bool:
            kind, mask_BS = "bool", mask_BS.view(torch.uint8)
    query_norm, key_norm = norms
    sizes = _Sizes(
        num_heads, (*keys_BGSD.shape,), value_dim, query_BN.element_size(),
        max(cos_AR.shape[1], 1), num_turned, cos_AR.shape[1] if len(cos_AR) > 1 else 0,
        place.ndim, stride_mask, (_numbers(query_norm, dim), _numbers(key_norm, dim)),
        kind, sinks_H is not None, scale, window, advances, query_BN.device,
    )  # fmt: skip
    prepared, num_parts = _prepare(sizes)
    parts = sums = query_BN
    if num_parts > 1:
        room = batch * num_key_heads, power_of_2(num_parts), num_heads // num_key_heads
        parts = query_BN.new_empty((*room, value_dim), dtype=torch.float32)
        sums = query_BN.new_empty((*room, 2), dtype=torch.float32)
        if counters is None:
            shape = 1 + batch * num_key_heads
            counters = torch.zeros(shape, dtype=torch.int32, device=query_BN.device)
    prepared(
        query_ptr=query_BN, key_ptr=key_BN, value_ptr=value_BN, cos_ptr=cos_AR, sin_ptr=sin_AR,
        place_ptr=place if place.ndim == 0 else place.contiguous(),
        query_weight_ptr=query_BN if query_norm is None else query_norm[0].contiguous(),
        key_weight_ptr=key_BN if key_norm is None else key_norm[0].contiguous(),
        keys_ptr=keys_BGSD, values_ptr=values_BGSV,
        mask_ptr=query_BN if mask_BS is None else mask_BS,
        sinks_ptr=query_BN if sinks_H is None else sinks_H.contiguous(),
        parts_ptr=parts, sums_ptr=sums, out_ptr=out,
        counters_ptr=place if counters is None else counters,
    )  # fmt: skip
    return out


def _numbers(norm: _Norm | None, dim: int) -> tuple[str, float, bool]:
    if norm is None:
        return "none", 0.0, False
    weight, eps, form = norm
    return form, float(eps), len(weight) != dim
