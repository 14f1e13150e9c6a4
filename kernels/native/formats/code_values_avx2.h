/* What codes stand for without zero point and scale, as code_values has it; a part of quantized_template.h. */

/* 32 codes of four bits, of two in a byte the low one first. */
INLINE void wide_nibbles(int64_t kind, const uint8_t *src, float *out) {
    const __m128i low_bytes = _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64);
    const __m128i high_bytes = _mm_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)src), mask = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i codes = half ? _mm_unpackhi_epi8(even, odd) : _mm_unpacklo_epi8(even, odd);
        const __m128i low = _mm_shuffle_epi8(low_bytes, codes), high = _mm_shuffle_epi8(high_bytes, codes);
        UNROLL for (int quarter = 0; quarter < 2; quarter++) {
            __m256 values;
            if (kind == CODE_E2M1) { /* by the bytes of bf16 */
                const __m128i words = quarter ? _mm_unpackhi_epi8(low, high) : _mm_unpacklo_epi8(low, high);
                values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
            } else {
                values = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(quarter ? _mm_srli_si128(codes, 8) : codes));
            }
            _mm256_storeu_ps(out + 16 * half + 8 * quarter, values);
        }
    }
}

/* 16 codes of fp8. Fp16 of a smaller exponent has their bits, also where they are subnormal, but for NaN. */
INLINE void wide_fp8(const uint8_t *src, float *out) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)src)), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(halves, 1), _mm256_set1_epi16(0x7f00));
    const __m256i all = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i eight = half ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all);
        _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(_mm256_cvtph_ps(eight), _mm256_set1_ps(256.0f)));
    }
}

/* As many of the first codes as fill vectors; their number. Of other kinds the compiler makes vectors by itself. */
static int64_t wide_code_values(int64_t kind, const uint8_t *src, int64_t count, float *out) {
    int64_t i = 0;
    if (kind == CODE_E2M1)
        for (; i + 32 <= count; i += 32) wide_nibbles(CODE_E2M1, src + i / 2, out + i);
    else if (kind == CODE_UINT4)
        for (; i + 32 <= count; i += 32) wide_nibbles(CODE_UINT4, src + i / 2, out + i);
    else if (kind == CODE_E4M3)
        for (; i + 16 <= count; i += 16) wide_fp8(src + i, out + i);
    return i;
}
