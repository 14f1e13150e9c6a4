"""Triton kernels of the backward pass: through the activation, into the weights, into the biases.

No kernel uses atomics: every value is summed by one program in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_bwd
from moe_runtime.kernels.grouped_gemm.kernel import tile_of_program, tile_product


@triton.jit
def grouped_gemm_dact(
    dout_ptr,
    weight_ptr,
    pre_ptr,
    scale_ptr,
    order_ptr,
    slots_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    dpre_ptr,
    hidden_ptr,
    dscale_ptr,
    num_tiles_m,
    num_rows,
    dim_n,
    dim_k,
    stride_gr,
    stride_gk,
    stride_ws,
    stride_wn,
    stride_wk,
    stride_zr,
    stride_dzr,
    stride_hr,
    alpha,
    limit,
    up_offset,
    gate_softcap,
    up_softcap,
    IS_GATED: tl.constexpr,
    FUNCTION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_GATE_SOFTCAP: tl.constexpr,
    HAS_UP_SOFTCAP: tl.constexpr,
    CLAMPS_AFTER: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    GATHER_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    STORES_HIDDEN: tl.constexpr,
    STORES_DSCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Gradient of the pre-activations, from that of the layer's output.

    With `d[r] = dout[row r reads] @ weight[slot]` (`weight` is the down projection, N its hidden
    and K its model dimension), the hidden values `h` recomputed from the pre-activations, and the
    gate weight `s` of the row: `dpre = s * d * activation'(pre)`, `hidden = s * h` for the gradient
    of the down projection, and `<d, h>` over the tile's columns, one value a row and column tile,
    whose sum is the gradient of `s`.
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
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.minimum(offs_n, dim_n - 1).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    weight_ptr += slot * stride_ws
    dhidden = tile_product(
        dout_ptr + dout_rows[:, None] * stride_gr + offs_k[None, :] * stride_gk,
        weight_ptr + (columns * stride_wn)[None, :] + offs_k[:, None] * stride_wk,
        dim_k,
        stride_gk,
        stride_wk,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        PRECISION,
    )

    scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + slots_of_rows).to(tl.float32)
    mask = mask_r[:, None] & (offs_n < dim_n)[None, :]
    pre_ptrs = pre_ptr + rows[:, None] * stride_zr
    dpre_ptrs = dpre_ptr + rows[:, None] * stride_dzr
    if IS_GATED:
        offs_z = tile_n * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        mask_z = mask_r[:, None] & (offs_z < 2 * dim_n)[None, :]
        if IS_INTERLEAVED:
            both = tl.load(pre_ptrs + offs_z[None, :], mask=mask_z, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
        else:
            gate = tl.load(pre_ptrs + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(pre_ptrs + dim_n + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        hidden, dgate, dup = gate_bwd(
            dhidden * scale[:, None],
            gate,
            up,
            alpha,
            limit,
            up_offset,
            gate_softcap,
            up_softcap,
            FUNCTION,
            HAS_LIMIT,
            HAS_GATE_SOFTCAP,
            HAS_UP_SOFTCAP,
            CLAMPS_AFTER,
        )
        if IS_INTERLEAVED:
            both = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * BLOCK_N))
            tl.store(dpre_ptrs + offs_z[None, :], both, mask=mask_z)
        else:
            tl.store(dpre_ptrs + offs_n[None, :], dgate, mask=mask)
            tl.store(dpre_ptrs + dim_n + offs_n[None, :], dup, mask=mask)
    else:
        pre = tl.load(pre_ptrs + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        hidden, slope = activate(pre, alpha, gate_softcap, FUNCTION, HAS_GATE_SOFTCAP)
        dpre = dhidden * scale[:, None] * slope
        tl.store(dpre_ptrs + offs_n[None, :], dpre, mask=mask)
    if STORES_HIDDEN:
        hidden_ptrs = hidden_ptr + rows[:, None] * stride_hr + offs_n[None, :]
        tl.store(hidden_ptrs, hidden * scale[:, None], mask=mask)
    if STORES_DSCALE:
        # Columns past the end repeat the last one and must not be counted again.
        product = tl.where((offs_n < dim_n)[None, :], dhidden * hidden, 0.0)
        place = tile_n.to(tl.int64) * num_rows + rows
        tl.store(dscale_ptr + place, tl.sum(product, axis=1), mask=mask_r)


@triton.jit
def dscale_sum(
    partial_ptr,
    dout_ptr,
    bias_ptr,
    order_ptr,
    slots_ptr,
    offsets_ptr,
    dscale_ptr,
    num_partials,
    num_rows,
    num_experts,
    dim,
    stride_gr,
    stride_gk,
    stride_bs,
    stride_bn,
    GATHER_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of one row's gate weight: its partial sums, and what the down bias adds.

    Rows without an expert, or whose expert has no slot, get zero.
    """
    row = tl.program_id(0).to(tl.int64)
    slot_of_row = tl.load(order_ptr + row)
    offs_e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + 1 + offs_e, mask=offs_e < num_experts, other=0)
    expert = tl.sum(((ends <= row) & (offs_e < num_experts)).to(tl.int64), axis=0)
    slot = tl.where(expert < num_experts, expert, -1)
    if HAS_SLOTS:
        known = tl.minimum(expert, num_experts - 1)
        slot = tl.where(slot < 0, -1, tl.load(slots_ptr + known).to(tl.int64))
    total = tl.zeros([], dtype=tl.float32)
    if slot >= 0:
        for i in range(num_partials):
            total += tl.load(partial_ptr + tl.cast(i, tl.int64) * num_rows + row)
        if HAS_BIAS:
            dot = tl.zeros([BLOCK_D], dtype=tl.float32)
            dout_row = slot_of_row // GATHER_DIVISOR
            for first in range(0, dim, BLOCK_D):
                offs_d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
                mask = offs_d < dim
                dout_ptrs = dout_ptr + dout_row * stride_gr + offs_d * stride_gk
                dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
                bias_ptrs = bias_ptr + slot * stride_bs + offs_d * stride_bn
                dot += dout * tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(dot, axis=0)
    tl.store(dscale_ptr + slot_of_row, total)


@triton.jit
def grouped_gemm_dw(
    left_ptr,
    right_ptr,
    order_ptr,
    slots_ptr,
    offsets_ptr,
    dw_ptr,
    dim_n,
    dim_k,
    stride_lr,
    stride_ln,
    stride_rr,
    stride_rk,
    stride_ws,
    stride_wn,
    stride_wk,
    LEFT_DIVISOR: tl.constexpr,
    RIGHT_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """`dw[slot, n, k] = sum over the expert's rows of left[r, n] * right[r, k]`, or added to it.

    An expert without rows gets zeros from the same loop, run no times; nobody fills the tensor
    beforehand. Divisors are as in `grouped_gemm_fwd`, one for each side.
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
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    columns_n = tl.minimum(offs_n, dim_n - 1).to(tl.int64) * stride_ln
    columns_k = tl.minimum(offs_k, dim_k - 1).to(tl.int64) * stride_rk
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in range(first_row, end_row, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        mask = (rows < end_row)[:, None]
        left_rows = rows
        right_rows = rows
        if LEFT_DIVISOR > 0:
            left_rows = tl.load(order_ptr + rows, mask=rows < end_row, other=0) // LEFT_DIVISOR
        if RIGHT_DIVISOR > 0:
            right_rows = tl.load(order_ptr + rows, mask=rows < end_row, other=0) // RIGHT_DIVISOR
        left_ptrs = left_ptr + left_rows[:, None] * stride_lr + columns_n[None, :]
        right_ptrs = right_ptr + right_rows[:, None] * stride_rr + columns_k[None, :]
        left = tl.load(left_ptrs, mask=mask, other=0.0)
        right = tl.load(right_ptrs, mask=mask, other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
    dw_ptrs = dw_ptr + slot * stride_ws + (offs_n.to(tl.int64) * stride_wn)[:, None]
    dw_ptrs += (offs_k.to(tl.int64) * stride_wk)[None, :]
    mask = (offs_n < dim_n)[:, None] & (offs_k < dim_k)[None, :]
    if ACCUMULATES:
        acc += tl.load(dw_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dw_ptrs, acc, mask=mask)


@triton.jit
def group_sum(
    x_ptr,
    scale_ptr,
    order_ptr,
    slots_ptr,
    offsets_ptr,
    sum_ptr,
    dim,
    stride_xr,
    stride_xn,
    stride_ss,
    GATHER_DIVISOR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`sum[slot] = sum over the expert's rows of scale * x[row r reads]`: a bias gradient."""
    expert = tl.program_id(1)
    slot = expert.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + expert).to(tl.int64)
        if slot < 0:
            return
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
