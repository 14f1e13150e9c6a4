"""The Triton kernel of `fetch_experts`: one program per chunk of a chosen expert.

It starts after the end of the kernel before it, which may read landing slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words per program: 16 KiB if they have 8 bytes. About 80 kB in flight fill a link of 55 GB/s.
BLOCK_W = 2048
LINE_BYTES = tl.constexpr(128)
BLOCK_E = 32


@triton.jit
def _first_place(ids_ptr, expert, num_ids, BLOCK_R: tl.constexpr):
    """The first place that names an expert."""
    offs_r = tl.arange(0, BLOCK_R)
    ids = tl.load(ids_ptr + offs_r, mask=offs_r < num_ids, other=-1).to(tl.int64)
    return tl.min(tl.where(ids == expert, offs_r, BLOCK_R), axis=0)


@triton.jit
def fetch_experts_fwd(
    ids_ptr, residents_ptr, sources_ptr, parts_ptr, landing_ptr, words_ptr, slots_ptr,
    num_ids, num_experts, first, num_landing, slot_words,
    NUM_PARTS: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """`slots[landing] = host[expert]`; the first program writes `slots_E`."""
    chunk, own = tl.program_id(0), tl.program_id(1)
    if (own == 0) & (chunk == 0):
        offs_r = tl.arange(0, BLOCK_R)
        ids = tl.load(ids_ptr + offs_r, mask=offs_r < num_ids, other=-1).to(tl.int64)
        for begin in range(0, num_experts, BLOCK_E):
            offs_e = begin + tl.arange(0, BLOCK_E)
            mask_e = offs_e < num_experts
            resident = tl.load(residents_ptr + offs_e, mask=mask_e, other=0)
            source = tl.load(sources_ptr + offs_e.to(tl.int64) * NUM_PARTS, mask=mask_e, other=0)
            named = ids[None, :] == offs_e[:, None]
            place = tl.min(tl.where(named, offs_r[None, :], BLOCK_R), axis=1) - first
            is_fetched = (resident < 0) & (source != 0) & (place >= 0) & (place < num_landing)
            slot = tl.load(landing_ptr + place, mask=is_fetched, other=-1)
            slot = tl.where((resident >= 0) & (first == 0), resident, slot)
            tl.store(slots_ptr + offs_e, slot, mask=mask_e)
    place = first + own
    if place >= num_ids:
        return
    expert = tl.load(ids_ptr + place).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    if tl.load(residents_ptr + expert) >= 0:
        return
    if _first_place(ids_ptr, expert, num_ids, BLOCK_R) != place:
        return
    slot_ptr = words_ptr + tl.load(landing_ptr + own).to(tl.int64) * slot_words
    before = 0
    for part in tl.static_range(NUM_PARTS):  # type: ignore[attr-defined]
        num_words = tl.load(parts_ptr + NUM_PARTS + part) // WORD_BYTES
        source = tl.load(sources_ptr + expert * NUM_PARTS + part)
        # loads begin with a line, which may also hold the end of the part before
        lead = (source % LINE_BYTES) // WORD_BYTES
        offs = (chunk - before).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W) - lead
        mask = (offs >= 0) & (offs < tl.where(source != 0, num_words, 0))
        words = tl.load(source.to(words_ptr.dtype) + offs, mask=mask)
        begin = tl.load(parts_ptr + part) // WORD_BYTES
        tl.store(slot_ptr + begin + offs, words, mask=mask)
        before += (num_words + LINE_BYTES // WORD_BYTES + BLOCK_W - 1) // BLOCK_W
