/* Products of blocks that hold their scales, decoded in registers, for vectors of eight; a part of block_rows.h.
 *
 * 32 codes, a byte each, become four vectors: vector 2 h + i has codes 8 h + i, 8 h + i + 2, + 4 and + 6 of the first 16 in
 * its lower lanes and of the last 16 in its upper lanes, as unpacking leaves them. Rows of x are packed in that order, else
 * as for fp32.
 */

/* The bytes of bf16 by 4-bit codes. */
typedef struct {
    __m256i low, high;
} CodeTable;

INLINE Vec group_number(int code, const float *numbers, int group) {
    if (!has_groups_of_16(code)) return _mm256_broadcast_ss(numbers + group);
    return _mm256_set_m128(_mm_broadcast_ss(numbers + 2 * group + 1), _mm_broadcast_ss(numbers + 2 * group));
}

INLINE void group_values(int code, const CodeTable *table, const uint8_t *src, int group, const GroupNumbers *numbers, Vec out[4]) {
    const __m256i codes = (__m256i)block_codes(code, src, group);
    if (code == CODE_Q8_0) {
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i zero = _mm256_setzero_si256();
            const __m256i pairs = half ? _mm256_unpackhi_epi8(zero, codes) : _mm256_unpacklo_epi8(zero, codes);
            out[2 * half] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24));
            out[2 * half + 1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 24));
        }
    } else {
        /* 128 and more: its bf16 has the seven bits of an integer below it */
        const __m256i low = has_table(code) ? _mm256_shuffle_epi8(table->low, codes) : codes;
        const __m256i high = has_table(code) ? _mm256_shuffle_epi8(table->high, codes) : _mm256_set1_epi8(0x43);
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i halves = half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
            out[2 * half] = even_halves(halves), out[2 * half + 1] = odd_halves(halves);
        }
        if (!has_table(code))
            UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_sub_ps(out[i], _mm256_set1_ps(128.0f + zero_of(code)));
    }
    const Vec scales = group_number(code, numbers->scales, group);
    if (has_minimum(code)) {
        const Vec minima = group_number(code, numbers->minima, group);
        UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_fmsub_ps(out[i], scales, minima);
    } else {
        UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_mul_ps(out[i], scales);
    }
}

static void prepare_table(int64_t code, CodeTable *table) {
    uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        const uint32_t value = bits_of((float)table_value(code, i));
        low[i] = (uint8_t)(value >> 16), high[i] = (uint8_t)(value >> 24);
    }
    table->low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    table->high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
}

/* In the order in which codes become vectors. */
static void pack_blocks(const char *src, int dtype, int64_t count, float *panel, int64_t first_k, int row, int panel_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t element = first_k + i, within = element % 32;
        const int64_t vector = element / 32 * 4 + within % 16 / 8 * 2 + within % 2, lane = within / 16 * 4 + within % 8 / 2;
        panel[(vector / 2 * panel_rows + row) * K_STEP + vector % 2 * LANES + lane] = load_as(dtype, src, i);
    }
}
