"""Products with quantised weights for the Triton kernels: codes are decoded in registers.

The `WeightFormat` is one constexpr, `FORMAT`, so that each format is compiled to its own few
instructions. A code, less its zero point, is exact in bf16, fp16 and fp32. Where the scale is a
power of two or in fp8, and the product with it still exact (MXFP4, NVFP4), the decoded tile is
multiplied by it; elsewhere a group's partial sum is, in fp32, and by a global scale all of a sum.
So no weight is rounded.

Names: `N` rows of the weights, `K` the summed dimension.
"""

# pyright: reportAttributeAccessIssue=false
# Triton reads attributes of a constexpr from its value, which the type checker does not know of.

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.block_kernel import block_step

# Bits of codes, put where fp32 has its exponent and mantissa, are numbers this much too small.
_E2M1_UNIT = tl.constexpr(2.0**126)
_E4M3_UNIT = tl.constexpr(2.0**120)
# Sign, exponent and mantissa there, as int32.
_E2M1_MASK = tl.constexpr(0x81C00000 - 2**32)
_E4M3_MASK = tl.constexpr(0x87F00000 - 2**32)
# 2 ** 23, whose lowest bits count ones: an integer below it is or-ed in and the rest subtracted.
_INTEGER_BITS = tl.constexpr(0x4B000000)
_INTEGER_UNIT = tl.constexpr(2.0**23)


@triton.jit
def _e4m3(code):
    """fp32 of fp8 bits; exact, subnormal numbers too."""
    # an arithmetic shift leaves the sign in its place
    bits = ((code.to(tl.int32, bitcast=True) << 24) >> 4) & _E4M3_MASK
    value = bits.to(tl.float32, bitcast=True) * _E4M3_UNIT
    # what the largest code would be
    return tl.where(tl.abs(value) == 480.0, float("nan"), value)


@triton.jit
def _number(code, zero, FORMAT: tl.constexpr):
    """fp32 of codes `uint32`, less `zero` if they are integers; exact."""
    if FORMAT.codes == "e2m1":
        bits = ((code.to(tl.int32, bitcast=True) << 28) >> 6) & _E2M1_MASK
        value = bits.to(tl.float32, bitcast=True) * _E2M1_UNIT
    elif FORMAT.codes == "e4m3":
        value = _e4m3(code)
    elif FORMAT.codes == "int8":
        bits = (code ^ 128) | _INTEGER_BITS
        value = bits.to(tl.float32, bitcast=True) - (_INTEGER_UNIT + 128)
    else:
        bits = code | _INTEGER_BITS
        value = bits.to(tl.float32, bitcast=True) - (_INTEGER_UNIT + zero)
    return value


@triton.jit
def _scale(loaded, FORMAT: tl.constexpr):
    """fp32 of scales as they are stored; exact."""
    if FORMAT.scales == "e8m0":
        exponent = loaded.to(tl.uint32)
        # 2 ** -127 is subnormal; the largest exponent is NaN and not infinity
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
        value = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    elif FORMAT.scales == "e4m3":
        value = _e4m3(loaded.to(tl.uint32))
    else:
        value = loaded.to(tl.float32)
    return value


@triton.jit
def row_of_scales(rows, FORMAT: tl.constexpr):
    """Row of the scales that belongs to each row of the weights."""
    if FORMAT.group_rows == 0:
        found = rows * 0
    elif FORMAT.group_rows == 1:
        found = rows
    else:
        found = rows // FORMAT.group_rows
    return found


@triton.jit
def times_global(acc, ptrs, FORMAT: tl.constexpr):
    """Sums multiplied or divided by the global scale of their weights, rounded once.

    Args:
        acc: fp32 `[M, N]`.
        ptrs: Where the scale is: of all columns, or `[N]`.
        FORMAT: Says which.
    """
    factor = tl.load(ptrs) + tl.zeros_like(acc)
    return tl.div_rn(acc, factor) if FORMAT.global_scale == "divide" else acc * factor


@triton.jit
def _row_step(
    acc, x, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
    FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`acc + x @ w.T` for columns `first_k` to `first_k + BLOCK_K` of the weights.

    Args:
        acc: fp32 `[M, BLOCK_N]`.
        x: `[M, BLOCK_K]`, zero past the last column.
        codes_ptrs: `[BLOCK_N]`: where each row of codes begins.
        scales_ptrs: Where the row of its scales does.
        zeros_ptrs: Where the row of its zero points does; anything where there are none.
        mask_n: Rows that exist.
        first_k: A multiple of BLOCK_K.
        dim_k: K.
        SCALES_TILE: Whether decoded values are multiplied by their scales. Otherwise the product
            is, and all columns of a step share a scale.
    """
    PER_BYTE: tl.constexpr = 8 // FORMAT.bits
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE
    GROUP: tl.constexpr = FORMAT.group_cols
    bytes_k = first_k // PER_BYTE + tl.arange(0, BYTES)
    ptrs = codes_ptrs[:, None] + bytes_k[None, :]
    if EVEN_K and EVEN_N:
        codes = tl.load(ptrs)
    else:
        # the last byte of a row may hold one code
        mask = mask_n[:, None] & (bytes_k * PER_BYTE < dim_k)[None, :]
        codes = tl.load(ptrs, mask=mask, other=0)
    codes = codes.to(tl.uint32)
    if PER_BYTE == 2:
        # the low bits have the smaller column
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (BLOCK_N, BLOCK_K))
    group = first_k // GROUP if GROUP > 0 else first_k * 0
    zero = FORMAT.zero * 1.0
    if FORMAT.has_zero_points:
        zero = tl.load(zeros_ptrs + group, mask=mask_n, other=0).to(tl.float32)[:, None]
    weight = _number(codes, zero, FORMAT)
    if SCALES_TILE:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        groups = group + tl.arange(0, GROUPS)
        ptrs = scales_ptrs[:, None] + groups[None, :]
        if EVEN_K and EVEN_N:
            scales = tl.load(ptrs)
        else:
            mask = mask_n[:, None] & (groups * GROUP < dim_k)[None, :]
            scales = tl.load(ptrs, mask=mask, other=0)
        scales = tl.broadcast_to(_scale(scales, FORMAT)[:, :, None], (BLOCK_N, GROUPS, GROUP))
        weight = (weight * tl.reshape(scales, (BLOCK_N, BLOCK_K))).to(x.dtype)
        return tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    scale = _scale(tl.load(scales_ptrs + group, mask=mask_n, other=0), FORMAT)
    part = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION)
    return acc + part * scale[None, :]


@triton.jit
def packed_step(
    acc, x, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
    FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_row_step`, of weights in blocks too."""
    if FORMAT.block_codes > 0:
        acc = block_step(acc, x, codes_ptrs, mask_n, first_k, FORMAT, EVEN_N, PRECISION, BLOCK_N)
    else:
        acc = _row_step(
            acc, x, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
            FORMAT, SCALES_TILE, EVEN_N, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def packed_product(
    acc, x_ptrs, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, dim_k, stride_xk,
    FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds sums over K to `acc`, fp32 `[BLOCK_M, BLOCK_N]`. Every row of x must exist."""
    offs_k = tl.arange(0, BLOCK_K)
    step_x = tl.full([], BLOCK_K, dtype=tl.int64) * stride_xk
    for first_k in range(0, dim_k, BLOCK_K):
        mask_k = offs_k < dim_k - first_k
        x = tl.load(x_ptrs) if EVEN_K else tl.load(x_ptrs, mask=mask_k[None, :], other=0.0)
        acc = packed_step(
            acc, x, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
            FORMAT, SCALES_TILE, EVEN_N, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        x_ptrs += step_x
    return acc
