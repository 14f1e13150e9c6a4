"""Products with quantised weights for the Triton kernels: codes are decoded in registers.

The `WeightFormat` is one constexpr, `FORMAT`, so each format compiles to its own few instructions.
A code less its zero point is exact in bf16, fp16 and fp32. If the product with its scale is exact
too (MXFP4, NVFP4), the decoded tile is multiplied by scales; otherwise a group's partial sum is, in
fp32. A global scale multiplies whole sums. So no weight is rounded. ggml's blocks hold codes and
scales (layouts: `quantized/block_reference.py`): a step takes the columns of one scale, 32, of Q6_K
16; minima are multiplied by the sum of the row and subtracted.

Names: `N` rows of the weights, `K` the summed dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false
# Triton reads attributes of a constexpr from its value and makes one of a number, which the type
# checker does not know of.


# factor of e2m1 bits that are moved to the exponent and mantissa of fp32; block values are doubled
_DOUBLED_E2M1_UNIT = tl.constexpr(2.0**127)
_E2M1_MASK = tl.constexpr(0x81C00000 - 2**32)


@triton.jit
def _bytes(ptrs, mask_n, EVEN_N: tl.constexpr, COUNT: tl.constexpr):
    """`uint32 [N, COUNT]` of the bytes at each pointer."""
    every = ptrs[:, None] + tl.arange(0, COUNT)[None, :]
    found = tl.load(every) if EVEN_N else tl.load(every, mask=mask_n[:, None], other=0)
    return found.to(tl.uint32)


@triton.jit
def _byte(ptrs, mask_n):
    return tl.load(ptrs, mask=mask_n, other=0).to(tl.uint32)


@triton.jit
def _half(ptrs, mask_n):
    """fp32 of an fp16 number at any address."""
    bits = _byte(ptrs, mask_n) | (_byte(ptrs + 1, mask_n) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(codes):
    """fp32 of signed bytes."""
    return ((codes ^ 128).to(tl.int32, bitcast=True) - 128).to(tl.float32)


@triton.jit
def _half_runs(codes, BLOCK_N: tl.constexpr):
    """Codes of 16 bytes: all low ones, then all high ones."""
    pairs = tl.permute(tl.join(codes & 15, codes >> 4), (0, 2, 1))
    return tl.reshape(pairs, (BLOCK_N, 32))


@triton.jit
def _exponents(loaded):
    """Half of `2 ** (byte - 127)`; subnormal below 2."""
    bits = tl.where(loaded < 2, 1 << (21 + tl.minimum(loaded, 1)), (loaded - 1) << 23)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _of_32(ptrs, mask_n, FORMAT: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """`(weights [N, 32], scales [N], minima [N])` of blocks of 32."""
    minimum = tl.zeros([BLOCK_N], dtype=tl.float32)
    if FORMAT.codes == "q8_0":
        scale = _half(ptrs, mask_n)
        weight = _signed(_bytes(ptrs + 2, mask_n, EVEN_N, 32))
    elif FORMAT.codes == "q4_0":
        scale = _half(ptrs, mask_n)
        codes = _half_runs(_bytes(ptrs + 2, mask_n, EVEN_N, 16), BLOCK_N)
        weight = codes.to(tl.float32) - 8
    elif FORMAT.codes == "q4_1":
        scale = _half(ptrs, mask_n)
        minimum = -_half(ptrs + 2, mask_n)
        weight = _half_runs(_bytes(ptrs + 4, mask_n, EVEN_N, 16), BLOCK_N).to(tl.float32)
    else:
        tl.static_assert(FORMAT.codes == "mxfp4_block")
        scale = _exponents(_byte(ptrs, mask_n))
        codes = _half_runs(_bytes(ptrs + 1, mask_n, EVEN_N, 16), BLOCK_N)
        bits = ((codes.to(tl.int32, bitcast=True) << 28) >> 6) & _E2M1_MASK
        weight = bits.to(tl.float32, bitcast=True) * _DOUBLED_E2M1_UNIT
    return weight, scale, minimum


@triton.jit
def _of_256(ptrs, mask_n, first, FORMAT: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same of a group in blocks of 256 that begins at column `first` of its block."""
    minimum = tl.zeros([BLOCK_N], dtype=tl.float32)
    if FORMAT.codes == "q6_k":
        half, within = first // 128, first % 128
        low = _bytes(ptrs + half * 64 + within % 64, mask_n, EVEN_N, 16)
        low = (low >> (within // 64 * 4)) & 15
        high = _bytes(ptrs + 128 + half * 32 + within % 32, mask_n, EVEN_N, 16)
        high = (high >> (within // 32 * 2)) & 3
        weight = (low | (high << 4)).to(tl.float32) - 32
        scale = _half(ptrs + 208, mask_n) * _signed(_byte(ptrs + 192 + first // 16, mask_n))
    else:
        tl.static_assert((FORMAT.codes == "q4_k") | (FORMAT.codes == "q5_k"))
        group = first // 32
        # six bits each: the first four groups have bytes of their own, others three parts
        own, other = _byte(ptrs + 4 + group % 4, mask_n), _byte(ptrs + 8 + group % 4, mask_n)
        rest = _byte(ptrs + 12 + group % 4, mask_n)
        factor = tl.where(group < 4, own & 63, (rest & 15) | ((own >> 6) << 4))
        lowest = tl.where(group < 4, other & 63, (rest >> 4) | ((other >> 6) << 4))
        scale = _half(ptrs, mask_n) * factor.to(tl.float32)
        minimum = _half(ptrs + 2, mask_n) * lowest.to(tl.float32)
        CODES: tl.constexpr = 48 if FORMAT.codes == "q5_k" else 16
        codes = _bytes(ptrs + CODES + group // 2 * 32, mask_n, EVEN_N, 32)
        codes = (codes >> (group % 2 * 4)) & 15
        if FORMAT.codes == "q5_k":
            high = _bytes(ptrs + 16, mask_n, EVEN_N, 32)
            codes |= ((high >> group) & 1) << 4
        weight = codes.to(tl.float32)
    return weight, scale, minimum


@triton.jit
def block_step(
    acc, x, row_ptrs, mask_n, first_k,
    FORMAT: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`acc + x @ w.T` for the columns of one scale, from `first_k` on.

    `row_ptrs` `[BLOCK_N]`: where each row of blocks begins.
    """
    SIZE: tl.constexpr = FORMAT.block_codes
    ptrs = row_ptrs + first_k // SIZE * FORMAT.block_bytes
    if SIZE == 32:
        weight, scale, minimum = _of_32(ptrs, mask_n, FORMAT, EVEN_N, BLOCK_N)
    else:
        weight, scale, minimum = _of_256(ptrs, mask_n, first_k % SIZE, FORMAT, EVEN_N, BLOCK_N)
    part = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION)
    part = part * scale[None, :]
    if FORMAT.has_minima:
        part -= tl.sum(x.to(tl.float32), axis=1)[:, None] * minimum[None, :]
    return acc + part


# factors of code bits that are moved to the exponent and mantissa of fp32
_E2M1_UNIT = tl.constexpr(2.0**126)
_E4M3_UNIT = tl.constexpr(2.0**120)
# Sign, exponent and mantissa there, as int32.
_E4M3_MASK = tl.constexpr(0x87F00000 - 2**32)
# 2 ** 23, whose lowest bits count ones: an integer is or-ed in and 2 ** 23 subtracted
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
def scale_values(loaded, FORMAT: tl.constexpr):
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

    `ptrs`: of one scale, or `[N]`.
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
        codes_ptrs: `[BLOCK_N]`: where each row begins, like scales and zero points.
        SCALES_TILE: Decoded values are multiplied by scales; otherwise the product is, and all
            columns of a step share a scale.
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
        scales = tl.broadcast_to(scale_values(scales, FORMAT)[:, :, None], (BLOCK_N, GROUPS, GROUP))
        weight = (weight * tl.reshape(scales, (BLOCK_N, BLOCK_K))).to(x.dtype)
        return tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    scale = scale_values(tl.load(scales_ptrs + group, mask=mask_n, other=0), FORMAT)
    part = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION)
    return acc + part * scale[None, :]


@triton.jit
def packed_step(
    acc, x, codes_ptrs, scales_ptrs, zeros_ptrs, mask_n, first_k, dim_k,
    FORMAT: tl.constexpr, SCALES_TILE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_row_step`, for weights in blocks too."""
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
