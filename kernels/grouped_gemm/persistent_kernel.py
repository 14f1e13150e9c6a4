"""The Triton kernel of the grouped product for many rows: programs that stay, operands by TMA.

As many programs as run at once, each with every so many-th tile of the table that `tile_map` fills.
Weights come through a tensor descriptor, and so do rows that lie in sorted order; rows that are
gathered come by pointers. The next tile's loads start while the last one is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import gate_fwd


@triton.jit(do_not_specialize=["num_programs"])
def grouped_gemm_persistent(
    x, weight, out_ptr, pre_ptr, order_ptr, slots_ptr, offsets_ptr, tile_expert_ptr, tile_row_ptr,
    num_tiles_ptr, num_programs, dim_n, dim_k, rows_of_slot,
    stride_xr, stride_or, stride_pr,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, GATHER_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr, STORES_PRE: tl.constexpr, IN_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, IS_SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """As `grouped_gemm_fwd`, for EPILOGUE `none` and `gated`.

    `x` is a descriptor of `[R, K]`, or with GATHER_DIVISOR a pointer; `weight` a descriptor of all
    slots' rows of K, or unless IN_ROWS of N, `rows_of_slot` apart. Of a gated tile, gate and up are
    products of their own, so that both of a pair are in one thread.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if EPILOGUE == "gated" else BLOCK_N
    num_tiles_n = tl.cdiv(dim_n, COLUMNS)
    num_tiles_m = tl.load(num_tiles_ptr)
    num_tiles = num_tiles_m * num_tiles_n
    offs_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(
        tl.program_id(0), num_tiles, num_programs,
        flatten=not IS_SPECIALIZED, warp_specialize=IS_SPECIALIZED,
    ):  # fmt: skip
        group_size = GROUP_M * num_tiles_n
        first_m = (tile // group_size) * GROUP_M
        rows_in_group = tl.minimum(num_tiles_m - first_m, GROUP_M)
        tile_m = first_m + (tile % group_size) % rows_in_group
        first_n = (tile % group_size) // rows_in_group * COLUMNS
        expert = tl.load(tile_expert_ptr + tile_m)
        first_row = tl.load(tile_row_ptr + tile_m)
        end_row = tl.load(offsets_ptr + expert + 1)
        row = expert * rows_of_slot
        if HAS_SLOTS:
            row = tl.load(slots_ptr + expert).to(tl.int32) * rows_of_slot
        if GATHER_DIVISOR > 0:
            rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), end_row - 1)
            x_rows = tl.load(order_ptr + rows) // GATHER_DIVISOR
            x_ptrs = x + x_rows[:, None] * stride_xr + offs_k[None, :]
        acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
        for first_k in range(0, dim_k, BLOCK_K):
            if GATHER_DIVISOR == 0:
                part = x.load([first_row.to(tl.int32), first_k])
            elif EVEN_K:
                part = tl.load(x_ptrs + first_k)
            else:
                part = tl.load(
                    x_ptrs + first_k, mask=(offs_k < dim_k - first_k)[None, :], other=0.0
                )
            if IN_ROWS:
                acc = tl.dot(part, weight.load([row + first_n, first_k]).T, acc)
                if EPILOGUE == "gated":
                    up = tl.dot(part, weight.load([row + dim_n + first_n, first_k]).T, up)
            else:
                acc = tl.dot(part, weight.load([row + first_k, first_n]), acc)
                if EPILOGUE == "gated":
                    up = tl.dot(part, weight.load([row + first_k, dim_n + first_n]), up)
        offs_r = tl.arange(0, BLOCK_M)
        offs_n = first_n + tl.arange(0, COLUMNS)
        mask = (offs_r < end_row - first_row)[:, None] & (offs_n < dim_n)[None, :]
        if STORES_PRE:
            pre_ptrs = pre_ptr + first_row * stride_pr + offs_n[None, :]
            pre_ptrs += offs_r[:, None] * stride_pr
            tl.store(pre_ptrs, acc, mask=mask)
            tl.store(pre_ptrs + dim_n, up, mask=mask)
        if EPILOGUE == "gated":
            acc = gate_fwd(acc, up, ACTIVATION)
        out_ptrs = out_ptr + first_row * stride_or + offs_n[None, :]
        tl.store(out_ptrs + offs_r[:, None] * stride_or, acc, mask=mask)
