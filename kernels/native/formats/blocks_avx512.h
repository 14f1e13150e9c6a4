/* Values of blocks that hold their scales, for vectors of sixteen; a part of block_rows.h.
 *
 * Codes of four bits choose from the sixteen values that they have under a scale and a minimum; others are widened. Both are
 * in their order, and so are rows of x.
 */
typedef Vec CodeTable; /* values of 4-bit codes before the scale */

static void prepare_table(int64_t code, CodeTable *table) {
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = (float)table_value(code, i);
    *table = vec_load_f32(values);
}

/* Where the nibbles of 32 codes begin: two to a byte in 16 bytes, or all high or all low ones of 32 bytes. */
INLINE const uint8_t *nibbles_of(int code, const uint8_t *src, int group) {
    switch (code) {
        case CODE_Q4_K: return src + 16 + group / 2 * 32;
        case CODE_IQ4_XS: return src + 8 + 16 * group;
        case CODE_MXFP4_BLOCK: return src + 1;
        default: return src + (code == CODE_Q4_1 ? 4 : 2);
    }
}

INLINE Vec scaled(int code, Vec values, const GroupNumbers *numbers, int place) {
    const Vec scale = vec_all(numbers->scales[place]);
    return has_minimum(code) ? _mm512_fmsub_ps(values, scale, vec_all(numbers->minima[place])) : _mm512_mul_ps(values, scale);
}

INLINE void group_values(int code, const CodeTable *table, const uint8_t *src, int group, const GroupNumbers *numbers, Vec out[2]) {
    if (has_table(code)) {
        const uint8_t *nibbles = nibbles_of(code, src, group);
        const Vec values = scaled(code, *table, numbers, group);
        UNROLL for (int half = 0; half < 2; half++) {
            const uint8_t *bytes = nibbles + (code == CODE_Q4_K ? 16 * half : 0);
            const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
            const int is_high = code == CODE_Q4_K ? group % 2 : half;
            out[half] = _mm512_permutexvar_ps(is_high ? _mm512_srli_epi32(codes, 4) : codes, values);
        }
        return;
    }
    const __m256i codes = (__m256i)(block_codes(code, src, group) - (uint8_t)zero_of(code));
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i bytes = half ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
        const int place = has_groups_of_16(code) ? 2 * group + half : group;
        out[half] = scaled(code, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), numbers, place);
    }
}

static void pack_blocks(const char *src, int dtype, int64_t count, float *panel, int64_t first_k, int row, int panel_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t element = first_k + i;
        panel[(element / K_STEP * panel_rows + row) * K_STEP + element % K_STEP] = load_as(dtype, src, i);
    }
}
