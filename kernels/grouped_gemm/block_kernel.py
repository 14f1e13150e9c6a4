"""Products with weights in ggml's blocks for the Triton kernels: codes and scales lie together.

A step takes the columns of one scale: 32, of Q6_K 16. Codes are exact in bf16 and fp16, and so the
sum of their products is multiplied by the scale, in fp32; where a block has minima, the sum of the
rows is, and subtracted. Layouts are those of `quantized/block_reference.py`.

Names: `N` rows of the weights, `K` the summed dimension.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false
# Triton reads attributes of a constexpr from its value and makes one of a number, which the type
# checker does not know of.

from __future__ import annotations

import triton
import triton.language as tl

# Bits of e2m1, put where fp32 has its exponent and mantissa, are numbers this much too small; the
# values of blocks are doubled.
_DOUBLED_E2M1_UNIT = tl.constexpr(2.0**127)
_E2M1_MASK = tl.constexpr(0x81C00000 - 2**32)


@triton.jit
def _bytes(ptrs, mask_n, EVEN_N: tl.constexpr, COUNT: tl.constexpr):
    """`uint32 [N, COUNT]` of the bytes that begin at each pointer."""
    every = ptrs[:, None] + tl.arange(0, COUNT)[None, :]
    found = tl.load(every) if EVEN_N else tl.load(every, mask=mask_n[:, None], other=0)
    return found.to(tl.uint32)


@triton.jit
def _byte(ptrs, mask_n):
    return tl.load(ptrs, mask=mask_n, other=0).to(tl.uint32)


@triton.jit
def _half(ptrs, mask_n):
    """fp32 of a number in fp16, which may lie at any address."""
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
    """Half of `2 ** (byte - 127)`; below 2 it is subnormal."""
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
    """The same of a group in blocks of 256, which begins at column `first` of its block."""
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
        # six bits each: of the first four groups in bytes of their own, of others in three parts
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

    Args:
        acc: fp32 `[M, BLOCK_N]`.
        x: `[M, 32]`, of Q6_K `[M, 16]`.
        row_ptrs: `[BLOCK_N]`: where each row of blocks begins.
        mask_n: Rows that exist.
        first_k: A multiple of the columns of a scale.
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
