/* One row of x, rounded to int8, by weight rows of 4-bit codes, four at a time; a part of int8_lanes.h.
 *
 * No tile would be used twice: the codes of a row are multiplied as they lie, and sums over lanes put four rows side by side,
 * those of groups at even places in the lower half. The bits are those of the tile.
 */
enum { QUAD = 4 };

/* Four numbers of 32 bits of four rows each, to a vector for each place. */
INLINE void transpose_quad(const char *rows, int64_t row_bytes, __m128i out[QUAD]) {
    __m128i v[QUAD], pairs[QUAD];
    UNROLL for (int n = 0; n < QUAD; n++) v[n] = _mm_loadu_si128((const __m128i *)(rows + n * row_bytes));
    UNROLL for (int n = 0; n < QUAD; n += 2) {
        pairs[n] = _mm_unpacklo_epi32(v[n], v[n + 1]);
        pairs[n + 1] = _mm_unpackhi_epi32(v[n], v[n + 1]);
    }
    UNROLL for (int n = 0; n < 2; n++) {
        out[2 * n] = _mm_unpacklo_epi64(pairs[n], pairs[n + 2]);
        out[2 * n + 1] = _mm_unpackhi_epi64(pairs[n], pairs[n + 2]);
    }
}

/* A number of each of two groups, in the half of a vector that is the group's. */
INLINE __m256i by_halves(const char *groups) {
    int32_t two[2];
    memcpy(two, groups, sizeof two);
    return _mm256_inserti128_si256(_mm256_set1_epi32(two[0]), _mm_set1_epi32(two[1]), 1);
}

/* Sums of 64 columns, two groups, of four rows; without the zero points. */
INLINE __m256i quad_sums(__m256i table, const char *const codes[QUAD], const char *x) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i even = _mm256_loadu_si256((const __m256i *)x), odd = _mm256_loadu_si256((const __m256i *)x + 1);
    __m256i sums[QUAD];
    UNROLL for (int n = 0; n < QUAD; n++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)codes[n]);
        const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, mask));
        const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
        sums[n] = _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd));
    }
    const __m256i first = _mm256_madd_epi16(_mm256_hadd_epi16(sums[0], sums[1]), ones);
    const __m256i last = _mm256_madd_epi16(_mm256_hadd_epi16(sums[2], sums[3]), ones);
    return _mm256_hadd_epi32(first, last);
}

static void int8_one_row(const Int8Codes *how, const Int8Rows *rows, int first, int num_weight_rows, int64_t k, const char *x,
                         float *out) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)how->table));
    const char *scales = (const char *)(rows->scales + first * rows->groups);
    const char *zeros = (const char *)(rows->zeros + (how->has_zeros ? first * rows->groups : 0));
    __m256 acc = _mm256_setzero_ps();
    char padded[QUAD][QUANT_BLOCK / 2];
    UNROLL for (int n = 0; n < QUAD; n++) __builtin_prefetch(rows->ahead[first + n] + (k - 1) / 2, 0, 3);
    for (int64_t at = 0; at < k; at += QUANT_BLOCK, x += INT8_BLOCK_BYTES, scales += 16, zeros += 16) {
        const char *codes[QUAD];
        __m128i of_rows[QUAD], zeros_of_rows[QUAD];
        UNROLL for (int n = 0; n < QUAD; n++) {
            codes[n] = rows->codes[first + n] + at / 2;
            __builtin_prefetch(rows->ahead[first + n] + at / 2, 0, 3);
        }
        if (at + QUANT_BLOCK > k) end_of_rows(codes, QUAD, (size_t)(k - at + 1) / 2, padded[0], QUANT_BLOCK / 2);
        transpose_quad(scales, 4 * rows->groups, of_rows);
        if (how->has_zeros) transpose_quad(zeros, 4 * rows->groups, zeros_of_rows);
        UNROLL for (int step = 0; step < QUANT_BLOCK / INT8_STEP; step++) {
            const __m256i sums_of_x = by_halves(x + INT8_SUMS_AT + 8 * step);
            const __m256i weight_scales = _mm256_inserti128_si256(_mm256_castsi128_si256(of_rows[2 * step]), of_rows[2 * step + 1], 1);
            const __m256 scale = _mm256_mul_ps(_mm256_castsi256_ps(weight_scales), _mm256_castsi256_ps(by_halves(x + INT8_SCALES_AT + 8 * step)));
            __m256i own = _mm256_set1_epi16((int16_t)how->zero);
            if (how->has_zeros) {
                own = _mm256_inserti128_si256(_mm256_castsi128_si256(zeros_of_rows[2 * step]), zeros_of_rows[2 * step + 1], 1);
                own = _mm256_or_si256(own, _mm256_slli_epi32(own, 16));
            }
            const __m256i sums = _mm256_sub_epi32(quad_sums(table, codes, x + step * INT8_STEP), _mm256_madd_epi16(own, sums_of_x));
            acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, acc);
            UNROLL for (int n = 0; n < QUAD; n++) codes[n] += INT8_STEP / 2;
        }
    }
    float sums[QUAD];
    const __m128 both = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
    _mm_storeu_ps(sums, _mm_mul_ps(both, _mm_set1_ps(how->factor)));
    for (int n = 0; n < QUAD && n < num_weight_rows; n++) out[n] = sums[n];
}
