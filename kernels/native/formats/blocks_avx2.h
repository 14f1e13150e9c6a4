/* Products of blocks that hold their scales, decoded in registers, for vectors of eight; a part of quantized_avx2.h.
 *
 * 32 codes, a byte each, become four vectors: vector 2 h + i has codes 8 h + i, 8 h + i + 2, + 4 and + 6 of the first 16 in
 * its lower lanes and of the last 16 in its upper lanes, as unpacking leaves them. Rows of x are packed in that order, else
 * as for fp32. Values are those of block_values.h, rounded once, and sums add up as in a tile of fp32: a row of x has the
 * same bits whether values are multiplied in registers or from memory.
 */
typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));

/* The bytes of bf16 by 4-bit codes. */
typedef struct {
    __m256i low, high;
} CodeTable;

/* Of the groups of a block: 32 codes, or 16. */
typedef struct {
    float scales[16], minima[16];
} GroupNumbers;

INLINE int has_groups_of_16(int code) { return code == CODE_Q2_K || code == CODE_Q3_K || code == CODE_Q6_K; }

INLINE int has_minimum(int code) {
    return code == CODE_Q4_1 || code == CODE_Q5_1 || code == CODE_Q2_K || code == CODE_Q4_K || code == CODE_Q5_K;
}

INLINE Codes load_codes(const uint8_t *src) { return (Codes)_mm256_loadu_si256((const __m256i *)src); }
INLINE Codes code_field(Codes bytes, int shift, uint8_t mask) { return (Codes)((CodePairs)bytes >> shift) & mask; }
/* Of codes that stay bytes. */
INLINE Codes raised(Codes bytes, int shift) { return (Codes)((CodePairs)bytes << shift); }

/* The low nibbles of 16 bytes, and behind them the high ones. */
INLINE Codes nibble_codes(const uint8_t *src) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)src);
    return (Codes)_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1) & 15;
}

/* 16 where a bit of four bytes is set, else 0. */
INLINE Codes fifth_codes(const uint8_t *src) {
    int32_t bits;
    memcpy(&bits, src, sizeof bits);
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const Codes bit = (Codes)_mm256_set1_epi64x((long long)0x8040201008040201);
    return (Codes)(((Codes)_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte) & bit) == bit) & 16;
}

/* Group by group of 32. */
INLINE Codes block_codes(int code, const uint8_t *src, int group) {
    switch (code) {
        case CODE_Q4_0:
        case CODE_IQ4_NL: return nibble_codes(src + 2);
        case CODE_Q4_1: return nibble_codes(src + 4);
        case CODE_Q5_0: return nibble_codes(src + 6) | fifth_codes(src + 2);
        case CODE_Q5_1: return nibble_codes(src + 8) | fifth_codes(src + 4);
        case CODE_Q8_0: return load_codes(src + 2);
        case CODE_Q2_K: return code_field(load_codes(src + 16 + group / 4 * 32), group % 4 * 2, 3);
        case CODE_Q3_K:
            return code_field(load_codes(src + 32 + group / 4 * 32), group % 4 * 2, 3) | raised(code_field(load_codes(src), group, 1), 2);
        case CODE_Q4_K: return code_field(load_codes(src + 16 + group / 2 * 32), group % 2 * 4, 15);
        case CODE_Q5_K:
            return code_field(load_codes(src + 48 + group / 2 * 32), group % 2 * 4, 15) | raised(code_field(load_codes(src + 16), group, 1), 4);
        case CODE_Q6_K:
            return code_field(load_codes(src + group / 4 * 64 + group % 2 * 32), group % 4 / 2 * 4, 15) |
                   raised(code_field(load_codes(src + 128 + group / 4 * 32), group % 4 * 2, 3), 4);
        case CODE_IQ4_XS: return nibble_codes(src + 8 + 16 * group);
        default: return nibble_codes(src + 1);
    }
}

/* Signed bytes by what all of a block share. */
INLINE void by_shared(__m128i factors, float shared, float out[16]) {
    UNROLL for (int half = 0; half < 2; half++) {
        const __m256i wide = _mm256_cvtepi8_epi32(half ? _mm_srli_si128(factors, 8) : factors);
        vec_store_f32(out + 8 * half, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(shared)));
    }
}

/* Factors of six bits: those of the first four groups lie in the bytes of the first word for scales and of the second for
 * minima; of the last four the low bits in the third word and the high ones above those of the first four. */
INLINE void six_bit_numbers(const uint8_t *src, float scale, float minimum, GroupNumbers *out) {
    const uint32_t low = 0x0f0f0f0f, high = 0x30303030, six = low | high;
    uint32_t words[3];
    memcpy(words, src, sizeof words);
    by_shared(_mm_setr_epi32((int)(words[0] & six), (int)((words[2] & low) | (words[0] >> 2 & high)), 0, 0), scale, out->scales);
    by_shared(_mm_setr_epi32((int)(words[1] & six), (int)((words[2] >> 4 & low) | (words[1] >> 2 & high)), 0, 0), minimum, out->minima);
}

INLINE void block_numbers(int code, const uint8_t *src, GroupNumbers *out) {
    const __m128i four = _mm_set1_epi8(15);
    switch (code) {
        case CODE_Q4_1:
        case CODE_Q5_1: out->scales[0] = half_at(src), out->minima[0] = -half_at(src + 2); break;
        case CODE_Q2_K: {
            const __m128i both = _mm_loadu_si128((const __m128i *)src);
            by_shared(_mm_and_si128(both, four), half_at(src + 80), out->scales);
            by_shared(_mm_and_si128(_mm_srli_epi16(both, 4), four), half_at(src + 82), out->minima);
            break;
        }
        case CODE_Q3_K: {
            int8_t factors[16];
            for (int i = 0; i < 16; i++)
                factors[i] = (int8_t)(((src[96 + i % 8] >> (i / 8 * 4) & 15) | (src[104 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
            by_shared(_mm_loadu_si128((const __m128i *)factors), half_at(src + 108), out->scales);
            break;
        }
        case CODE_Q4_K:
        case CODE_Q5_K: six_bit_numbers(src + 4, half_at(src), half_at(src + 2), out); break;
        case CODE_Q6_K: by_shared(_mm_loadu_si128((const __m128i *)(src + 192)), half_at(src + 208), out->scales); break;
        case CODE_IQ4_XS:
            for (int i = 0; i < 8; i++)
                out->scales[i] =
                    half_at(src) * (float)(((src[4 + i / 2] >> (i % 2 * 4) & 15) | (src[2 + i / 4] >> (i % 4 * 2) & 3) << 4) - 32);
            break;
        case CODE_MXFP4_BLOCK: out->scales[0] = half_of_e8m0(src[0]); break;
        default: out->scales[0] = half_at(src);
    }
}

INLINE Vec group_number(int code, const float *numbers, int group) {
    if (!has_groups_of_16(code)) return _mm256_broadcast_ss(numbers + group);
    return _mm256_set_m128(_mm_broadcast_ss(numbers + 2 * group + 1), _mm_broadcast_ss(numbers + 2 * group));
}

/* What is subtracted from codes that have no table. */
INLINE float zero_of(int code) {
    return code == CODE_Q5_0 ? 16.0f : code == CODE_Q6_K ? 32.0f : code == CODE_Q3_K ? 4.0f : 0.0f;
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
#define FOR_BLOCKS(macro, separator)                                                                                           \
    macro(CODE_Q4_0) separator() macro(CODE_Q4_1) separator() macro(CODE_Q5_0) separator() macro(CODE_Q5_1) separator()       \
        macro(CODE_Q8_0) separator() macro(CODE_Q2_K) separator() macro(CODE_Q3_K) separator() macro(CODE_Q4_K) separator()   \
            macro(CODE_Q5_K) separator() macro(CODE_Q6_K) separator() macro(CODE_IQ4_NL) separator() macro(CODE_IQ4_XS) separator() \
                macro(CODE_MXFP4_BLOCK)

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
