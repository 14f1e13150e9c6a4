"""The Triton kernel of the grouped product for many rows: programs that stay, operands by TMA.

As many programs as run at once, each with every so many-th tile of the table that `tile_map` fills.
Weights come through a tensor descriptor, and so do rows that lie in sorted order; rows that are
gathered come by pointers. The next tile's loads start while the last one is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import gate_fwd
from moe_runtime.kernels.grouped_gemm.kernel import column_halves


@triton.jit
def grouped_gemm_persistent(
    x, weight, out_ptr, pre_ptr, order_ptr, slots_ptr, offsets_ptr, tile_expert_ptr, tile_row_ptr,
    num_tiles_ptr, dim_n, dim_k, rows_of_slot,
    stride_xr, stride_or, stride_pr,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, GATHER_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr, STORES_PRE: tl.constexpr, IN_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """As `grouped_gemm_fwd`, for EPILOGUE `none` and `gated`.

    `x` is a descriptor of `[R, K]`, or with GATHER_DIVISOR a pointer; `weight` a descriptor of all
    slots' rows of K, or unless IN_ROWS of N, `rows_of_slot` apart. If gated, of `[S, 2, N, K]`:
    gate and up are the halves of a tile, so that both of a pair are in one thread.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if EPILOGUE == "gated" else BLOCK_N
    num_tiles_n = tl.cdiv(dim_n, COLUMNS)
    num_tiles_m = tl.load(num_tiles_ptr)
    num_tiles = num_tiles_m * num_tiles_n
    offs_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):  # type: ignore[misc]
        group_size = GROUP_M * num_tiles_n
        first_m = (tile // group_size) * GROUP_M
        rows_in_group = tl.minimum(num_tiles_m - first_m, GROUP_M)
        tile_m = first_m + (tile % group_size) % rows_in_group
        first_n = (tile % group_size) // rows_in_group * COLUMNS
        expert = tl.load(tile_expert_ptr + tile_m)
        first_row = tl.load(tile_row_ptr + tile_m)
        end_row = tl.load(offsets_ptr + expert + 1)
        slot = expert
        if HAS_SLOTS:
            slot = tl.load(slots_ptr + expert).to(tl.int32)
        row = slot * rows_of_slot
        if GATHER_DIVISOR > 0:
            rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), end_row - 1)
            x_rows = tl.load(order_ptr + rows) // GATHER_DIVISOR
            x_ptrs = x + x_rows[:, None] * stride_xr + offs_k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for first_k in range(0, dim_k, BLOCK_K):
            if GATHER_DIVISOR == 0:
                part = x.load([first_row.to(tl.int32), first_k])
            elif EVEN_K:
                part = tl.load(x_ptrs + first_k)  # type: ignore[possibly-undefined]
            else:
                part = tl.load(
                    x_ptrs + first_k,  # type: ignore[possibly-undefined]
                    mask=(offs_k < dim_k - first_k)[None, :],
                    other=0.0,
                )
            if EPILOGUE == "gated":
                columns = weight.load([slot, 0, first_n, first_k])
                columns = tl.reshape(columns, (BLOCK_N, BLOCK_K)).T
            elif IN_ROWS:
                columns = weight.load([row + first_n, first_k]).T
            else:
                columns = weight.load([row + first_k, first_n])
            acc = tl.dot(part, columns, acc)
        mask_r = tl.arange(0, BLOCK_M) < end_row - first_row
        out_tile_ptr = out_ptr + first_row * stride_or
        if EPILOGUE == "gated":
            pre_tile_ptr = pre_ptr + first_row * stride_pr
            gate, up = column_halves(acc, BLOCK_M, BLOCK_N)
            # Half of the tile at a time: gates, ups and results of all take too many registers.
            gates = column_halves(gate, BLOCK_M, COLUMNS)
            ups = column_halves(up, BLOCK_M, COLUMNS)
            for i in tl.static_range(2):  # type: ignore[misc]
                offs_n = first_n + i * (COLUMNS // 2)
                if STORES_PRE:
                    _store(gates[i], pre_tile_ptr, stride_pr, mask_r, offs_n, dim_n)
                    _store(ups[i], pre_tile_ptr + dim_n, stride_pr, mask_r, offs_n, dim_n)
                hidden = gate_fwd(gates[i], ups[i], ACTIVATION)
                _store(hidden, out_tile_ptr, stride_or, mask_r, offs_n, dim_n)
        else:
            _store(acc, out_tile_ptr, stride_or, mask_r, first_n, dim_n)


@triton.jit
def _store(tile, ptr, stride_r, mask_r, first_n, dim_n):
    """Stores rows of a tile from column `first_n` on; `ptr` is to the first row."""
    offs_r = tl.arange(0, tile.shape[0])
    offs_n = first_n + tl.arange(0, tile.shape[1])
    mask = mask_r[:, None] & (offs_n < dim_n)[None, :]
    tl.store(ptr + (offs_r[:, None] * stride_r + offs_n[None, :]), tile, mask=mask)
