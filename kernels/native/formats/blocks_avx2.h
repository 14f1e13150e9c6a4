/* Products of blocks that hold their scales, decoded in registers, for vectors of eight; a part of quantized_avx2.h.
 *
 * 32 codes, a byte each, become four vectors: vector 2 h + i has codes 8 h + i, 8 h + i + 2, + 4 and + 6 of the first 16 in
 * its lower lanes and of the last 16 in its upper lanes, as unpacking leaves them. Rows of x are packed in that order, else
 * as for fp32. Values are those of block_values.h, rounded once, and sums add up as in a tile of fp32: a row of x has the
 * same bits whether values are multiplied in registers or from memory.
 */

/* The bytes of bf16 by 4-bit codes. */
typedef struct {
    __m256i low, high;
} CodeTable;

INLINE Vec group_number(int code, const float *numbers, int group) {
    if (!has_groups_of_16(code)) return _mm256_broadcast_ss(numbers + group);
    return _mm256_set_m128(_mm_broadcast_ss(numbers + 2 * group + 1), _mm_broadcast_ss(numbers + 2 * group));
}

INLINE int has_table(int code) {
    return code == CODE_Q4_0 || code == CODE_Q4_1 || code == CODE_Q4_K || code == CODE_IQ4_NL || code == CODE_IQ4_XS ||
           code == CODE_MXFP4_BLOCK;
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

/* `count` weight rows, one or a tile's, by one row of x; or their values to `out`, a row behind the other. */
INLINE void block_rows(int code, int is_dot, int count, const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x,
                       float *out) {
    const int codes = BLOCK_SIZES[code - CODE_BLOCKS].codes, bytes = BLOCK_SIZES[code - CODE_BLOCKS].bytes;
    Vec acc[1][TILE_ROWS];
    UNROLL for (int n = 0; n < TILE_ROWS; n++) acc[0][n] = vec_zero();
    for (int64_t first = 0; first < k; first += codes, weight += bytes) {
        GroupNumbers numbers[TILE_ROWS];
        /* the same block of the rows that are next; past the last row fetching is harmless */
        UNROLL for (int n = 0; n < count; n++)
            UNROLL for (int i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(weight + (count + n) * stride + i, 0, 3);
        UNROLL for (int n = 0; n < count; n++) block_numbers(code, (const uint8_t *)weight + n * stride, &numbers[n]);
        UNROLL for (int group = 0; group < codes / 32; group++) {
            const int64_t at = first + 32 * group;
            UNROLL for (int n = 0; n < count; n++) {
                Vec values[4];
                group_values(code, table, (const uint8_t *)weight + n * stride, group, &numbers[n], values);
                UNROLL for (int i = 0; i < 4; i++) {
                    if (is_dot)
                        acc[0][n] = vec_fma(acc[0][n], values[i], vec_load_f32(x + at + 8 * i));
                    else
                        vec_store_f32(out + n * k + at + 8 * i, values[i]);
                }
            }
        }
    }
    if (is_dot) store_sums(count, 1, acc, out, 0);
}

typedef void (*BlockRows)(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out);

#define DEFINE_BLOCK_ROWS(code)                                                                                              \
    static void write_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 0, 1, table, weight, stride, k, x, out);                                                            \
    }                                                                                                                        \
    static void dot_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, 1, table, weight, stride, k, x, out);                                                               \
    }                                                                                                                        \
    static void dots_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, TILE_ROWS, table, weight, stride, k, x, out);                                                       \
    }
#define NAME_BLOCK_ROWS(code) {write_##code, dot_##code, dots_##code}

FOR_BLOCKS(DEFINE_BLOCK_ROWS, NO_SEPARATOR)

enum { WRITE_ROW, DOT_ROW, DOT_ROWS, NUM_BLOCK_ROWS };
static const BlockRows BLOCK_ROWS[END_OF_CODES - CODE_BLOCKS][NUM_BLOCK_ROWS] = {FOR_BLOCKS(NAME_BLOCK_ROWS, COMMA)};

static void prepare_table(int64_t code, CodeTable *table) {
    uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        const int value = code == CODE_Q4_0 ? i - 8 : code == CODE_MXFP4_BLOCK ? DOUBLED_E2M1[i]
                        : code == CODE_IQ4_NL || code == CODE_IQ4_XS ? NONLINEAR_VALUES[i] : i;
        low[i] = (uint8_t)(bits_of((float)value) >> 16);
        high[i] = (uint8_t)(bits_of((float)value) >> 24);
    }
    table->low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    table->high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
}

static void multiply_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                            int64_t ldo) {
    const BlockRows *rows = BLOCK_ROWS[weight.quantized->codes - CODE_BLOCKS];
    const int64_t at_once = rows_of_values(k, num_rows);
    CodeTable table;
    prepare_table(weight.quantized->codes, &table);
    if (num_rows == 1) {
        int64_t n = 0;
        for (; n + TILE_ROWS <= num_weight_rows; n += TILE_ROWS)
            rows[DOT_ROWS](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        for (; n < num_weight_rows; n++)
            rows[DOT_ROW](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        return;
    }
    float values[at_once * k];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++)
            rows[WRITE_ROW](&table, weight.data + (first + n) * weight.stride, weight.stride, k, NULL, values + n * k);
        multiply_cached(KIND_F32, (Matrix){.data = (const char *)values, .stride = 4 * k}, count, k, packed, num_rows, out + first, ldo);
    }
}

/* In the order in which codes become vectors. */
static void pack_blocks(const char *src, int dtype, int64_t count, float *panel, int64_t first_k, int row, int panel_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t element = first_k + i, within = element % 32;
        const int64_t vector = element / 32 * 4 + within % 16 / 8 * 2 + within % 2, lane = within / 16 * 4 + within % 8 / 2;
        panel[(vector / 2 * panel_rows + row) * K_STEP + vector % 2 * LANES + lane] = load_element(src, dtype, i);
    }
}
