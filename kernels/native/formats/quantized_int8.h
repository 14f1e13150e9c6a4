/* Products of integer codes with rows of x that are rounded to int8; a part of quantized_template.h.
 *
 * Only where the caller asks for it: everything else rounds neither weights nor x. INT8_GROUP columns of a row of x share a
 * scale, the largest magnitude among them over 127, as in ggml's q8_0. Products of a group are summed as integers, which is
 * exact, and multiplied by both scales in fp32. Codes of 4 bits become twice their value for e2m1, which half a scale mends.
 *
 * A packed block has 128 codes and then four scales; codes of KIND_QUANT_INT4 lie 64 at a time, those of even columns first,
 * as the nibbles of bytes come apart.
 */
enum { INT8_STEP = 64 };

static void pack_int8(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows,
                      int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + QUANT_BLOCK - 1) / QUANT_BLOCK * QUANT_BLOCK : last_k;
    for (int64_t at = first_k; at < end; at += INT8_GROUP) {
        float values[INT8_GROUP] = {0}, largest = 0;
        char *block = panel + (at / QUANT_BLOCK * panel_rows + row) * INT8_BLOCK_BYTES;
        const int64_t filled = last_k - at < INT8_GROUP ? last_k - at : INT8_GROUP, place = at % QUANT_BLOCK;
        int is_finite = 1;
        for (int64_t i = 0; i < filled; i++) values[i] = load_element(src, dtype, at - first_k + i);
        for (int i = 0; i < INT8_GROUP; i++) {
            const float magnitude = fabsf(values[i]);
            is_finite &= magnitude <= 0x1.fffffep127f;
            largest = magnitude > largest ? magnitude : largest;
        }
        /* less than this is nothing: its reciprocal would be infinite */
        const float inverse = is_finite && largest >= 0x1p-100f ? 127.0f / largest : 0.0f;
        const float scale = !is_finite ? NAN : inverse != 0.0f ? largest / 127.0f : 0.0f;
        memcpy(block + QUANT_BLOCK + place / INT8_GROUP * 4, &scale, 4);
        for (int i = 0; i < INT8_GROUP; i++) {
            const int64_t in_step = place % INT8_STEP + i;
            const int64_t to = kind == KIND_QUANT_INT8 ? place + i : place / INT8_STEP * INT8_STEP + in_step % 2 * 32 + in_step / 2;
            ((int8_t *)block)[to] = is_finite ? (int8_t)lrintf(values[i] * inverse) : 0;
        }
    }
}

/* What codes stand for: 4 bits by a table, 8 bits with the highest bit turned where they are unsigned. */
typedef struct {
    int8_t table[16];
    uint8_t flip;
    int shift;
    float factor;
} Int8Codes;

static Int8Codes int8_codes(const Quantized *format) {
    Int8Codes codes = {.flip = format->codes == CODE_UINT8 ? 0x80 : 0, .factor = format->codes == CODE_E2M1 ? 0.5f : 1.0f};
    codes.shift = format->group_cols ? __builtin_ctzll((uint64_t)format->group_cols) : 62;
    for (int i = 0; i < 16; i++)
        codes.table[i] = (int8_t)(format->codes == CODE_E2M1 ? 2.0f * E2M1_VALUES[i] : (float)(i - format->zero));
    return codes;
}

/* One weight row: its codes, the scales of every INT8_GROUP columns, and a later row's codes, to be fetched. */
typedef struct {
    const char *codes, *ahead;
    const float *scales;
} Int8Row;

/* The codes of a block, whole also at the end of a row, behind which nothing may be read. */
INLINE const char *int8_block_codes(int kind, const Int8Row *row, int64_t element, int64_t k, char padded[QUANT_BLOCK]) {
    const int block_bytes = kind == KIND_QUANT_INT4 ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    const char *codes = row->codes + element / QUANT_BLOCK * block_bytes;
    if (element + QUANT_BLOCK <= k) return codes;
    memset(padded, 0, QUANT_BLOCK);
    memcpy(padded, codes, (size_t)((k - element) * block_bytes + QUANT_BLOCK - 1) / QUANT_BLOCK);
    return padded;
}

#if HAS_QUANT_LANES
/* Sums of four neighbouring products of two vectors each: unsigned magnitudes by what takes over the signs. Of 4-bit codes
 * both sums fit into 16 bits together. */
INLINE __m256i int8_pairs(__m256i weight, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(x, weight));
}

INLINE void int8_row(int kind, int panel_rows, const Int8Codes *how, const Int8Row *row, int64_t k, const char *packed, float *out,
                     int64_t ldo) {
    const __m256i ones = _mm256_set1_epi16(1), mask = _mm256_set1_epi8(15), flip = _mm256_set1_epi8((char)how->flip);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)how->table));
    const __m256i places[2] = {_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)};
    __m256 acc[PANEL_ROWS][2];
    char padded[QUANT_BLOCK];
    UNROLL for (int m = 0; m < panel_rows; m++) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int64_t element = 0; element < k; element += QUANT_BLOCK, packed += panel_rows * INT8_BLOCK_BYTES) {
        const char *codes = int8_block_codes(kind, row, element, k, padded);
        const __m128 weight_scales = _mm_loadu_ps(row->scales + element / INT8_GROUP);
        __m256 scales[PANEL_ROWS];
        __builtin_prefetch(row->ahead + (kind == KIND_QUANT_INT4 ? element / 2 : element), 0, 3);
        if (kind == KIND_QUANT_INT8) __builtin_prefetch(row->ahead + element + CACHE_LINE, 0, 3);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            const __m128 own = _mm_loadu_ps((const float *)(packed + m * INT8_BLOCK_BYTES + QUANT_BLOCK));
            scales[m] = _mm256_castps128_ps256(_mm_mul_ps(weight_scales, own));
        }
        UNROLL for (int half = 0; half < 2; half++) {
            __m256i weights[2];
            if (kind == KIND_QUANT_INT4) {
                const __m256i bytes = _mm256_loadu_si256((const __m256i *)codes + half);
                weights[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, mask));
                weights[1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
            } else {
                UNROLL for (int i = 0; i < 2; i++)
                    weights[i] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)codes + 2 * half + i), flip);
            }
            UNROLL for (int m = 0; m < panel_rows; m++) {
                const __m256i *x = (const __m256i *)(packed + m * INT8_BLOCK_BYTES) + 2 * half;
                const __m256i low = int8_pairs(weights[0], _mm256_loadu_si256(x)), high = int8_pairs(weights[1], _mm256_loadu_si256(x + 1));
                if (kind == KIND_QUANT_INT4) {
                    const __m256 sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(low, high), ones));
                    acc[m][half] = _mm256_fmadd_ps(sums, _mm256_permutevar8x32_ps(scales[m], places[half]), acc[m][half]);
                } else {
                    const __m256 two[2] = {_mm256_cvtepi32_ps(_mm256_madd_epi16(low, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(high, ones))};
                    UNROLL for (int i = 0; i < 2; i++)
                        acc[m][i] = _mm256_fmadd_ps(two[i], _mm256_permutevar8x32_ps(scales[m], _mm256_set1_epi32(2 * half + i)), acc[m][i]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < panel_rows; m++) {
        const __m256 both = _mm256_add_ps(acc[m][0], acc[m][1]);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[m * ldo] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))) * how->factor;
    }
}
#else
INLINE void int8_row(int kind, int panel_rows, const Int8Codes *how, const Int8Row *row, int64_t k, const char *packed, float *out,
                     int64_t ldo) {
    float acc[PANEL_ROWS] = {0};
    char padded[QUANT_BLOCK];
    for (int64_t element = 0; element < k; element += QUANT_BLOCK, packed += panel_rows * INT8_BLOCK_BYTES) {
        const uint8_t *codes = (const uint8_t *)int8_block_codes(kind, row, element, k, padded);
        int8_t weights[QUANT_BLOCK]; /* as x lies */
        for (int i = 0; i < QUANT_BLOCK; i++) {
            const int nibbles = codes[i / INT8_STEP * 32 + i % 32];
            weights[i] = kind == KIND_QUANT_INT8 ? (int8_t)(codes[i] ^ how->flip) : how->table[i % INT8_STEP < 32 ? nibbles & 15 : nibbles >> 4];
        }
        for (int m = 0; m < panel_rows; m++) {
            const int8_t *x = (const int8_t *)packed + m * INT8_BLOCK_BYTES;
            for (int group = 0; group < QUANT_BLOCK / INT8_GROUP; group++) {
                float scale;
                int32_t sum = 0;
                memcpy(&scale, x + QUANT_BLOCK + 4 * group, 4);
                for (int i = 0; i < INT8_GROUP; i++) {
                    const int nibble = group / 2 * INT8_STEP + i / 16 * 32 + group % 2 * 16 + i % 16;
                    const int at = kind == KIND_QUANT_INT8 ? group * INT8_GROUP + i : nibble;
                    sum += weights[at] * x[at];
                }
                acc[m] += (float)sum * (row->scales[element / INT8_GROUP + group] * scale);
            }
        }
    }
    for (int m = 0; m < panel_rows; m++) out[m * ldo] = acc[m] * how->factor;
}
#endif

static void int8_row_of(int kind, int panel_rows, const Int8Codes *how, const Int8Row *row, int64_t k, const char *packed,
                        float *out, int64_t ldo) {
#define INT8_CASE(rows)                                                           \
    case rows:                                                                    \
        if (kind == KIND_QUANT_INT4)                                              \
            int8_row(KIND_QUANT_INT4, rows, how, row, k, packed, out, ldo);       \
        else                                                                      \
            int8_row(KIND_QUANT_INT8, rows, how, row, k, packed, out, ldo);       \
        break;
    switch (panel_rows) {
        INT8_CASE(1)
        INT8_CASE(2)
        INT8_CASE(3)
        INT8_CASE(4)
#if PANEL_ROWS == 6
        INT8_CASE(5)
        INT8_CASE(6)
#endif
    }
}

static void multiply_int8(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                          float *out, int64_t ldo, Matrix next) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t rows_ahead = LANES_AHEAD / (code_row_bytes(weight.quantized, k) + 1) + 1;
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    const Int8Codes how = int8_codes(weight.quantized);
    const int64_t num_groups = (k + INT8_GROUP - 1) / INT8_GROUP;
    float scales[num_groups + GROUP_PADDING];
    ROW_GROUPS(groups, weight, k);
    memset(scales, 0, sizeof scales);
    for (int64_t n = 0; n < num_weight_rows; n++) {
        const char *codes = weight.data + n * weight.stride, *ahead = stream_row(&stream, n + rows_ahead);
        const float *spread = weight.quantized->group_cols == INT8_GROUP ? groups.scales : scales;
        Int8Row row = {.codes = codes, .ahead = ahead ? ahead : codes, .scales = spread};
        read_scales(weight.quantized, weight.first_row + n, groups.groups, groups.scales);
        if (weight.quantized->group_cols != INT8_GROUP)
            for (int64_t i = 0; i < num_groups; i++) scales[i] = groups.scales[i * INT8_GROUP >> how.shift];
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), last = panel_start(p + 1, panels, num_rows);
            int8_row_of(kind, (int)(last - first), &how, &row, k, packed + first * row_bytes, out + first * ldo + n, ldo);
            row.ahead = codes;
        }
    }
}

static int product_kind(const Quantized *format, int x_dtype) {
    if (!format->rounds_rows) return quantized_kind(format, x_dtype);
    return format->codes == CODE_E2M1 || format->codes == CODE_UINT4 ? KIND_QUANT_INT4 : KIND_QUANT_INT8;
}
