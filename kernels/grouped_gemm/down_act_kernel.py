"""The Triton kernel that goes back through the down projection and the activation at once."""

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


@triton.jit
def _preactivations(
    first_column, mask_r, pre_ptr, dim_n, stride_zr, stride_z_up,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gate and up of some columns as they are stored; twice the same where they are not apart."""
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
    of the down projection, and `<d, h>` over the tile's columns, one value a row and column tile,
    whose sum is the gradient of `s`. With ADDS_HIDDEN, what is in `hidden` is added to `d` first.
    WIDTH_MULTIPLE as in `grouped_gemm_fwd`, for N.

    IS_AHEAD: Loads the pre-activations before the product and before what is stored of others,
    which takes registers; otherwise another program on the multiprocessor computes meanwhile.
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
    # Gate, up and what becomes of them would not fit in the registers for a whole tile at once.
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
            # Before what this slice stores, which no load may overtake.
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
