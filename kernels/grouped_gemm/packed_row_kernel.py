"""One row times packed weights for the Triton kernels, without matrix units.

A thread loads 16 bytes of codes at once and decodes two at a time: codes 16 bits apart in a word
become two bf16 numbers by three integer operations, then two fp32 numbers. Bits of fp4 and fp8,
moved to the exponent and mantissa of bf16, are too small by a power of two: the row is multiplied
by half of it before, the sum by the rest. Integers are or-ed into the lowest bits of a large fp32
number, which is subtracted. Sums of codes with one scale are multiplied by it. So only fp32 sums
are rounded.

Names: `N` rows of the weights, `K` the summed dimension; a word is 4 bytes, a unit the codes of
16 bytes or fewer that share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.grouped_gemm.packed_kernel import (
    row_of_scales,
    scale_values,
    times_global,
)

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false
# Triton reads attributes of a constexpr from its value, which the type checker does not know of.

# 2 ** 23, below which fp32 has an integer in its lowest bits.
_INTEGER_BITS = tl.constexpr(0x4B000000)
_INTEGER_UNIT = tl.constexpr(2.0**23)
# half of the exponent that code bits lack; all of it is no fp32 number
_E2M1_HALF = tl.constexpr(2.0**63)
_E4M3_HALF = tl.constexpr(2.0**60)


@triton.jit
def _low(pair):
    """fp32 of the lower of two numbers in bf16."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _values(x_ptr, first_k, dim_k, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = first_k + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + k) if EVEN_K else tl.load(x_ptr + k, mask=k < dim_k, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _places(BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The factor of integers by their position in half a word."""
    places = (127 - BITS * (tl.arange(0, BLOCK_K) % (16 // BITS))) << 23
    return places.to(tl.float32, bitcast=True)


@triton.jit
def _four(x, WORDS: tl.constexpr):
    """Values `[1, WORDS]` of each code of a word of four."""
    even, odd = tl.split(tl.reshape(x, (WORDS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0[None, :], x1[None, :], x2[None, :], x3[None, :]


@triton.jit
def _eight(x, WORDS: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (WORDS, 4, 2)))
    even, more = tl.split(tl.reshape(even, (WORDS, 2, 2)))
    x0, x4 = tl.split(even)
    x2, x6 = tl.split(more)
    odd, more = tl.split(tl.reshape(odd, (WORDS, 2, 2)))
    x1, x5 = tl.split(odd)
    x3, x7 = tl.split(more)
    return (
        x0[None, :], x1[None, :], x2[None, :], x3[None, :],
        x4[None, :], x5[None, :], x6[None, :], x7[None, :],
    )  # fmt: skip


@triton.jit
def _q4k_words(x):
    """The row of one block for `_q4k_sums`: values `[1, 32]` for each of a word's eight codes, then
    the sums `[1, 8]` for the low and high codes of 16 bytes.

    Low codes of 32 bytes are columns of one group, high codes those of the next.
    """
    halves = tl.sum(tl.reshape(x, (4, 2, 2, 16)), axis=3)
    low_sums, high_sums = tl.split(tl.permute(halves, (0, 2, 1)))
    column = tl.arange(0, 256)
    place = (127 - 4 * ((column * 2 + column // 32 % 2) % 4)) << 23
    x *= place.to(tl.float32, bitcast=True)
    words = tl.permute(tl.reshape(x, (4, 2, 2, 4, 4)), (0, 2, 3, 4, 1))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.reshape(words, (256,)), 32)
    low_sums, high_sums = tl.reshape(low_sums, (1, 8)), tl.reshape(high_sums, (1, 8))
    return x0, x1, x2, x3, x4, x5, x6, x7, low_sums, high_sums


@triton.jit
def _row_words(
    x_ptr, first_k, dim_k, FORMAT: tl.constexpr, CASTS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The row for `_unit_sums`: a value `[1, words]` for each code of a word; with CASTS as it
    is.
    """
    x = _values(x_ptr, first_k, dim_k, EVEN_K, BLOCK_K)
    if CASTS:
        row = (x[None, :],)
    elif FORMAT.codes == "q4_k":
        row = _q4k_words(x)
    elif FORMAT.codes == "e2m1":
        row = _eight(x * _E2M1_HALF, BLOCK_K // 8)
    elif FORMAT.codes == "uint4":
        row = _eight(x * _places(4, BLOCK_K), BLOCK_K // 8)
    elif FORMAT.codes == "e4m3":
        row = _four(x * _E4M3_HALF, BLOCK_K // 4)
    else:
        row = _four(x * _places(8, BLOCK_K), BLOCK_K // 4)
    return row


@triton.jit
def _e2m1_product(word, row):
    """The products of each word's codes."""
    high = word >> 8
    pair = ((word & 0x000F000F) * 0x1040) & 0x81C081C0
    sums = _low(pair) * row[0]
    sums += _high(pair) * row[4]
    pair = ((word & 0x00F000F0) * 0x0104) & 0x81C081C0
    sums += _low(pair) * row[1]
    sums += _high(pair) * row[5]
    pair = ((high & 0x000F000F) * 0x1040) & 0x81C081C0
    sums += _low(pair) * row[2]
    sums += _high(pair) * row[6]
    pair = ((high & 0x00F000F0) * 0x0104) & 0x81C081C0
    sums += _low(pair) * row[3]
    sums += _high(pair) * row[7]
    return sums


@triton.jit
def _e4m3_product(word, row):
    """The same; NaN where a code is."""
    odd, even = word & 0x7F007F00, word & 0x007F007F
    pair = ((word << 8) & 0x80008000) | (even << 4)
    sums = _low(pair) * row[0]
    sums += _high(pair) * row[2]
    pair = (word & 0x80008000) | (odd >> 4)
    sums += _low(pair) * row[1]
    sums += _high(pair) * row[3]
    # 127, the code of NaN, is the only one to reach 128
    is_nan = ((odd + even + 0x01010101) & 0x80808080) != 0
    return tl.where(is_nan, float("nan"), sums)


@triton.jit
def _cast(
    codes_ptrs, mask_n, first_k, dim_k, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 of fp8 codes `[N, BLOCK_K]` by the GPU's own instructions."""
    k = tl.arange(0, BLOCK_K)
    ptrs = codes_ptrs[:, None].to(tl.pointer_type(tl.float8e4nv)) + first_k + k[None, :]
    if EVEN_N and EVEN_K:
        codes = tl.load(ptrs)
    else:
        # in whole 16 bytes, as the compiler sees
        mask = mask_n[:, None] & (first_k + k < dim_k // 16 * 16)[None, :]
        codes = tl.load(ptrs, mask=mask, other=0.0)
    return codes.to(tl.float32)


@triton.jit
def _integer(word, unit_bits, zero, MASK: tl.constexpr, UNIT: tl.constexpr):
    """UNIT times the code under a mask less `zero`, in fp32."""
    bits = (word & MASK) | unit_bits
    return bits.to(tl.float32, bitcast=True) - (_INTEGER_UNIT + zero * UNIT)


@triton.jit
def _uint4_product(word, row, unit_bits, zero):
    high = word >> 16
    sums = _integer(word, unit_bits, zero, 0x000F, 1.0) * row[0]
    sums += _integer(word, unit_bits, zero, 0x00F0, 16.0) * row[1]
    sums += _integer(word, unit_bits, zero, 0x0F00, 256.0) * row[2]
    sums += _integer(word, unit_bits, zero, 0xF000, 4096.0) * row[3]
    sums += _integer(high, unit_bits, zero, 0x000F, 1.0) * row[4]
    sums += _integer(high, unit_bits, zero, 0x00F0, 16.0) * row[5]
    sums += _integer(high, unit_bits, zero, 0x0F00, 256.0) * row[6]
    sums += _integer(high, unit_bits, zero, 0xF000, 4096.0) * row[7]
    return sums


@triton.jit
def _byte_product(word, row, unit_bits, zero):
    high = word >> 16
    sums = _integer(word, unit_bits, zero, 0x00FF, 1.0) * row[0]
    sums += _integer(word, unit_bits, zero, 0xFF00, 256.0) * row[1]
    sums += _integer(high, unit_bits, zero, 0x00FF, 1.0) * row[2]
    sums += _integer(high, unit_bits, zero, 0xFF00, 256.0) * row[3]
    return sums


@triton.constexpr_function
def _unit_codes(kind):
    """Codes of a unit."""
    most = 32 if kind.block_codes else 128 // kind.bits
    return min(kind.group_cols or most, most)


@triton.jit
def _unit_sums(
    row, codes_ptrs, scales_ptr, zeros_ptr, first_n, offs_n, mask_n, first_k, dim_k, stride_sn,
    stride_zn, FORMAT: tl.constexpr, CASTS: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums `[N, units]` of products of `_row_words` with columns `first_k` to `first_k + BLOCK_K`,
    times their scales.
    """
    PER_WORD: tl.constexpr = 32 // FORMAT.bits
    CODES: tl.constexpr = _unit_codes(FORMAT)
    UNITS: tl.constexpr = BLOCK_K // CODES
    GROUP: tl.constexpr = FORMAT.group_cols
    words = tl.arange(0, BLOCK_K // PER_WORD)
    # in words, four at a time, so that the compiler sees that the last 16 bytes are whole
    first_word, num_words = first_k // PER_WORD, dim_k // (4 * PER_WORD) * 4
    mask = mask_n[:, None] & (first_word + words < num_words)[None, :]
    ptrs = codes_ptrs[:, None].to(tl.pointer_type(tl.uint32)) + first_word
    if EVEN_N and EVEN_K:
        word = tl.load(ptrs + words[None, :])
    else:
        word = tl.load(ptrs + words[None, :], mask=mask, other=0)
    units = first_k + tl.arange(0, UNITS) * CODES
    groups = units // GROUP if GROUP > 0 else units * 0
    mask = mask_n[:, None] & (units < dim_k)[None, :]
    rows = row_of_scales(offs_n, FORMAT).to(tl.int64)[:, None]
    zero = FORMAT.zero * 1.0
    if FORMAT.has_zero_points:
        ptrs = zeros_ptr + rows * stride_zn + groups[None, :]
        zero = tl.load(ptrs, mask=mask, other=0).to(tl.float32)
        zero = tl.broadcast_to(zero[:, :, None], (BLOCK_N, UNITS, CODES // PER_WORD))
        zero = tl.reshape(zero, (BLOCK_N, BLOCK_K // PER_WORD))
    # hidden from the compiler: with two constants, and-ing and or-ing are two instructions
    unit_bits = tl.where(stride_zn < 0, 0, _INTEGER_BITS).to(tl.uint32)
    if CASTS:
        sums = _cast(codes_ptrs, mask_n, first_k, dim_k, EVEN_N, EVEN_K, BLOCK_K) * row[0]
    elif FORMAT.codes == "e2m1":
        sums = _e2m1_product(word, row)
    elif FORMAT.codes == "e4m3":
        sums = _e4m3_product(word, row)
    elif FORMAT.codes == "uint4":
        sums = _uint4_product(word, row, unit_bits, zero)
    elif FORMAT.codes == "int8":
        sums = _byte_product(word ^ 0x80808080, row, unit_bits, 128.0)
    else:
        sums = _byte_product(word, row, unit_bits, zero)
    EACH: tl.constexpr = CODES if CASTS else CODES // PER_WORD
    sums = tl.sum(tl.reshape(sums, (BLOCK_N, UNITS, EACH)), axis=2)
    if FORMAT.codes == "e2m1":
        sums *= _E2M1_HALF
    elif FORMAT.codes == "e4m3" and not CASTS:
        sums *= _E4M3_HALF
    if GROUP > 0:
        if FORMAT.group_rows > 1 and FORMAT.group_rows % BLOCK_N == 0:
            # of all rows here
            row_ptr = scales_ptr + tl.cast(first_n // FORMAT.group_rows, tl.int64) * stride_sn
            scale = tl.load(row_ptr + groups, mask=units < dim_k, other=0)[None, :]
        elif EVEN_N and EVEN_K:
            scale = tl.load(scales_ptr + rows * stride_sn + groups[None, :])
        else:
            scale = tl.load(scales_ptr + rows * stride_sn + groups[None, :], mask=mask, other=0)
        sums *= scale_values(scale, FORMAT)
    return sums


@triton.jit
def _q4k_sums(
    row, codes_ptrs, mask_n, first_k, stride_zn, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`_unit_sums` of one block of Q4_K: 16 bytes of scales (`d`, `dmin`, two six-bit numbers per
    group), then 128 of codes. A unit has 16 bytes of codes, of two groups.
    """
    ptrs = codes_ptrs[:, None].to(tl.pointer_type(tl.uint32)) + first_k // 256 * 36
    units, words = tl.arange(0, 8)[None, :], tl.arange(0, 32)[None, :]
    head_ptrs = ptrs + units * 0
    if EVEN_N:
        word = tl.load(ptrs + 4 + words)
        factors, first = tl.load(head_ptrs), tl.load(head_ptrs + 1)
        second, third = tl.load(head_ptrs + 2), tl.load(head_ptrs + 3)
    else:
        mask = mask_n[:, None]
        word = tl.load(ptrs + 4 + words, mask=mask, other=0)
        factors = tl.load(head_ptrs, mask=mask, other=0)
        first = tl.load(head_ptrs + 1, mask=mask, other=0)
        second = tl.load(head_ptrs + 2, mask=mask, other=0)
        third = tl.load(head_ptrs + 3, mask=mask, other=0)
    unit_bits = tl.where(stride_zn < 0, 0, _INTEGER_BITS).to(tl.uint32)
    high = word >> 16
    lows = _integer(word, unit_bits, 0.0, 0x000F, 1.0) * row[0]
    highs = _integer(word, unit_bits, 0.0, 0x00F0, 16.0) * row[1]
    lows += _integer(word, unit_bits, 0.0, 0x0F00, 256.0) * row[2]
    highs += _integer(word, unit_bits, 0.0, 0xF000, 4096.0) * row[3]
    lows += _integer(high, unit_bits, 0.0, 0x000F, 1.0) * row[4]
    highs += _integer(high, unit_bits, 0.0, 0x00F0, 16.0) * row[5]
    lows += _integer(high, unit_bits, 0.0, 0x0F00, 256.0) * row[6]
    highs += _integer(high, unit_bits, 0.0, 0xF000, 4096.0) * row[7]
    lows = tl.sum(tl.reshape(lows, (BLOCK_N, 8, 4)), axis=2)
    highs = tl.sum(tl.reshape(highs, (BLOCK_N, 8, 4)), axis=2)
    # the bytes of both groups side by side; of the last four, six bits lie in two places
    shift, is_early = units // 2 % 2 * 16, units < 4
    first, second, third = first >> shift, second >> shift, third >> shift
    scale = tl.where(is_early, first & 0x3F3F, (third & 0x0F0F) | ((first >> 2) & 0x3030))
    least = (third >> 4) & 0x0F0F
    least = tl.where(is_early, second & 0x3F3F, least | ((second >> 2) & 0x3030))
    d = factors.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    d_min = (factors >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    sums = lows * (d * (scale & 255).to(tl.float32))
    sums += highs * (d * ((scale >> 8) & 255).to(tl.float32))
    sums -= row[8] * (d_min * (least & 255).to(tl.float32))
    return sums - row[9] * (d_min * ((least >> 8) & 255).to(tl.float32))


@triton.jit
def _sums(
    row, codes_ptrs, scales_ptr, zeros_ptr, first_n, offs_n, mask_n, first_k, dim_k, stride_sn,
    stride_zn, FORMAT: tl.constexpr, CASTS: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_unit_sums` of any format."""
    if FORMAT.codes == "q4_k":
        sums = _q4k_sums(row, codes_ptrs, mask_n, first_k, stride_zn, EVEN_N, BLOCK_N)
    else:
        sums = _unit_sums(
            row, codes_ptrs, scales_ptr, zeros_ptr, first_n, offs_n, mask_n, first_k, dim_k,
            stride_sn, stride_zn, FORMAT, CASTS, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return sums


@triton.jit
def _row_totals(
    sums, scales_ptr, global_ptr, offs_n, mask_n, stride_sn, FORMAT: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
):  # fmt: skip
    """Products `[N]` of a row, of `_unit_sums`."""
    totals = tl.sum(sums, axis=1)
    if FORMAT.group_cols == 0 and FORMAT.block_codes == 0:
        rows = row_of_scales(offs_n, FORMAT).to(tl.int64)
        scale = tl.load(scales_ptr + rows * stride_sn, mask=mask_n, other=0)
        totals *= scale_values(scale, FORMAT)
    if HAS_GLOBAL:
        totals = times_global(totals, global_ptr, FORMAT)
    return totals


@triton.jit
def packed_rows(
    x_ptr, codes_ptrs, scales_ptr, zeros_ptr, global_ptr, first_n, offs_n, mask_n, dim_k,
    stride_w_up, stride_sn, stride_s_up, stride_zn, stride_z_up, stride_g_up,
    IS_GATED: tl.constexpr, FORMAT: tl.constexpr, CASTS: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products `[N]` of a row with rows of the gate, and with those of up (both up without
    IS_GATED).

    Args:
        codes_ptrs: `[N]`: where each row of codes begins, at a multiple of 16 bytes.
        scales_ptr: Where the scales of the matrix begin, like zero points.
        CASTS: fp8 codes are converted by the GPU's own instructions.
        offs_n: Rows `[N]`, from `first_n` on.
        stride_w_up: Distance from the gate to up.
    """
    UNITS: tl.constexpr = BLOCK_K // _unit_codes(FORMAT)
    gates = tl.zeros([BLOCK_N, UNITS], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, UNITS], dtype=tl.float32)
    for first_k in range(0, dim_k, BLOCK_K):
        row = _row_words(x_ptr, first_k, dim_k, FORMAT, CASTS, EVEN_K, BLOCK_K)
        ups += _sums(
            row, codes_ptrs + stride_w_up, scales_ptr + stride_s_up, zeros_ptr + stride_z_up,
            first_n, offs_n, mask_n, first_k, dim_k, stride_sn, stride_zn,
            FORMAT, CASTS, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if IS_GATED:
            gates += _sums(
                row, codes_ptrs, scales_ptr, zeros_ptr, first_n, offs_n, mask_n, first_k, dim_k,
                stride_sn, stride_zn, FORMAT, CASTS, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    up = _row_totals(
        ups, scales_ptr + stride_s_up, global_ptr + stride_g_up, offs_n, mask_n, stride_sn,
        FORMAT, HAS_GLOBAL,
    )  # fmt: skip
    if IS_GATED:
        gate = _row_totals(
            gates, scales_ptr, global_ptr, offs_n, mask_n, stride_sn, FORMAT, HAS_GLOBAL
        )
    else:
        gate = up
    return gate, up
