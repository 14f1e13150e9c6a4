"""Triton kernels of the backward pass, without atomics: one program sums a value in one order."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_bwd
from moe_runtime.kernels.grouped_gemm.kernel import (
    column_halves,
    expert_columns,
    tile_of_program,
    tile_product,
)


@triton.jit(do_not_specialize=["num_partials", "num_rows"])
def gate_weight_grad(
    partial_ptr, dout_ptr, bias_ptr, order_ptr, slots_ptr, offsets_ptr, gate_weight_grad_ptr,
    num_partials, num_rows, num_experts, dim,
    stride_gr, stride_gk, stride_bs, stride_bn,
    GATHER_DIVISOR: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows' gate weights: their partial sums, and the part of the down bias.

    Zero for rows without an expert, or whose expert has no slot.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    slots_of_rows = tl.load(order_ptr + rows, mask=mask, other=0)
    offs_e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + 1 + offs_e, mask=offs_e < num_experts, other=0)
    is_behind = (ends[None, :] <= rows[:, None]) & (offs_e[None, :] < num_experts)
    expert = tl.sum(is_behind.to(tl.int64), axis=1)
    slot = tl.where(expert < num_experts, expert, -1)
    if HAS_SLOTS:
        known = tl.minimum(expert, num_experts - 1)
        slot = tl.where(slot < 0, -1, tl.load(slots_ptr + known).to(tl.int64))
    has_slot = mask & (slot >= 0)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    for i in range(num_partials):
        partial_ptrs = partial_ptr + tl.cast(i, tl.int64) * num_rows + rows
        total += tl.load(partial_ptrs, mask=has_slot, other=0.0)
    if HAS_BIAS:
        dot = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
        dout_rows = (slots_of_rows // GATHER_DIVISOR)[:, None] * stride_gr
        bias_rows = slot[:, None] * stride_bs
        for first in range(0, dim, BLOCK_D):
            offs_d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
            here = has_slot[:, None] & (offs_d < dim)
            dout = tl.load(dout_ptr + dout_rows + offs_d * stride_gk, mask=here, other=0.0)
            bias = tl.load(bias_ptr + bias_rows + offs_d * stride_bn, mask=here, other=0.0)
            dot += dout.to(tl.float32) * bias.to(tl.float32)
        total += tl.sum(dot, axis=1)
    tl.store(gate_weight_grad_ptr + slots_of_rows, total, mask=mask)


@triton.jit
def grouped_gemm_dw(
    left_ptr, right_ptr, order_ptr, slots_ptr, offsets_ptr, starts_ptr, values_ptr, dw_ptr,
    dim_n, dim_k,
    stride_lr, stride_ln, stride_rr, stride_rk, stride_ws, stride_wn, stride_wk,
    LEFT_DIVISOR: tl.constexpr, RIGHT_DIVISOR: tl.constexpr, HAS_SLOTS: tl.constexpr,
    WIDTH_MULTIPLE: tl.constexpr, ACCUMULATES: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """`dw[slot, n, k] = sum over the expert's rows of left[r, n] * right[r, k]`, or added to it.

    An expert without rows gets zeros from the same loop. Divisors are as GATHER_DIVISOR in
    `grouped_gemm_fwd`, one for each side; WIDTH_MULTIPLE is for N.
    """
    expert = tl.program_id(1)
    slot = expert.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + expert).to(tl.int64)
        if slot < 0:
            return
    first_row = tl.load(offsets_ptr + expert)
    end_row = tl.load(offsets_ptr + expert + 1)
    if ACCUMULATES and first_row == end_row:
        return
    tile_n, tile_k = tile_of_program(tl.cdiv(dim_n, BLOCK_N), tl.cdiv(dim_k, BLOCK_K), GROUP_M)
    if WIDTH_MULTIPLE > 0:
        first, width, stride, base = expert_columns(
            starts_ptr, values_ptr, offsets_ptr, expert, WIDTH_MULTIPLE
        )
        if tile_n * BLOCK_N >= width:
            return
        dim_n = width
        left_ptr += base
        stride_lr = stride
        dw_ptr += first * stride_wn
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    left_ptrs = left_ptr + (offs_n.to(tl.int64) * stride_ln)[None, :]
    right_ptrs = right_ptr + (offs_k.to(tl.int64) * stride_rk)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # row numbers have 32 bits, their distances 64
    num_rows = (end_row - first_row).to(tl.int32)
    order_ptr += first_row
    offs_r = tl.arange(0, BLOCK_R)
    if LEFT_DIVISOR == 0:
        left_ptrs += first_row * stride_lr
    if RIGHT_DIVISOR == 0:
        right_ptrs += first_row * stride_rr
    for first in range(0, num_rows, BLOCK_R):
        # past the end, zeros on the left meet the expert's last row on the right
        rows = tl.minimum(first + offs_r, num_rows - 1)
        mask_left = (first + offs_r < num_rows)[:, None]
        if not EVEN_N:
            mask_left = mask_left & (offs_n < dim_n)[None, :]
        slots = rows
        if LEFT_DIVISOR > 0 or RIGHT_DIVISOR > 0:
            slots = tl.load(order_ptr + rows).to(tl.int32)
        left_rows = slots // LEFT_DIVISOR if LEFT_DIVISOR > 0 else rows
        right_rows = slots // RIGHT_DIVISOR if RIGHT_DIVISOR > 0 else rows
        to_left = (left_rows.to(tl.int64) * stride_lr)[:, None]
        to_right = (right_rows.to(tl.int64) * stride_rr)[:, None]
        left = tl.load(left_ptrs + to_left, mask=mask_left, other=0.0)
        if EVEN_K:
            right = tl.load(right_ptrs + to_right)
        else:
            right = tl.load(right_ptrs + to_right, mask=(offs_k < dim_k)[None, :], other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
    # a part of the columns at a time: addresses and values of all take many registers
    HALF: tl.constexpr = BLOCK_K // 2
    halves = column_halves(acc, BLOCK_N, BLOCK_K)
    dw_ptr += slot * stride_ws
    for i in tl.static_range(2):  # type: ignore[misc]
        part = halves[i]
        columns = tile_k * BLOCK_K + i * HALF + tl.arange(0, HALF)
        dw_ptrs = dw_ptr + (offs_n.to(tl.int64) * stride_wn)[:, None]
        dw_ptrs += (columns.to(tl.int64) * stride_wk)[None, :]
        mask = (offs_n < dim_n)[:, None] & (columns < dim_k)[None, :]
        if ACCUMULATES:
            part += tl.load(dw_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dw_ptrs, part, mask=mask)


@triton.jit
def grouped_bias_grad(
    x_ptr, scale_ptr, order_ptr, slots_ptr, offsets_ptr, starts_ptr, values_ptr, sum_ptr,
    dim,
    stride_xr, stride_xn, stride_ss,
    GATHER_DIVISOR: tl.constexpr, HAS_SLOTS: tl.constexpr, WIDTH_MULTIPLE: tl.constexpr,
    HAS_SCALE: tl.constexpr, ACCUMULATES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`sum[slot] = sum over the expert's rows of scale * x[row r reads]`: a bias gradient."""
    expert = tl.program_id(1)
    slot = expert.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + expert).to(tl.int64)
        if slot < 0:
            return
    if WIDTH_MULTIPLE > 0:
        first, width, stride, base = expert_columns(
            starts_ptr, values_ptr, offsets_ptr, expert, WIDTH_MULTIPLE
        )
        dim = width
        x_ptr += base
        stride_xr = stride
        sum_ptr += first
    end_row = tl.load(offsets_ptr + expert + 1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < dim
    acc = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for first in range(tl.load(offsets_ptr + expert), end_row, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        mask_r = rows < end_row
        x_rows = rows
        slots_of_rows = rows
        if GATHER_DIVISOR > 0:
            slots_of_rows = tl.load(order_ptr + rows, mask=mask_r, other=0)
            x_rows = slots_of_rows // GATHER_DIVISOR
        x_ptrs = x_ptr + x_rows[:, None] * stride_xr + (offs_n.to(tl.int64) * stride_xn)[None, :]
        x = tl.load(x_ptrs, mask=mask_r[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        if HAS_SCALE:
            scale = tl.load(scale_ptr + slots_of_rows, mask=mask_r, other=0.0)
            x *= scale.to(tl.float32)[:, None]
        acc += x
    total = tl.sum(acc, axis=0)
    if ACCUMULATES:
        total += tl.load(sum_ptr + slot * stride_ss + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(sum_ptr + slot * stride_ss + offs_n, total, mask=mask_n)


@triton.jit
def _preactivations(
    first_column, mask_r, pre_ptr, dim_n, stride_zr, stride_z_up,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gate and up of some columns as they are stored; the same twice if they are interleaved."""
    pre_ptrs = pre_ptr + tl.arange(0, ROWS)[:, None] * stride_zr
    if IS_GATED and IS_INTERLEAVED:
        offs_z = 2 * first_column + tl.arange(0, 2 * COLUMNS)
        mask_z = mask_r[:, None] & (offs_z < 2 * dim_n)[None, :]
        gate = tl.load(pre_ptrs + offs_z[None, :], mask=mask_z, other=0.0)
        up = gate
    else:
        offs_n = first_column + tl.arange(0, COLUMNS)
        mask = mask_r[:, None] & (offs_n < dim_n)[None, :]
        gate = tl.load(pre_ptrs + offs_n[None, :], mask=mask, other=0.0)
        up = gate
        if IS_GATED:
            up = tl.load(pre_ptrs + stride_z_up + offs_n[None, :], mask=mask, other=0.0)
    return gate, up


@triton.jit
def _down_act_slice(
    dhidden, gate, up, first_column, scale, mask_r, dpre_ptr, hidden_ptr, dim_n,
    stride_dzr, stride_hr, stride_z_up,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    ADDS_HIDDEN: tl.constexpr, STORES_HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The epilogue of `grouped_gemm_down_act` for some columns; returns each row's `<d, h>`.

    Pointers are to the tile's first row. Columns past the end have d = 0.
    """
    offs_r = tl.arange(0, ROWS)[:, None]
    dpre_ptrs = dpre_ptr + offs_r * stride_dzr
    hidden_ptrs = hidden_ptr + offs_r * stride_hr
    offs_n = first_column + tl.arange(0, COLUMNS)
    mask = mask_r[:, None] & (offs_n < dim_n)[None, :]
    if ADDS_HIDDEN:
        more = tl.load(hidden_ptrs + offs_n[None, :], mask=mask, other=0.0)
        dhidden += more.to(tl.float32)
    scaled = dhidden * scale[:, None]
    if IS_GATED:
        if IS_INTERLEAVED:
            gate, up = tl.split(tl.reshape(gate.to(tl.float32), (ROWS, COLUMNS, 2)))
        hidden, dgate, dup = gate_bwd(scaled, gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
        if IS_INTERLEAVED:
            offs_z = 2 * first_column + tl.arange(0, 2 * COLUMNS)
            mask_z = mask_r[:, None] & (offs_z < 2 * dim_n)[None, :]
            both = tl.reshape(tl.join(dgate, dup), (ROWS, 2 * COLUMNS))
            tl.store(dpre_ptrs + offs_z[None, :], both, mask=mask_z)
        else:
            tl.store(dpre_ptrs + offs_n[None, :], dgate, mask=mask)
            tl.store(dpre_ptrs + stride_z_up + offs_n[None, :], dup, mask=mask)
    else:
        hidden, slope = activate(up.to(tl.float32), ACTIVATION)
        tl.store(dpre_ptrs + offs_n[None, :], scaled * slope, mask=mask)
    if STORES_HIDDEN:
        tl.store(hidden_ptrs + offs_n[None, :], hidden * scale[:, None], mask=mask)
    return tl.sum(dhidden * hidden, axis=1)


@triton.jit(do_not_specialize=["num_tiles_m", "num_rows"])
def grouped_gemm_down_act(
    dout_ptr, weight_ptr, pre_ptr, scale_ptr, order_ptr, slots_ptr, offsets_ptr, starts_ptr,
    values_ptr, tile_expert_ptr, tile_row_ptr, dpre_ptr, hidden_ptr, partial_ptr,
    num_tiles_m, num_rows, dim_n, dim_k,
    stride_gr, stride_gk, stride_ws, stride_wn, stride_wk, stride_zr, stride_dzr, stride_hr,
    stride_z_up,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    GATHER_DIVISOR: tl.constexpr, HAS_SLOTS: tl.constexpr, WIDTH_MULTIPLE: tl.constexpr,
    HAS_SCALE: tl.constexpr, ADDS_HIDDEN: tl.constexpr, STORES_HIDDEN: tl.constexpr,
    STORES_PARTIAL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_SLICES: tl.constexpr, IS_AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradient of the pre-activations, from that of the layer's output.

    With `d[r] = dout[row r reads] @ weight[slot]` (`weight` is the down projection, N its hidden
    and K its model dimension), the hidden values `h` recomputed from the pre-activations, and the
    gate weight `s` of the row: `dpre = s * d * activation'(pre)`, `hidden = s * h` for the gradient
    of the down projection, and `<d, h>` over the tile's columns, whose sum over column tiles is the
    gradient of `s`. With ADDS_HIDDEN, the contents of `hidden` are added to `d` first.
    WIDTH_MULTIPLE as in `grouped_gemm_fwd`, for N.

    IS_AHEAD: loads pre-activations before the product and before stores, which takes registers;
    otherwise another program on the multiprocessor fills the wait.
    """
    tile_m, tile_n = tile_of_program(num_tiles_m, tl.cdiv(dim_n, BLOCK_N), GROUP_M)
    expert = tl.load(tile_expert_ptr + tile_m)
    if expert < 0:
        return
    first_row = tl.load(tile_row_ptr + tile_m)
    end_row = tl.load(offsets_ptr + expert + 1)
    slot = expert.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + expert).to(tl.int64)
    offs_r = first_row + tl.arange(0, BLOCK_M)
    mask_r = offs_r < end_row
    rows = tl.minimum(offs_r, end_row - 1)
    slots_of_rows = rows
    dout_rows = rows
    if GATHER_DIVISOR > 0:
        slots_of_rows = tl.load(order_ptr + rows)
        dout_rows = slots_of_rows // GATHER_DIVISOR
    if WIDTH_MULTIPLE > 0:
        first, width, stride, base = expert_columns(
            starts_ptr, values_ptr, offsets_ptr, expert, WIDTH_MULTIPLE
        )
        if tile_n * BLOCK_N >= width:
            if STORES_PARTIAL:
                place = tile_n.to(tl.int64) * num_rows + rows
                tl.store(partial_ptr + place, tl.zeros([BLOCK_M], dtype=tl.float32), mask=mask_r)
            return
        dim_n = width
        weight_ptr += first * stride_wn
        pre_ptr += base
        dpre_ptr += base
        hidden_ptr += base
        stride_zr = stride
        stride_dzr = stride
        stride_hr = stride
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = offs_n.to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    weight_ptr += slot * stride_ws
    SLICE: tl.constexpr = BLOCK_N // NUM_SLICES
    pre_ptr += first_row * stride_zr
    if IS_AHEAD:
        gate, up = _preactivations(
            tile_n * BLOCK_N, mask_r, pre_ptr, dim_n,
            stride_zr, stride_z_up, IS_GATED, IS_INTERLEAVED, BLOCK_M, SLICE,
        )  # fmt: skip
    dhidden = tile_product(
        tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32),
        dout_ptr + dout_rows[:, None] * stride_gr + offs_k[None, :] * stride_gk,
        weight_ptr + (columns * stride_wn)[None, :] + offs_k[:, None] * stride_wk,
        offs_n < dim_n,
        dim_k,
        stride_gk,
        stride_wk,
        BLOCK_K,
        EVEN_N,
        EVEN_K,
        PRECISION,
    )

    scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + slots_of_rows).to(tl.float32)
    # gate, up and their gradients of a whole tile do not fit in registers
    if NUM_SLICES == 1:
        slices = (dhidden,)
    elif NUM_SLICES == 2:
        slices = column_halves(dhidden, BLOCK_M, BLOCK_N)
    elif NUM_SLICES == 4:
        slices = _quarters(dhidden, BLOCK_M, BLOCK_N)
    else:
        tl.static_assert(NUM_SLICES == 8)
        left, right = column_halves(dhidden, BLOCK_M, BLOCK_N)
        slices = _quarters(left, BLOCK_M, BLOCK_N // 2) + _quarters(right, BLOCK_M, BLOCK_N // 2)
    gate_weight_grad = tl.zeros([BLOCK_M], dtype=tl.float32)
    for i in tl.static_range(NUM_SLICES):  # type: ignore[misc]
        if not IS_AHEAD:
            gate, up = _preactivations(
                tile_n * BLOCK_N + i * SLICE, mask_r, pre_ptr, dim_n,
                stride_zr, stride_z_up, IS_GATED, IS_INTERLEAVED, BLOCK_M, SLICE,
            )  # fmt: skip
        next_gate, next_up = gate, up  # type: ignore[possibly-undefined]
        if IS_AHEAD and i + 1 < NUM_SLICES:
            # before this slice's stores, which no load may overtake
            next_gate, next_up = _preactivations(
                tile_n * BLOCK_N + (i + 1) * SLICE, mask_r, pre_ptr, dim_n,
                stride_zr, stride_z_up, IS_GATED, IS_INTERLEAVED, BLOCK_M, SLICE,
            )  # fmt: skip
        gate_weight_grad += _down_act_slice(
            slices[i],
            gate,  # type: ignore[possibly-undefined]
            up,  # type: ignore[possibly-undefined]
            tile_n * BLOCK_N + i * SLICE,
            scale,
            mask_r,
            dpre_ptr + first_row * stride_dzr,
            hidden_ptr + first_row * stride_hr,
            dim_n,
            stride_dzr,
            stride_hr,
            stride_z_up,
            IS_GATED,
            ACTIVATION,
            IS_INTERLEAVED,
            ADDS_HIDDEN,
            STORES_HIDDEN,
            BLOCK_M,
            SLICE,
        )
        gate, up = next_gate, next_up
    if STORES_PARTIAL:
        place = tile_n.to(tl.int64) * num_rows + rows
        tl.store(partial_ptr + place, gate_weight_grad, mask=mask_r)


@triton.jit
def _quarters(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a tile in four parts."""
    left, right = column_halves(tile, ROWS, COLUMNS)
    first, second = column_halves(left, ROWS, COLUMNS // 2)
    third, fourth = column_halves(right, ROWS, COLUMNS // 2)
    return first, second, third, fourth
