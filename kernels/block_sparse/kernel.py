"""Triton kernels of the block-sparse products, and their launchers.

Strips may be short: rows and columns past their end are stored as zeros, and never read from or
written to dense matrices. No atomics: one program sums a value in one order. Addresses are 64-bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather
from moe_runtime.kernels.grouped_gemm.forward import precision_of
from moe_runtime.kernels.grouped_gemm.kernel import tile_of_program, tile_product
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, Tile, describe_device
from moe_runtime.kernels.triton_support import cdiv, launch

_GROUP_M = 8


@triton.jit
def block_sparse_sdd(
    a_ptr, b_ptr, values_ptr, order_ptr, launch_order_ptr, row_of_block_ptr, row_first_ptr,
    row_end_ptr, column_first_ptr, column_end_ptr,
    dim_k,
    stride_am, stride_ak, stride_bk, stride_bn,
    GATHER_DIVISOR: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`values[block] = a[rows of the block] @ b[:, its columns]`; zeros past the ends of strips.

    GATHER_DIVISOR is 0 for row r of `a`, else the row is `order[r] // GATHER_DIVISOR`.
    """
    block = tl.load(launch_order_ptr + tl.program_id(0)).to(tl.int64)
    strip = tl.load(row_of_block_ptr + block)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    # a block of no strip sums over nothing and stores zeros
    dim_k = tl.where(strip < 0, 0, dim_k)
    strip = tl.maximum(strip, 0)
    row_end = tl.load(row_end_ptr + strip)
    rows = tl.load(row_first_ptr + strip) + offs_m
    mask_m = (rows < row_end) & (dim_k > 0)
    # rows past the end repeat the last one: loads need no mask
    rows = tl.maximum(tl.minimum(rows, row_end - 1), 0)
    if GATHER_DIVISOR > 0:
        rows = tl.load(order_ptr + rows) // GATHER_DIVISOR
    columns = tl.load(column_first_ptr + block) + offs_n
    mask_n = columns < tl.load(column_end_ptr + block)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tile_product(
        tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32),
        a_ptr + rows[:, None] * stride_am + offs_k[None, :] * stride_ak,
        b_ptr + columns[None, :] * stride_bn + offs_k[:, None] * stride_bk,
        mask_n,
        dim_k,
        stride_ak,
        stride_bk,
        BLOCK_K,
        EVEN_N,
        EVEN_K,
        PRECISION,
    )
    ptrs = values_ptr + block * (BLOCK_M * BLOCK_N) + offs_m[:, None] * BLOCK_N + offs_n[None, :]
    tl.store(ptrs, tl.where(mask_m[:, None] & mask_n[None, :], acc, 0.0))


@triton.jit
def _place(block_ptr, first_ptr, end_ptr, place, end_place, IS_TRANSPOSED: tl.constexpr):
    """The block at a place of a strip's list, and its first and last row (column) across."""
    mask = place < end_place
    block = tl.cast(place, tl.int64)
    if IS_TRANSPOSED:
        block = tl.load(block_ptr + place, mask=mask, other=0).to(tl.int64)
    first = tl.load(first_ptr + place, mask=mask, other=0)
    return block, first, tl.load(end_ptr + place, mask=mask, other=0)


@triton.jit(do_not_specialize=["num_strips"])
def block_sparse_dsd(
    values_ptr, b_ptr, out_ptr, order_ptr, offsets_ptr, block_ptr, own_first_ptr, own_end_ptr,
    first_across_ptr, end_across_ptr,
    num_strips, dim_n,
    stride_vo, stride_va, stride_bk, stride_bn, stride_om, stride_on,
    IS_TRANSPOSED: tl.constexpr, IS_FULL_ACROSS: tl.constexpr, GATHER_DIVISOR: tl.constexpr,
    EVEN_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK_OWN: tl.constexpr,
    BLOCK_ACROSS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """`out[own strip] = sum over its blocks of values[block] @ b[strip across]`.

    Own strips are those of rows, or of columns of a transposed matrix, whose values are then
    contiguous along the own side. A strip without blocks gets zeros from the same loop.
    GATHER_DIVISOR as in `block_sparse_sdd`, for the rows of `b`.
    """
    STEPS: tl.constexpr = BLOCK_ACROSS // BLOCK_K
    strip, tile_n = tile_of_program(num_strips, tl.cdiv(dim_n, BLOCK_N), GROUP_M)
    first_place = tl.load(offsets_ptr + strip)
    end_place = tl.load(offsets_ptr + strip + 1)
    offs_m = tl.arange(0, BLOCK_OWN)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < dim_n)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    columns = offs_n.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros([BLOCK_OWN, BLOCK_N], dtype=tl.float32)
    # the next block's place is loaded one step ahead, so that no load waits for another
    block, first, end = _place(
        block_ptr, first_across_ptr, end_across_ptr, first_place, end_place, IS_TRANSPOSED
    )
    for step in range(first_place * STEPS, end_place * STEPS):
        across = (step % STEPS) * BLOCK_K + offs_k  # pyright: ignore[reportOperatorIssue]
        rows = first + across
        mask_k = rows < end
        block_ptrs = values_ptr + block * (BLOCK_OWN * BLOCK_ACROSS)
        block, first, end = _place(
            block_ptr,
            first_across_ptr,
            end_across_ptr,
            (step + 1) // STEPS,
            end_place,
            IS_TRANSPOSED,
        )
        if GATHER_DIVISOR > 0:
            rows = tl.load(order_ptr + rows, mask=mask_k, other=0) // GATHER_DIVISOR
        mask_b = mask_k[:, None] if EVEN_N else mask_k[:, None] & mask_n
        b = tl.load(b_ptr + rows[:, None] * stride_bk + columns, mask=mask_b, other=0.0)
        # an activation of the zeros past a strip's end may be NaN
        if IS_TRANSPOSED:
            ptrs = block_ptrs + across[:, None] * stride_va + offs_m[None, :] * stride_vo
            values = tl.trans(tl.load(ptrs, mask=mask_k[:, None], other=0.0))
        else:
            ptrs = block_ptrs + offs_m[:, None] * stride_vo + across[None, :] * stride_va
            # chosen after the load: a mask along neighbours would split it into single elements
            values = tl.load(ptrs)
            if not IS_FULL_ACROSS:
                values = tl.where(mask_k[None, :], values, 0.0)
        acc = tl.dot(values, b, acc, input_precision=PRECISION)
    rows = tl.load(own_first_ptr + strip) + offs_m
    mask_m = rows < tl.load(own_end_ptr + strip)
    out_ptrs = out_ptr + rows[:, None] * stride_om + offs_n.to(tl.int64)[None, :] * stride_on
    tl.store(out_ptrs, acc, mask=mask_m[:, None] & mask_n)


def choose_tile(block_m: int, block_n: int, x: Tensor, device: GpuLimits | None = None) -> Tile:
    """The tile of a product: as large as the block, as deep as the shared memory allows."""
    block_k = 32 if x.dtype == torch.float32 else 64
    # at 16 bits sums fill the registers of four warps; at 32, operands need registers too
    num_warps = 8 if block_m * block_n * x.element_size() > 64 * 128 * 2 else 4
    # with three stages two programs of square tiles share a multiprocessor
    tile = Tile(block_m, block_n, block_k, num_warps, 3 if block_m == block_n == 128 else 4)
    return tile.fitted(x.element_size(), device or describe_device(x.device))


def choose_dsd_tile(block_m: int, x: Tensor, device: GpuLimits | None = None) -> Tile:
    """The tile of a product with the sparse matrix on the left.

    Before Hopper operands reach the matrix units through registers, and a transposed block takes
    more of them: fewer columns.
    """
    device = device or describe_device(x.device)
    wide = 256 if block_m == 128 and x.element_size() == 2 else 128
    if device.has_wide_accumulators:
        return choose_tile(block_m, wide, x, device)
    tile = choose_tile(block_m, 64, x, device)
    # results in fp32 pass through shared memory, which desktop cards have little of
    return replace(tile, num_stages=min(tile.num_stages, 12 // x.element_size()))


def _gathering(topology: BlockTopology, gather: Gather | None) -> dict[str, Any]:
    """Kernel arguments for gathered rows; any tensor if rows are read in order."""
    if gather is None:
        return {"order_ptr": topology.launch_order_B, "GATHER_DIVISOR": 0}
    return {"order_ptr": gather.sorted_tokens.order_R, "GATHER_DIVISOR": gather.num_choices}


def launch_sdd(
    a: Tensor,
    b_KN: Tensor,
    topology: BlockTopology,
    gather: Gather | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """The values of `a @ b` in the topology's blocks, `[B, block_rows, block_columns]`.

    `a` is `[R, K]`, or `[T, K]` if rows are gathered.
    """
    values = torch.empty(topology.values_shape, dtype=a.dtype, device=a.device)
    if not values.numel():
        return values
    dim_k = a.shape[1]
    tile = tile or choose_tile(topology.block_rows, topology.block_columns, a)
    launch(
        block_sparse_sdd, (topology.num_blocks,),
        a_ptr=a, b_ptr=b_KN, values_ptr=values,
        **_gathering(topology, gather),
        launch_order_ptr=topology.launch_order_B, row_of_block_ptr=topology.row_of_block_B,
        row_first_ptr=topology.rows.first, row_end_ptr=topology.rows.end,
        column_first_ptr=topology.rows.first_across, column_end_ptr=topology.rows.end_across,
        dim_k=dim_k,
        stride_am=a.stride(0), stride_ak=a.stride(1),
        stride_bk=b_KN.stride(0), stride_bn=b_KN.stride(1),
        EVEN_N=topology.has_full_columns, EVEN_K=dim_k % tile.block_k == 0,
        PRECISION=precision_of(a), BLOCK_M=topology.block_rows, BLOCK_N=topology.block_columns,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return values


def launch_dsd(
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    out: Tensor,
    is_transposed: bool,
    gather: Gather | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`out = s @ b`, or `s.T @ b`, for the sparse matrix `s` of these contiguous values.

    `b` and `out` may have any strides; every element of `out` is written. Rows of `b` are gathered
    only if `is_transposed`.
    """
    own, block_own, block_across = topology.rows, topology.block_rows, topology.block_columns
    if is_transposed:
        own, block_own, block_across = topology.columns, block_across, block_own
    dim_n = b.shape[1]
    if not out.numel():
        return out
    tile = tile or choose_dsd_tile(block_own, values)
    stride_own, stride_across = values.stride(1), values.stride(2)
    if is_transposed:
        stride_own, stride_across = stride_across, stride_own
    launch(
        block_sparse_dsd, (len(own.first) * cdiv(dim_n, tile.block_n),),
        values_ptr=values, b_ptr=b, out_ptr=out,
        **_gathering(topology, gather),
        offsets_ptr=own.offsets, block_ptr=own.offsets if own.block is None else own.block,
        own_first_ptr=own.first, own_end_ptr=own.end, first_across_ptr=own.first_across,
        end_across_ptr=own.end_across,
        num_strips=len(own.first), dim_n=dim_n,
        stride_vo=stride_own, stride_va=stride_across, stride_bk=b.stride(0), stride_bn=b.stride(1),
        stride_om=out.stride(0), stride_on=out.stride(1),
        IS_TRANSPOSED=is_transposed, IS_FULL_ACROSS=topology.has_full_columns and not is_transposed,
        EVEN_N=dim_n % tile.block_n == 0, PRECISION=precision_of(values), BLOCK_OWN=block_own,
        BLOCK_ACROSS=block_across, BLOCK_N=tile.block_n, BLOCK_K=min(tile.block_k, block_across),
        GROUP_M=_GROUP_M,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
