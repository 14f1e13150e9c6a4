"""The products of `decode_kernel` for one token and weights as they are, without matrix units.

With one row an expert they would be idle anyway, and their operands take shared memory that loads
could be on the way in: here every thread multiplies what it has loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.expert_mlp.decode.decode_kernel import users
from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_fwd


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
    """Values `[1, k]` of the row that is multiplied, in fp32."""
    k = first_k + tl.arange(0, BLOCK_K)
    return tl.load(ptr + k, mask=k < dim_k, other=0.0).to(tl.float32)[None, :]


@triton.jit
def decode_up_row(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, ids_ptr, slots_ptr,
    num_experts, dim_n, dim_k, stride_ws, stride_wn, stride_w_up, stride_bs, stride_bn, stride_b_up,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, NUM_CHOICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = activation(x @ weight[slot of its expert].T + bias)`."""
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
    hidden_ptr, weight_ptr, bias_ptr, partial_ptr, ids_ptr, slots_ptr,
    num_experts, dim_n, dim_k, stride_ws, stride_wn, stride_bs, stride_bn,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, IS_CHAINED: tl.constexpr,
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
    weight_ptrs = weight_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * stride_wn
    weight_ptrs += tl.arange(0, BLOCK_K)[None, :]
    # on its way while hidden values are computed
    weight = _tile(weight_ptrs, 0, mask_n, dim_k, EVEN_K, BLOCK_K)
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    row_ptr = hidden_ptr + tl.program_id(0).to(tl.int64) * dim_k
    products = weight * _row(row_ptr, 0, tl.where(is_used, dim_k, 0), BLOCK_K)
    for first_k in range(BLOCK_K, dim_k, BLOCK_K):
        weight = _tile(weight_ptrs, first_k, mask_n, dim_k, EVEN_K, BLOCK_K)
        products += weight * _row(row_ptr, first_k, dim_k, BLOCK_K)
    sums = tl.sum(products, axis=1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n.to(tl.int64) * stride_bn
        sums += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * dim_n
    tl.store(out_ptr + offs_n, sums, mask=mask_n)
