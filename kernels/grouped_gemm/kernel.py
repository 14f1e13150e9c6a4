"""The Triton kernels of the grouped product: rows sorted by expert times the experts' weights.

One program computes one tile: some rows of one expert by some columns. `tile_map` fills a table of
tiles on the device, so the host never learns an expert's number of rows. The grid covers the
largest possible table; programs without a tile return at once.

Names: `R` sorted rows, `N` columns of the result, `K` the summed dimension. Addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_fwd
from moe_runtime.kernels.grouped_gemm.packed_kernel import (
    packed_product,
    row_of_scales,
    times_global,
)


@triton.jit(do_not_specialize=["num_tiles"])
def tile_map(
    offsets_ptr, slots_ptr, tile_expert_ptr, tile_row_ptr, num_used_ptr,
    num_experts, num_tiles,
    HAS_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Program e lists the tiles of expert e; the last program marks unused entries and counts used
    ones. Experts with a negative slot get no tiles.
    """
    expert = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < num_experts
    first_row = tl.load(offsets_ptr + offs_e, mask=mask_e, other=0)
    end_row = tl.load(offsets_ptr + offs_e + 1, mask=mask_e, other=0)
    tiles = (end_row - first_row + BLOCK_M - 1) // BLOCK_M
    if HAS_SLOTS:
        slots = tl.load(slots_ptr + offs_e, mask=mask_e, other=-1)
        tiles = tl.where(slots < 0, 0, tiles)
    first_tile = tl.sum(tl.where(offs_e < expert, tiles, 0), axis=0)
    own_row = tl.sum(tl.where(offs_e == expert, first_row, 0), axis=0)
    own_tiles = tl.sum(tl.where(offs_e == expert, tiles, 0), axis=0)
    is_last = expert == num_experts
    tl.store(num_used_ptr, first_tile.to(tl.int32), mask=is_last)
    own_tiles = tl.where(is_last, num_tiles - first_tile, own_tiles)
    name = tl.where(is_last, -1, expert)
    for i in range(0, own_tiles, BLOCK_TILES):
        offs_t = i + tl.arange(0, BLOCK_TILES)
        mask = offs_t < own_tiles
        tl.store(tile_expert_ptr + first_tile + offs_t, name, mask=mask)
        row = own_row + offs_t.to(tl.int64) * BLOCK_M
        tl.store(tile_row_ptr + first_tile + offs_t, row, mask=mask)


@triton.jit
def expert_columns(starts_ptr, values_ptr, offsets_ptr, expert, MULTIPLE: tl.constexpr):
    """`(first, width, stride, base)` of an expert of its own width: its first column, its number of
    columns, and where its hidden values are: row r starts at `base + r * stride`.
    """
    first = tl.load(starts_ptr + expert)
    width = (tl.load(starts_ptr + expert + 1) - first).to(tl.int32)
    stride = (width + 15) // 16 * 16
    base = tl.load(values_ptr + expert) - tl.load(offsets_ptr + expert) * stride
    return first, tl.multiple_of(width, MULTIPLE), stride, tl.multiple_of(base, 16)


@triton.jit
def tile_of_program(num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """`(m, n)` of this program: GROUP_M row tiles share each column tile while it is in the L2."""
    pid = tl.program_id(0)
    group_size = GROUP_M * num_tiles_n
    first_m = (pid // group_size) * GROUP_M
    rows_in_group = tl.minimum(num_tiles_m - first_m, GROUP_M)
    return first_m + (pid % group_size) % rows_in_group, (pid % group_size) // rows_in_group


@triton.jit
def tile_product(
    acc, x_ptrs, weight_ptrs, mask_n, dim_k,
    stride_xk, stride_wk,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds sums over K to `acc`, fp32 `[BLOCK_M, BLOCK_N]`. Every row of x must exist.

    Columns past the end are masked, not clamped: clamped columns are no neighbours in memory, which
    would split the loads of weights that are contiguous along N.
    """
    offs_k = tl.arange(0, BLOCK_K)
    step_x = tl.full([], BLOCK_K, dtype=tl.int64) * stride_xk
    step_w = tl.full([], BLOCK_K, dtype=tl.int64) * stride_wk
    for first_k in range(0, dim_k, BLOCK_K):
        mask_k = offs_k < dim_k - first_k
        x = tl.load(x_ptrs) if EVEN_K else tl.load(x_ptrs, mask=mask_k[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            weight = tl.load(weight_ptrs)
        elif EVEN_K:
            weight = tl.load(weight_ptrs, mask=mask_n[None, :], other=0.0)
        elif EVEN_N:
            weight = tl.load(weight_ptrs, mask=mask_k[:, None], other=0.0)
        else:
            weight = tl.load(weight_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += step_x
        weight_ptrs += step_w
    return acc


@triton.jit
def column_halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _gated_slice(
    gate, up, first_column, mask_r, out_ptrs, pre_ptrs, dim_n,
    stride_p_up,
    ACTIVATION: tl.constexpr, IS_INTERLEAVED: tl.constexpr, ADDS_PRE: tl.constexpr,
    STORES_PRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gated epilogue of `grouped_gemm_fwd` for some hidden columns; pointers are one a row."""
    offs_f = first_column + tl.arange(0, COLUMNS)
    mask = mask_r[:, None] & (offs_f < dim_n)[None, :]
    if ADDS_PRE:
        if IS_INTERLEAVED:
            offs_z = 2 * first_column + tl.arange(0, 2 * COLUMNS)
            mask_z = mask_r[:, None] & (offs_z < 2 * dim_n)[None, :]
            both = tl.load(pre_ptrs[:, None] + offs_z[None, :], mask=mask_z, other=0.0)
            more_gate, more_up = tl.split(tl.reshape(both.to(tl.float32), (ROWS, COLUMNS, 2)))
        else:
            gate_ptrs = pre_ptrs[:, None] + offs_f[None, :]
            more_gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
            more_up = tl.load(gate_ptrs + stride_p_up, mask=mask, other=0.0).to(tl.float32)
        gate += more_gate
        up += more_up
    if STORES_PRE:
        if IS_INTERLEAVED:
            offs_z = 2 * first_column + tl.arange(0, 2 * COLUMNS)
            mask_z = mask_r[:, None] & (offs_z < 2 * dim_n)[None, :]
            both = tl.reshape(tl.join(gate, up), (ROWS, 2 * COLUMNS))
            tl.store(pre_ptrs[:, None] + offs_z[None, :], both, mask=mask_z)
        else:
            tl.store(pre_ptrs[:, None] + offs_f[None, :], gate, mask=mask)
            tl.store(pre_ptrs[:, None] + (stride_p_up + offs_f)[None, :], up, mask=mask)
    hidden = gate_fwd(gate, up, ACTIVATION)
    tl.store(out_ptrs[:, None] + offs_f[None, :], hidden, mask=mask)


@triton.jit(do_not_specialize=["num_tiles_m"])
def grouped_gemm_fwd(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pre_ptr, order_ptr, slots_ptr, offsets_ptr, starts_ptr,
    values_ptr, tile_expert_ptr, tile_row_ptr, scales_ptr, zeros_ptr, global_ptr,
    num_tiles_m, dim_n, dim_k,
    stride_xr, stride_xk, stride_ws, stride_wn, stride_wk, stride_w_up,
    stride_ss, stride_sn, stride_s_up, stride_zs, stride_zn, stride_z_up, stride_gs, stride_g_up,
    stride_bs, stride_bn, stride_b_up, stride_or, stride_pr, stride_p_up,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    IN_HALVES: tl.constexpr, GATHER_DIVISOR: tl.constexpr, SCATTERS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, WIDTH_MULTIPLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS_PRE: tl.constexpr, STORES_PRE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_SLICES: tl.constexpr,
    FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr, HAS_GLOBAL: tl.constexpr,
):  # fmt: skip
    """`out[r] = epilogue(x[row r reads] @ weight[slot].T + bias[slot])`.

    EPILOGUE is `none`, `plain` (function of each value) or `gated`. A gated tile holds the gate and
    up columns of BLOCK_N / 2 hidden columns: alternating, so that both of a pair are in one thread,
    or in two halves if only that reads the weights in order (IN_HALVES). `dim_n` counts columns of
    the result: hidden columns if gated.

    GATHER_DIVISOR is 0 for row r of `x`, else the row is `order[r] // GATHER_DIVISOR`. With
    WIDTH_MULTIPLE, a divisor of all widths, experts have their own widths: N columns with an
    activation, else K; the dimension is that of the widest. With ADDS_PRE, the contents of `pre`
    are added to the pre-activations. With FORMAT, weights are codes, addressed in bytes, with
    scales and zero points; HAS_GLOBAL adds a global scale for each of gate and up.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if EPILOGUE == "gated" else BLOCK_N
    tile_m, tile_n = tile_of_program(num_tiles_m, tl.cdiv(dim_n, COLUMNS), GROUP_M)
    expert = tl.load(tile_expert_ptr + tile_m)
    if expert < 0:
        return
    first_row = tl.load(tile_row_ptr + tile_m)
    end_row = tl.load(offsets_ptr + expert + 1)
    slot = expert.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + expert).to(tl.int64)
    if WIDTH_MULTIPLE > 0:
        first, width, stride, base = expert_columns(
            starts_ptr, values_ptr, offsets_ptr, expert, WIDTH_MULTIPLE
        )
        if EPILOGUE == "none":
            dim_k = width
            weight_ptr += first * stride_wk
            x_ptr += base
            stride_xr = stride
        else:
            if tile_n * COLUMNS >= width:
                return
            dim_n = width
            weight_ptr += first * stride_wn
            bias_ptr += first * stride_bn
            out_ptr += base
            pre_ptr += base
            stride_or = stride
            stride_pr = stride

    offs_r = first_row + tl.arange(0, BLOCK_M)
    mask_r = offs_r < end_row
    # rows past the end repeat the last one: loads need no mask, stores have one
    rows = tl.minimum(offs_r, end_row - 1)
    x_rows = rows
    if GATHER_DIVISOR > 0:
        x_rows = tl.load(order_ptr + rows) // GATHER_DIVISOR
    offs_j = tl.arange(0, BLOCK_N)
    if EPILOGUE == "gated":
        if IN_HALVES:
            offs_n = tile_n * (BLOCK_N // 2) + offs_j % (BLOCK_N // 2)
            is_up = offs_j // (BLOCK_N // 2)
        else:
            offs_n = tile_n * (BLOCK_N // 2) + offs_j // 2
            is_up = offs_j % 2
    else:
        offs_n = tile_n * BLOCK_N + offs_j
        is_up = offs_j * 0
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_n = offs_n < dim_n
    if EPILOGUE == "gated" and IS_INTERLEAVED:
        # the same columns, in a form that shows the compiler that they are neighbours
        offs_z = (tile_n * BLOCK_N + offs_j).to(tl.int64)
        mask_n = offs_z < 2 * dim_n
        w_columns = offs_z * stride_w_up
        b_columns = offs_z * stride_b_up
    elif EPILOGUE == "gated":
        w_columns = offs_n.to(tl.int64) * stride_wn + is_up.to(tl.int64) * stride_w_up
        b_columns = offs_n.to(tl.int64) * stride_bn + is_up.to(tl.int64) * stride_b_up
    else:
        w_columns = offs_n.to(tl.int64) * stride_wn
        b_columns = offs_n.to(tl.int64) * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if HAS_BIAS and not HAS_GLOBAL:
        # sums start from it: the epilogue has no registers to add it
        bias = tl.load(bias_ptr + slot * stride_bs + b_columns, mask=mask_n, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    x_ptrs = x_ptr + x_rows[:, None] * stride_xr + offs_k[None, :] * stride_xk
    weight_ptr += slot * stride_ws
    if FORMAT is not None:
        groups = row_of_scales(offs_n, FORMAT).to(tl.int64)
        is_up = is_up.to(tl.int64)
        acc = packed_product(
            acc,
            x_ptrs,
            weight_ptr + w_columns,
            scales_ptr + slot * stride_ss + groups * stride_sn + is_up * stride_s_up,
            zeros_ptr + slot * stride_zs + groups * stride_zn + is_up * stride_z_up,
            mask_n,
            dim_k,
            stride_xk,
            FORMAT,
            SCALES_TILE,
            EVEN_N,
            EVEN_K,
            PRECISION,
            BLOCK_N,
            BLOCK_K,
        )
        if HAS_GLOBAL:
            ptrs = global_ptr + slot * stride_gs + is_up * stride_g_up
            acc = times_global(acc, ptrs[None, :], FORMAT)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + slot * stride_bs + b_columns, mask=mask_n, other=0.0)
                acc += bias.to(tl.float32)[None, :]
    else:
        acc = tile_product(
            acc,
            x_ptrs,
            weight_ptr + w_columns[None, :] + offs_k[:, None] * stride_wk,
            mask_n,
            dim_k,
            stride_xk,
            stride_wk,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            PRECISION,
        )
    out_rows = rows
    if SCATTERS:
        out_rows = tl.load(order_ptr + rows)
    out_ptrs = out_ptr + out_rows * stride_or
    pre_ptrs = pre_ptr + out_rows * stride_pr
    if EPILOGUE == "gated":
        HALF: tl.constexpr = BLOCK_N // 2
        if IN_HALVES:
            gates_and_ups = (column_halves(acc, BLOCK_M, BLOCK_N),)
        elif NUM_SLICES == 1:
            gates_and_ups = (tl.split(tl.reshape(acc, (BLOCK_M, HALF, 2))),)
        else:
            # half of the tile at a time: gates, ups and results of all need too many registers
            tl.static_assert(NUM_SLICES == 2)
            left, right = column_halves(acc, BLOCK_M, BLOCK_N)
            left = tl.split(tl.reshape(left, (BLOCK_M, HALF // 2, 2)))
            right = tl.split(tl.reshape(right, (BLOCK_M, HALF // 2, 2)))
            gates_and_ups = (left, right)
        WIDTH: tl.constexpr = HALF if IN_HALVES else HALF // NUM_SLICES
        for i in tl.static_range(1 if IN_HALVES else NUM_SLICES):  # type: ignore[misc]
            _gated_slice(
                gates_and_ups[i][0],
                gates_and_ups[i][1],
                tile_n * HALF + i * WIDTH,
                mask_r,
                out_ptrs,
                pre_ptrs,
                dim_n,
                stride_p_up,
                ACTIVATION,
                IS_INTERLEAVED,
                ADDS_PRE,
                STORES_PRE,
                BLOCK_M,
                WIDTH,
            )
    else:
        mask = mask_r[:, None] & (offs_n < dim_n)[None, :]
        if EPILOGUE == "plain":
            if ADDS_PRE:
                more = tl.load(pre_ptrs[:, None] + offs_n[None, :], mask=mask, other=0.0)
                acc += more.to(tl.float32)
            if STORES_PRE:
                tl.store(pre_ptrs[:, None] + offs_n[None, :], acc, mask=mask)
            acc, _ = activate(acc, ACTIVATION)
        tl.store(out_ptrs[:, None] + offs_n[None, :], acc, mask=mask)


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
    """`grouped_gemm_fwd` for EPILOGUE `none` and `gated`, by persistent programs that load by TMA.

    There are as many programs as run at once; each takes every so-many-th tile. The next tile's
    loads start while the last one is stored. `x` is a descriptor of `[R, K]`, or with
    GATHER_DIVISOR a pointer; `weight` a descriptor of all slots' rows of K, or unless IN_ROWS of N,
    `rows_of_slot` apart. If gated, it is of `[S, 2, N, K]`: gate and up are the halves of a tile,
    so that both of a pair are in one thread.
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
            # half of the tile at a time: gates, ups and results of all need too many registers
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
