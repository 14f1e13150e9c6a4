/* Numbers of blocks of one group, eight at a time, of which `groups` are there; a part of int8_blocks.h.
 *
 * Where they lie apart, a vector of them is put together from words: many small stores before a wide load would wait.
 */
INLINE __m256 eight_halves(const char *first, int apart, int groups) {
#define HALF(i) (short)(i < groups ? load_u16(first + i * apart) : 0)
    return _mm256_cvtph_ps(_mm_setr_epi16(HALF(0), HALF(1), HALF(2), HALF(3), HALF(4), HALF(5), HALF(6), HALF(7)));
}

/* As half_of_e8m0. */
INLINE __m256 eight_e8m0(const char *first, int apart, int groups) {
#define BYTE(i) (i < groups ? (uint8_t)first[i * apart] : 0)
    const __m256i codes = _mm256_setr_epi32(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7));
    const __m256i one = _mm256_set1_epi32(1), normal = _mm256_slli_epi32(_mm256_sub_epi32(codes, one), 23);
    const __m256i subnormal = _mm256_slli_epi32(_mm256_add_epi32(codes, one), 21); /* of 0 and 1 */
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), codes)));
}

INLINE __m256 eight_scales(int code, const char *step, int groups) {
    const int apart = BLOCK_SIZES[code - CODE_BLOCKS].bytes;
    return code == CODE_MXFP4_BLOCK ? eight_e8m0(step, apart, groups) : eight_halves(step, apart, groups);
}

/* Of blocks that have them, else the scales again. */
INLINE __m256 eight_minima(int code, const char *step, int groups, __m256 scales) {
    if (!has_minimum(code)) return scales;
    return _mm256_xor_ps(eight_halves(step + 2, BLOCK_SIZES[code - CODE_BLOCKS].bytes, groups), _mm256_set1_ps(-0.0f));
}
