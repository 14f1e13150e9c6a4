"""Triton kernels for a few tokens, where reading the active experts' weights takes all the time.

Nothing is sorted. A program belongs to one slot and some columns. It works only if its slot is the
first to name its expert, and then for all tokens that chose it. At most BLOCK_T tokens fit in one
tile, in token order, so each expert's weights are read once.

IS_CHAINED: each kernel starts while the one before it runs, and waits for it before it reads its
results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_fwd
from moe_runtime.kernels.grouped_gemm.packed_kernel import packed_step, row_of_scales, times_global
from moe_runtime.kernels.grouped_gemm.packed_row_kernel import packed_rows

# pyright: reportArgumentType=false
# Triton makes a constexpr of a number, which the type checker does not know of.


@triton.jit
def users(
    ids_ptr, slots_ptr,
    num_tokens, num_experts,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`(slot, leads, choice_T)`: the slot of this program's expert (negative: none), whether this
    program is the first for it, and each token's first choice of it (NUM_CHOICES: none).
    """
    own = tl.program_id(0)
    expert = tl.load(ids_ptr + own).to(tl.int64)
    is_real = (expert >= 0) & (expert < num_experts)
    slot = tl.where(is_real, expert, -1)
    if HAS_SLOTS:
        known = tl.where(is_real, expert, 0)
        slot = tl.where(is_real, tl.load(slots_ptr + known).to(tl.int64), -1)
    offs_t = tl.arange(0, BLOCK_T)
    offs_c = tl.arange(0, BLOCK_C)
    places = offs_t[:, None] * NUM_CHOICES + offs_c[None, :]
    mask = (offs_t < num_tokens)[:, None] & (offs_c < NUM_CHOICES)[None, :]
    ids = tl.load(ids_ptr + places, mask=mask, other=-1).to(tl.int64)
    named = mask & (ids == expert)
    choice_T = tl.min(tl.where(named, offs_c[None, :], NUM_CHOICES), axis=1)
    first = tl.min(tl.min(tl.where(named, places, BLOCK_T * NUM_CHOICES), axis=1), axis=0)
    return slot, first == own, choice_T


@triton.jit(do_not_specialize=["num_tokens"])
def decode_up(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, ids_ptr, slots_ptr, scales_ptr, zeros_ptr,
    global_ptr, num_tokens, num_experts, dim_n, dim_k,
    stride_xt, stride_xk, stride_ws, stride_wn, stride_wk, stride_w_up,
    stride_ss, stride_sn, stride_s_up, stride_zs, stride_zn, stride_z_up, stride_gs, stride_g_up,
    stride_bs, stride_bn, stride_b_up, stride_hr,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, NUM_CHOICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
    SCALES_TILE: tl.constexpr, HAS_GLOBAL: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`hidden[slot of (t, expert)] = activation(x[t] @ weight.T + bias)`; N: hidden columns.

    With FORMAT, weights are codes, addressed in bytes, with scales and zero points.
    """
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        # not before: `decode_down` reads ids without a wait
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
    slot, leads, choice_T = users(
        ids_ptr, slots_ptr, num_tokens, num_experts, NUM_CHOICES, HAS_SLOTS, BLOCK_T, BLOCK_C
    )
    if (slot < 0) | (leads == 0):
        return
    offs_t = tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = choice_T < NUM_CHOICES
    mask_n = offs_n < dim_n
    x_ptrs = x_ptr + offs_t.to(tl.int64)[:, None] * stride_xt
    weight_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64) * stride_wn
    if FORMAT is not None:
        groups = row_of_scales(offs_n, FORMAT).to(tl.int64)
        scales_ptrs = scales_ptr + slot * stride_ss + groups * stride_sn
        zeros_ptrs = zeros_ptr + slot * stride_zs + groups * stride_zn
    gate = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for first_k in range(0, dim_k, BLOCK_K):
        k = first_k + offs_k
        mask_x = mask_t[:, None] & (k < dim_k)[None, :]
        x = tl.load(x_ptrs + k.to(tl.int64)[None, :] * stride_xk, mask=mask_x, other=0.0)
        if FORMAT is not None:
            if IS_GATED:
                gate = packed_step(
                    gate, x, weight_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
                    FORMAT, SCALES_TILE, EVEN_N, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            # without a gate, up is at no distance
            up = packed_step(
                up, x, weight_ptrs + stride_w_up, scales_ptrs + stride_s_up,
                zeros_ptrs + stride_z_up, mask_n, first_k, dim_k,
                FORMAT, SCALES_TILE, EVEN_N, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            mask_w = (k < dim_k)[:, None] & mask_n[None, :]
            ptrs = weight_ptrs[None, :] + k.to(tl.int64)[:, None] * stride_wk
            if IS_GATED:
                weight = tl.load(ptrs, mask=mask_w, other=0.0)
                gate = tl.dot(x, weight, gate, input_precision=PRECISION)
                ptrs += stride_w_up
            weight = tl.load(ptrs, mask=mask_w, other=0.0)
            up = tl.dot(x, weight, up, input_precision=PRECISION)
    if HAS_GLOBAL:
        ptr = global_ptr + slot * stride_gs
        if IS_GATED:
            gate = times_global(gate, ptr, FORMAT)
        up = times_global(up, ptr + stride_g_up, FORMAT)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n.to(tl.int64) * stride_bn
        if IS_GATED:
            gate += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
            bias_ptrs += stride_b_up
        up += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        hidden = gate_fwd(gate, up, ACTIVATION)
    else:
        hidden, _ = activate(up, ACTIVATION)
    rows = (offs_t * NUM_CHOICES + choice_T).to(tl.int64)
    ptrs = hidden_ptr + rows[:, None] * stride_hr + offs_n[None, :]
    tl.store(ptrs, hidden, mask=mask_t[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def decode_down(
    hidden_ptr, weight_ptr, bias_ptr, partial_ptr, ids_ptr, slots_ptr, scales_ptr, zeros_ptr,
    global_ptr, num_tokens, num_experts, dim_n, dim_k, split_k,
    stride_hr, stride_ws, stride_wn, stride_wk, stride_ss, stride_sn, stride_s_up, stride_zs,
    stride_zn, stride_z_up, stride_gs, stride_g_up, stride_bs, stride_bn, stride_ps, stride_pr,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`partial[part, slot of (t, expert)]`: the down product over one part of the hidden columns.

    Part p sums `split_k` columns, a multiple of BLOCK_K; the first part adds the bias.
    """
    slot, leads, choice_T = users(
        ids_ptr, slots_ptr, num_tokens, num_experts, NUM_CHOICES, HAS_SLOTS, BLOCK_T, BLOCK_C
    )
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    if (slot < 0) | (leads == 0):
        return
    part = tl.program_id(2)
    offs_t = tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = choice_T < NUM_CHOICES
    mask_n = offs_n < dim_n
    rows = (offs_t * NUM_CHOICES + choice_T).to(tl.int64)
    hidden_ptrs = hidden_ptr + rows[:, None] * stride_hr
    weight_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64) * stride_wn
    if FORMAT is not None:
        groups = row_of_scales(offs_n, FORMAT).to(tl.int64)
        scales_ptrs = scales_ptr + slot * stride_ss + groups * stride_sn
        zeros_ptrs = zeros_ptr + slot * stride_zs + groups * stride_zn
    acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    end_k = tl.minimum(dim_k, (part + 1) * split_k)
    for first_k in range(part * split_k, end_k, BLOCK_K):
        k = first_k + offs_k
        mask_h = mask_t[:, None] & (k < end_k)[None, :]
        hidden = tl.load(hidden_ptrs + k[None, :], mask=mask_h, other=0.0)
        if FORMAT is not None:
            acc = packed_step(
                acc, hidden, weight_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
                FORMAT, SCALES_TILE, EVEN_N, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            mask_w = (k < end_k)[:, None] & mask_n[None, :]
            ptrs = weight_ptrs[None, :] + k.to(tl.int64)[:, None] * stride_wk
            weight = tl.load(ptrs, mask=mask_w, other=0.0)
            acc = tl.dot(hidden, weight, acc, input_precision=PRECISION)
    if HAS_GLOBAL:
        acc = times_global(acc, global_ptr + slot * stride_gs, FORMAT)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n.to(tl.int64) * stride_bn
        bias = tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
        acc += tl.where(part == 0, bias, 0.0)[None, :]
    ptrs = partial_ptr + part.to(tl.int64) * stride_ps + rows[:, None] * stride_pr
    tl.store(ptrs + offs_n[None, :], acc, mask=mask_t[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def decode_combine(
    partial_ptr, weights_ptr, ids_ptr, slots_ptr, out_ptr,
    num_experts, num_parts, dim,
    stride_ps, stride_pr, stride_wt, stride_wk, stride_ot,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, IS_ONE_PART: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`out[t]`: sums the parts of every choice, then the choices by gate weight, in order."""
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_c = tl.arange(0, BLOCK_C)
    ids_ptrs = ids_ptr + token * NUM_CHOICES
    mask_c = offs_c < NUM_CHOICES
    ids = tl.load(ids_ptrs + offs_c, mask=mask_c, other=-1).to(tl.int64)
    is_real = mask_c & (ids >= 0) & (ids < num_experts)
    if HAS_SLOTS:
        slots = tl.load(slots_ptr + tl.where(is_real, ids, 0), mask=is_real, other=-1)
        is_real = is_real & (slots >= 0)
    weights_ptrs = weights_ptr + token * stride_wt + offs_c * stride_wk
    weights = tl.load(weights_ptrs, mask=is_real, other=0.0).to(tl.float32)
    # a token that names an expert twice has one row for it, at the first of the two choices
    ids_again = tl.load(ids_ptrs + offs_c, mask=mask_c, other=-1).to(tl.int64)
    is_same = ids[:, None] == ids_again[None, :]
    rows = tl.min(tl.where(is_same, offs_c[None, :], NUM_CHOICES), axis=1)
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for c in tl.range(NUM_CHOICES, loop_unroll_factor=8):  # type: ignore[attr-defined]
        is_c = is_real & (offs_c == c)
        choice = tl.sum(tl.where(is_c, rows, 0), axis=0)
        mask = offs_d < tl.max(tl.where(is_c, dim, 0), axis=0)
        ptrs = partial_ptr + (token * NUM_CHOICES + choice) * stride_pr + offs_d
        row = tl.load(ptrs, mask=mask, other=0.0)
        if not IS_ONE_PART:
            for part in range(1, num_parts):
                row += tl.load(ptrs + tl.cast(part, tl.int64) * stride_ps, mask=mask, other=0.0)
        acc += tl.sum(tl.where(is_c, weights, 0.0), axis=0) * row
    tl.store(out_ptr + token * stride_ot + offs_d, acc, mask=offs_d < dim)


@triton.jit
def _tile(ptrs, first_k, mask_n, dim_k, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights `[n, k]` of a step, in fp32."""
    if EVEN_K:
        weight = tl.load(ptrs + first_k, mask=mask_n[:, None], other=0.0)
    else:
        mask_k = first_k + tl.arange(0, BLOCK_K) < dim_k
        weight = tl.load(ptrs + first_k, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
    return weight.to(tl.float32)


@triton.jit
def _row(ptr, first_k, dim_k, BLOCK_K: tl.constexpr):
    """Values `[1, k]` of the multiplied row, in fp32."""
    k = first_k + tl.arange(0, BLOCK_K)
    return tl.load(ptr + k, mask=k < dim_k, other=0.0).to(tl.float32)[None, :]


@triton.jit
def decode_up_row(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, ids_ptr, slots_ptr, scales_ptr, zeros_ptr, global_ptr,
    num_experts, dim_n, dim_k, stride_ws, stride_wn, stride_w_up,
    stride_ss, stride_sn, stride_s_up, stride_zs, stride_zn, stride_z_up, stride_gs, stride_g_up,
    stride_bs, stride_bn, stride_b_up,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, NUM_CHOICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr, CASTS: tl.constexpr, HAS_GLOBAL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = activation(x @ weight[slot of its expert].T + bias)`; FORMAT as in
    `decode_up`.
    """
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        # not before: `decode_down_row` reads ids without a wait
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
    slot, leads, _ = users(
        ids_ptr, slots_ptr, 1, num_experts, NUM_CHOICES, HAS_SLOTS, BLOCK_T, BLOCK_C
    )
    if (slot < 0) | (leads == 0):
        return
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < dim_n
    if FORMAT is None:
        weight_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * stride_wn
        weight_ptrs += tl.arange(0, BLOCK_K)[None, :]
        gates = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for first_k in range(0, dim_k, BLOCK_K):
            up = _tile(weight_ptrs + stride_w_up, first_k, mask_n, dim_k, EVEN_K, BLOCK_K)
            if IS_GATED:
                gate = _tile(weight_ptrs, first_k, mask_n, dim_k, EVEN_K, BLOCK_K)
            x = _row(x_ptr, first_k, dim_k, BLOCK_K)
            ups += up * x
            if IS_GATED:
                gates += gate * x  # pyright: ignore[reportPossiblyUnboundVariable]
        gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    else:
        codes_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64) * stride_wn
        gate, up = packed_rows(
            x_ptr, codes_ptrs, scales_ptr + slot * stride_ss, zeros_ptr + slot * stride_zs,
            global_ptr + slot * stride_gs, tl.program_id(1) * BLOCK_N, offs_n, mask_n, dim_k,
            stride_w_up, stride_sn, stride_s_up, stride_zn, stride_z_up, stride_g_up,
            IS_GATED, FORMAT, CASTS, HAS_GLOBAL, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HAS_BIAS:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n.to(tl.int64) * stride_bn
        if IS_GATED:
            gate += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
            bias_ptrs += stride_b_up
        up += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    if IS_GATED:
        hidden = gate_fwd(gate, up, ACTIVATION)
    else:
        hidden, _ = activate(up, ACTIVATION)
    row_ptr = hidden_ptr + tl.program_id(0).to(tl.int64) * dim_n
    tl.store(row_ptr + offs_n, hidden, mask=mask_n)


@triton.jit
def decode_down_row(
    hidden_ptr, weight_ptr, bias_ptr, partial_ptr, ids_ptr, slots_ptr, scales_ptr, zeros_ptr,
    global_ptr, num_experts, dim_n, dim_k, stride_ws, stride_wn,
    stride_ss, stride_sn, stride_s_up, stride_zs, stride_zn, stride_z_up, stride_gs, stride_g_up,
    stride_bs, stride_bn,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, FORMAT: tl.constexpr, CASTS: tl.constexpr,
    HAS_GLOBAL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`partial[choice] = hidden[choice] @ weight[slot of its expert].T + bias`."""
    slot, leads, _ = users(
        ids_ptr, slots_ptr, 1, num_experts, NUM_CHOICES, HAS_SLOTS, BLOCK_T, BLOCK_C
    )
    is_used = (slot >= 0) & leads
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < tl.where(is_used, dim_n, 0)
    row_ptr = hidden_ptr + tl.program_id(0).to(tl.int64) * dim_k
    if FORMAT is None:
        weight_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * stride_wn
        weight_ptrs += tl.arange(0, BLOCK_K)[None, :]
        # loads while hidden values are computed
        weight = _tile(weight_ptrs, 0, mask_n, dim_k, EVEN_K, BLOCK_K)
        if IS_CHAINED:
            tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        products = weight * _row(row_ptr, 0, tl.where(is_used, dim_k, 0), BLOCK_K)
        for first_k in range(BLOCK_K, dim_k, BLOCK_K):
            weight = _tile(weight_ptrs, first_k, mask_n, dim_k, EVEN_K, BLOCK_K)
            products += weight * _row(row_ptr, first_k, dim_k, BLOCK_K)
        sums = tl.sum(products, axis=1)
    else:
        if IS_CHAINED:
            tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        if is_used == 0:
            return
        codes_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64) * stride_wn
        _, sums = packed_rows(
            row_ptr, codes_ptrs, scales_ptr + slot * stride_ss, zeros_ptr + slot * stride_zs,
            global_ptr + slot * stride_gs, tl.program_id(1) * BLOCK_N, offs_n, mask_n,
            dim_k, 0, stride_sn, 0, stride_zn, 0, 0,
            False, FORMAT, CASTS, HAS_GLOBAL, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HAS_BIAS:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n.to(tl.int64) * stride_bn
        sums += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * dim_n
    tl.store(out_ptr + offs_n, sums, mask=mask_n)
