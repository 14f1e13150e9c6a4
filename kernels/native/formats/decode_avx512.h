/* Codes decoded in registers, vectors of sixteen lanes; a part of quantized_avx512.h. */

/* The first bytes of a half of a vector. */
INLINE __m256i load_some(const char *codes, int64_t bytes) {
    return bytes > 0 ? _mm256_maskz_loadu_epi8(~0u >> (bytes < 32 ? 32 - bytes : 0), (const __m256i *)codes) : _mm256_setzero_si256();
}

/* A vector of codes, of a block of which `bytes` are there: the row may end at the end of the mapped memory, and what a
 * mask leaves out is not read. Its cache line is waited for nevertheless, so that the last codes are loaded by halves. Whole
 * vectors are loaded once: a compiler that loads them again for the shifts is a fifth slower from memory where rows begin
 * within a line (measured on Zen 5, in a loop of such products alone). */
INLINE __m512i load_codes(const char *codes, int64_t bytes) {
    if (bytes < 64) return _mm512_inserti64x4(_mm512_zextsi256_si512(load_some(codes, bytes)), load_some(codes + 32, bytes - 32), 1);
    __m512i loaded = _mm512_loadu_si512(codes);
    __asm__("" : "+v"(loaded));
    return loaded;
}

/* Of the eight bytes of each lane the first four, or the last. */
INLINE __m512i bytes_of_lanes(const char *codes, int64_t bytes, int half, __m512i flip) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i index = half ? _mm512_add_epi32(even, _mm512_set1_epi32(1)) : even;
    const __m512i low = load_codes(codes, bytes), high = load_codes(codes + 64, bytes - 64);
    return _mm512_xor_si512(_mm512_permutex2var_epi32(low, index, high), flip);
}

/* ---- decoding to fp32 ---- */

/* fp8 in the highest byte of each lane. */
INLINE __m512 wide_e4m3(__m512i code) {
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi32(code, 4), _mm512_set1_epi32(0x07f00000));
    const __m512i normal = _mm512_add_epi32(magnitude, _mm512_set1_epi32(120 << 23));
    const __m512 above = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(121 << 23)));
    const __mmask16 is_subnormal = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(8 << 20));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x07f00000));
    __m512 value = _mm512_mask_sub_ps(_mm512_castsi512_ps(normal), is_subnormal, above, _mm512_set1_ps(0.015625f));
    value = _mm512_mask_mov_ps(value, is_nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi32((int)0x80000000u));
    return _mm512_or_ps(value, _mm512_castsi512_ps(sign));
}

/* Four vectors of the four codes in each lane: the upper half of fp32 is a table of sign and upper exponent bits and the
 * code's other bits, but for zeros, subnormal codes and NaN. */
INLINE void decode_wide_e4m3(const Lanes *lanes, __m512i four, __m512 out[4]) {
    const __m512i above_normal = _mm512_sub_epi8(_mm512_add_epi8(four, four), _mm512_set1_epi8(0x10));
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(above_normal, _mm512_set1_epi8((char)0xec)) != 0, 0)) {
        UNROLL for (int j = 0; j < 4; j++) out[j] = wide_e4m3(_mm512_slli_epi32(four, 24 - 8 * j));
        return;
    }
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i codes = _mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(order)), upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i high = _mm512_shuffle_epi8(lanes->upper_bits, _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15)));
    const __m512i low = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8((char)0xf0));
    const __m512i halves[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    UNROLL for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(halves[i], 16));
        out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(halves[i], upper));
    }
}

/* Vector j has element 8 l + j of a block in lane l. */
INLINE void decode_wide(int decoder, const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512 out[8]) {
    if (decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4) {
        const __m512i words = load_codes(codes, bytes);
        const __m512i zeros = decoder == DECODE_ZEROS4 ? zeros_at(&lanes->groups, row, block * QUANT_BLOCK) : _mm512_setzero_si512();
        UNROLL for (int j = 0; j < 8; j++) {
            const __m512i code = _mm512_srli_epi32(words, 4 * j);
            if (decoder == DECODE_TABLE4)
                out[j] = _mm512_permutexvar_ps(code, lanes->wide_table);
            else
                out[j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(code, _mm512_set1_epi32(15)), zeros));
        }
        return;
    }
    const __m512i zeros = decoder == DECODE_BYTES ? zeros_at(&lanes->groups, row, block * QUANT_BLOCK) : _mm512_setzero_si512();
    const __m512i flip = decoder == DECODE_BYTES ? lanes->flip : _mm512_setzero_si512();
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512i four = bytes_of_lanes(codes, bytes, half, flip);
        if (decoder == DECODE_E4M3) {
            decode_wide_e4m3(lanes, four, out + 4 * half);
            continue;
        }
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512i code = _mm512_and_si512(_mm512_srli_epi32(four, 8 * j), _mm512_set1_epi32(255));
            out[4 * half + j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, zeros));
        }
    }
}

#if HAS_BF16_DOT
/* ---- decoding to bf16; pack_quantized says which element lies where ---- */

/* fp8 by a table of both bytes of bf16 for every magnitude. */
INLINE void decode_e4m3(const Lanes *lanes, __m512i codes, __m512i out[2]) {
    const __m512i low = _mm512_permutex2var_epi8(lanes->low[0], codes, lanes->low[1]);
    const __m512i magnitudes = _mm512_permutex2var_epi8(lanes->high[0], codes, lanes->high[1]);
    /* magnitudes | (codes & sign) */
    const __m512i high = _mm512_ternarylogic_epi32(magnitudes, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* Bytes above zero in words, less zero points: integers of up to 8 bits are exact in the upper halves of fp32. */
INLINE __m512i narrow_words(__m512i words, __m512i zeros) {
    const __m512i low = _mm512_sub_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), zeros);
    const __m512i high = _mm512_sub_epi32(_mm512_srli_epi32(words, 16), zeros);
    const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    /* high & mask | low */
    return _mm512_ternarylogic_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(high)), _mm512_set1_epi32((int)0xffff0000u), low_bits, 0xea);
}

/* Two vectors of pairs of 64 codes of 8 bits. */
INLINE void decode_bytes(int decoder, const Lanes *lanes, const RowGroups *row, __m512i codes, int64_t element, __m512i out[2]) {
    if (decoder == DECODE_E4M3) {
        decode_e4m3(lanes, codes, out);
        return;
    }
    const __m512i zeros = zeros_at(&lanes->groups, row, element), bytes = _mm512_xor_si512(codes, lanes->flip);
    out[0] = narrow_words(_mm512_unpacklo_epi8(bytes, _mm512_setzero_si512()), zeros);
    out[1] = narrow_words(_mm512_unpackhi_epi8(bytes, _mm512_setzero_si512()), zeros);
}

INLINE void decode_any4(const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    float values[QUANT_BLOCK];
    char padded[QUANT_BLOCK / 2];
    int32_t zeros[NUM_LANES];
    uint16_t narrow[QUANT_BLOCK];
    _mm512_storeu_si512(padded, load_codes(codes, bytes));
    code_values(CODE_UINT4, padded, QUANT_BLOCK, values);
    _mm512_storeu_si512(zeros, zeros_at(&lanes->groups, row, block * QUANT_BLOCK));
    for (int i = 0; i < QUANT_BLOCK; i++) {
        const int plane = i / 32, lane = i % 32 / 2, half = i % 2;
        narrow[i] = f32_to_bf16(values[8 * lane + plane + 4 * half] - (float)zeros[lane]);
    }
    for (int plane = 0; plane < 4; plane++) out[plane] = _mm512_loadu_si512(narrow + 32 * plane);
}

/* Four vectors of pairs of a block of codes of 4 bits. */
INLINE void decode_nibbles(int decoder, const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    if (decoder == DECODE_ANY4) {
        decode_any4(lanes, row, codes, bytes, block, out);
        return;
    }
    const __m512i words = load_codes(codes, bytes);
    /* Code minus zero point, from -16 on: an index of the table, which takes the low five bits of a word. */
    __m512i first = _mm512_setzero_si512();
    if (decoder == DECODE_ZEROS4) {
        first = _mm512_sub_epi32(_mm512_set1_epi32(LARGEST_TABLE_ZERO), zeros_at(&lanes->groups, row, block * QUANT_BLOCK));
        first = _mm512_or_si512(first, _mm512_slli_epi32(first, 16));
    }
    UNROLL for (int plane = 0; plane < 4; plane++) {
        __m512i index = _mm512_srli_epi16(words, 4 * plane);
        if (decoder == DECODE_ZEROS4) index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), first);
        out[plane] = _mm512_permutexvar_epi16(index, lanes->table);
    }
}
#endif
