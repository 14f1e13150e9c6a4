"""Triton kernels of `token_sort`: a counting sort by comparison, without atomics.

One program sorts a few slots in one launch. For more: every block of slots counts its keys
(`histogram_BE`, one row per bin), a scan along each bin gives every block its place in the bin, and
each block adds the first row of the bin and the slot's rank in the block.

Keys are expert ids, `num_experts` for slots without an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.triton_support import cdiv, launch, power_of_2

_SMALL_SLOTS = 512  # one program compares all pairs faster than three launches start
_BLOCK = 256
_CHUNK = 32


@triton.jit
def _load_keys(ids_ptr, offs_r, num_slots, num_experts):
    """Keys of the given slots; past the end a key that sorts after all others."""
    mask = offs_r < num_slots
    ids = tl.load(ids_ptr + offs_r, mask=mask, other=0).to(tl.int64)
    keys = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return tl.where(mask, keys, num_experts + 1).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots"])
def _token_sort_small(
    ids_ptr, counts_ptr, offsets_ptr, order_ptr, inverse_ptr,
    num_slots, num_experts,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    offs_r = tl.arange(0, BLOCK)
    keys = _load_keys(ids_ptr, offs_r, num_slots, num_experts)
    row = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_slots, CHUNK):
        offs_c = first + tl.arange(0, CHUNK)
        others = _load_keys(ids_ptr, offs_c, num_slots, num_experts)
        is_earlier = (others[None, :] == keys[:, None]) & (offs_c[None, :] < offs_r[:, None])
        is_before = (others[None, :] < keys[:, None]) | is_earlier
        row += tl.sum(is_before.to(tl.int32), axis=1)
    mask = offs_r < num_slots
    tl.store(inverse_ptr + offs_r, row.to(tl.int64), mask=mask)
    tl.store(order_ptr + row, offs_r.to(tl.int64), mask=mask)
    for first in range(0, num_experts + 1, CHUNK):
        offs_e = first + tl.arange(0, CHUNK)
        below = tl.sum((keys[:, None] < offs_e[None, :]).to(tl.int64), axis=0)
        equal = tl.sum((keys[:, None] == offs_e[None, :]).to(tl.int64), axis=0)
        tl.store(offsets_ptr + offs_e, below, mask=offs_e <= num_experts)
        tl.store(counts_ptr + offs_e, equal, mask=offs_e < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _token_sort_histogram(
    ids_ptr, histogram_ptr,
    num_slots, num_experts, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    keys = _load_keys(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, num_experts)
    for first in range(0, num_experts + 1, CHUNK):
        offs_e = first + tl.arange(0, CHUNK)
        count = tl.sum((keys[:, None] == offs_e[None, :]).to(tl.int32), axis=0)
        place = offs_e.to(tl.int64) * num_blocks + block
        tl.store(histogram_ptr + place, count, mask=offs_e <= num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _token_sort_scan(histogram_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    """Replaces each count by the sum of the counts of earlier blocks in the same bin."""
    key = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK):
        offs_b = first + tl.arange(0, BLOCK)
        mask = offs_b < num_blocks
        count = tl.load(histogram_ptr + key * num_blocks + offs_b, mask=mask, other=0)
        before = total + tl.cumsum(count, axis=0) - count
        tl.store(histogram_ptr + key * num_blocks + offs_b, before, mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(totals_ptr + key, total)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _token_sort_place(
    ids_ptr, histogram_ptr, totals_ptr, counts_ptr, offsets_ptr, order_ptr, inverse_ptr,
    num_slots, num_experts, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs_r = block * BLOCK + tl.arange(0, BLOCK)
    keys = _load_keys(ids_ptr, offs_r, num_slots, num_experts)
    mask = offs_r < num_slots
    place = keys.to(tl.int64) * num_blocks + block
    row = tl.load(histogram_ptr + place, mask=mask, other=0)
    before = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_experts + 1, CHUNK):
        offs_e = first + tl.arange(0, CHUNK)
        total = tl.load(totals_ptr + offs_e, mask=offs_e <= num_experts, other=0)
        row += tl.sum(tl.where(offs_e[None, :] < keys[:, None], total[None, :], 0), axis=1)
        if block == 0:
            offset = before + tl.cumsum(total, axis=0) - total
            tl.store(offsets_ptr + offs_e, offset.to(tl.int64), mask=offs_e <= num_experts)
            tl.store(counts_ptr + offs_e, total.to(tl.int64), mask=offs_e < num_experts)
            before += tl.sum(total, axis=0)
    for first in range(0, BLOCK, CHUNK):
        offs_c = block * BLOCK + first + tl.arange(0, CHUNK)
        others = _load_keys(ids_ptr, offs_c, num_slots, num_experts)
        is_earlier = (others[None, :] == keys[:, None]) & (offs_c[None, :] < offs_r[:, None])
        row += tl.sum(is_earlier.to(tl.int32), axis=1)
    tl.store(inverse_ptr + offs_r, row.to(tl.int64), mask=mask)
    tl.store(order_ptr + row, offs_r.to(tl.int64), mask=mask)


def token_sort_triton(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One program for few slots, three kernels otherwise; see `token_sort`."""
    ids_R = ids_TK.reshape(-1).contiguous()
    num_slots = len(ids_R)
    like = {"dtype": torch.int64, "device": ids_R.device}
    if not num_slots:
        offsets = torch.zeros(num_experts + 1, **like)
        return offsets[1:].clone(), offsets, torch.empty(0, **like), torch.empty(0, **like)
    counts_E = torch.empty(num_experts, **like)
    offsets_E1 = torch.empty(num_experts + 1, **like)
    order_R, inverse_R = torch.empty(num_slots, **like), torch.empty(num_slots, **like)
    results = {
        "counts_ptr": counts_E,
        "offsets_ptr": offsets_E1,
        "order_ptr": order_R,
        "inverse_ptr": inverse_R,
        "num_slots": num_slots,
        "num_experts": num_experts,
        "CHUNK": _CHUNK,
    }
    if num_slots <= _SMALL_SLOTS:
        block = max(16, power_of_2(num_slots))
        launch(_token_sort_small, (1,), ids_ptr=ids_R, BLOCK=block, num_warps=8, **results)
        return counts_E, offsets_E1, order_R, inverse_R
    num_blocks = cdiv(num_slots, _BLOCK)
    histogram = torch.empty((num_experts + 1, num_blocks), dtype=torch.int32, device=ids_R.device)
    totals = torch.empty(num_experts + 1, dtype=torch.int32, device=ids_R.device)
    launch(
        _token_sort_histogram, (num_blocks,),
        ids_ptr=ids_R, histogram_ptr=histogram,
        num_slots=num_slots, num_experts=num_experts, num_blocks=num_blocks,
        BLOCK=_BLOCK, CHUNK=_CHUNK,
    )  # fmt: skip
    launch(
        _token_sort_scan,
        (num_experts + 1,),
        histogram_ptr=histogram,
        totals_ptr=totals,
        num_blocks=num_blocks,
        BLOCK=1024,
    )
    launch(
        _token_sort_place, (num_blocks,),
        ids_ptr=ids_R, histogram_ptr=histogram, totals_ptr=totals,
        num_blocks=num_blocks,
        BLOCK=_BLOCK,
        **results,
    )  # fmt: skip
    return counts_E, offsets_E1, order_R, inverse_R
