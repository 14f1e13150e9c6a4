/* Products of quantised matrices whose codes are decoded in registers, for vectors of eight; a part of quantized_template.h.
 *
 * Codes become fp32, which is exact. 64 of them are two parts of four vectors: part p has elements 16 p to 16 p + 15 of
 * the first 32 in its lower lanes and of the last 32 in its upper lanes, vector j the elements 4 q + j of those 16 in lane q.
 * So every lane of a part belongs to one group of a multiple of 16: its sum is taken from zero and multiplied by
 * the group's scale, and no weight is rounded. Both parts share a sum where groups have 32 columns or more.
 */

/* How codes are decoded: 4 bits by a table; 4 bits and a zero point for each group; fp8; 8-bit integers and a zero point
 * for each group. */
enum { DECODE_TABLE4, DECODE_ZEROS4, DECODE_E4M3, DECODE_BYTES, NUM_DECODERS };
enum { STEP = 64, NUM_PARTS = 2, MOST_WEIGHT_ROWS = 2 };

typedef struct {
    int shift;                /* binary logarithm of a group's columns */
    __m256i expand[NUM_PARTS]; /* group of each lane, counted from the first of the 64 codes */
    __m256i low, high;        /* bytes of the upper halves of fp32, by 4-bit codes, or by the upper four bits of fp8 */
    __m256i flip;             /* what makes codes unsigned */
} Lanes;

/* One weight row: its codes, and where a later row's are, to be fetched. */
typedef struct {
    const char *codes, *ahead;
    const float *scales;
    const int32_t *zeros;
} Source;

/* 64 codes before they are fp32: bytes of the upper halves of fp32 for the low and the high nibbles, or 8-bit codes by parts. */
typedef struct {
    __m256i low[2], high[2];
    int is_special;
} Step;

INLINE __m256 scales_at(const Lanes *lanes, const Source *source, int64_t element, int part) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(source->scales + (element >> lanes->shift)), lanes->expand[part]);
}

/* As fp32, and as much above them as codes of 4 bits are. */
INLINE __m256 zeros_at(const Lanes *lanes, const Source *source, int64_t element, int part, float above) {
    const __m256i zeros = _mm256_loadu_si256((const __m256i *)(source->zeros + (element >> lanes->shift)));
    return _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_permutevar8x32_epi32(zeros, lanes->expand[part])), _mm256_set1_ps(above));
}

/* Sixteen bytes here, and sixteen 32 bytes on. */
INLINE __m256i load_part(const char *codes) {
    const __m128i first = _mm_loadu_si128((const __m128i *)codes);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)(codes + 32)), 1);
}

/* ---- decoding ---- */

/* fp8 in the highest byte of each lane. */
INLINE __m256 wide_e4m3(__m256i code) {
    const __m256i magnitude = _mm256_and_si256(_mm256_srli_epi32(code, 4), _mm256_set1_epi32(0x07f00000));
    const __m256i normal = _mm256_add_epi32(magnitude, _mm256_set1_epi32(120 << 23));
    const __m256 above = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(121 << 23)));
    const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8 << 20), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x07f00000));
    __m256 value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), _mm256_sub_ps(above, _mm256_set1_ps(0.015625f)),
                                    _mm256_castsi256_ps(is_subnormal));
    value = _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_castsi256_ps(is_nan));
    return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_and_si256(code, _mm256_set1_epi32((int)0x80000000u))));
}

/* Twice the magnitudes of normal fp8 codes are 0x10 to 0xfc: what lies above zero here is a subnormal, a zero or a NaN. */
INLINE __m256i specials(__m256i codes) {
    const __m256i from_normal = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), _mm256_set1_epi8(0x10));
    return _mm256_subs_epu8(from_normal, _mm256_set1_epi8((char)0xec));
}

/* Pairs of bytes that the vectors of a part are made of; elements 4 q and 4 q + 1 lie side by side in the first. */
INLINE void read_step(int decoder, const Lanes *lanes, const char *codes, Step *step) {
    if (decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)codes), mask = _mm256_set1_epi8(15);
        const __m256i nibbles[2] = {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
        UNROLL for (int i = 0; i < 2; i++) {
            step->low[i] = decoder == DECODE_TABLE4 ? _mm256_shuffle_epi8(lanes->low, nibbles[i]) : nibbles[i];
            /* 128 and more: its bf16 has the seven bits of an integer below it */
            step->high[i] = decoder == DECODE_TABLE4 ? _mm256_shuffle_epi8(lanes->high, nibbles[i]) : _mm256_set1_epi8(0x43);
        }
        return;
    }
    UNROLL for (int part = 0; part < NUM_PARTS; part++) step->low[part] = load_part(codes + 16 * part);
    if (decoder == DECODE_E4M3) {
        const __m256i found = _mm256_or_si256(specials(step->low[0]), specials(step->low[1]));
        step->is_special = !_mm256_testz_si256(found, found);
    }
}

/* Of upper halves of fp32 that lie side by side. */
INLINE __m256 even_halves(__m256i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)); }
INLINE __m256 odd_halves(__m256i halves) {
    return _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32((int)0xffff0000u)));
}

/* fp8: the upper half of fp32 is a table of sign and upper exponent bits and, but for special codes, the code's other bits. */
INLINE void decode_e4m3(const Lanes *lanes, const Step *step, int part, __m256 out[4]) {
    if (__builtin_expect(step->is_special, 0)) {
        UNROLL for (int j = 0; j < 4; j++) out[j] = wide_e4m3(_mm256_slli_epi32(step->low[part], 24 - 8 * j));
        return;
    }
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i codes = _mm256_shuffle_epi8(step->low[part], _mm256_broadcastsi128_si256(order));
    const __m256i high = _mm256_shuffle_epi8(lanes->high, _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15)));
    const __m256i low = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8((char)0xf0));
    const __m256i first = _mm256_unpacklo_epi8(low, high), last = _mm256_unpackhi_epi8(low, high);
    out[0] = even_halves(first), out[1] = odd_halves(first);
    out[2] = even_halves(last), out[3] = odd_halves(last);
}

INLINE void decode_part(int decoder, const Lanes *lanes, const Source *source, const Step *step, int64_t element, int part,
                        __m256 out[4]) {
    if (decoder == DECODE_E4M3) {
        decode_e4m3(lanes, step, part, out);
        return;
    }
    if (decoder == DECODE_BYTES) {
        const __m256 zeros = zeros_at(lanes, source, element, part, 0.0f);
        const __m256i codes = _mm256_xor_si256(step->low[part], lanes->flip);
        UNROLL for (int j = 0; j < 4; j++) {
            const __m256i code = _mm256_and_si256(_mm256_srli_epi32(codes, 8 * j), _mm256_set1_epi32(255));
            out[j] = _mm256_sub_ps(_mm256_cvtepi32_ps(code), zeros);
        }
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i halves = part ? _mm256_unpackhi_epi8(step->low[i], step->high[i]) : _mm256_unpacklo_epi8(step->low[i], step->high[i]);
        out[i] = even_halves(halves), out[2 + i] = odd_halves(halves);
    }
    if (decoder == DECODE_ZEROS4) {
        const __m256 zeros = zeros_at(lanes, source, element, part, 128.0f);
        UNROLL for (int j = 0; j < 4; j++) out[j] = _mm256_sub_ps(out[j], zeros);
    }
}

/* ---- some weight rows by one panel ---- */

INLINE void lanes_step(int decoder, int sums_of_step, int weight_rows, int panel_rows, const Lanes *lanes, const Source *sources,
                       const char *const codes[], const float *x, int64_t element, Vec acc[PANEL_ROWS][MOST_WEIGHT_ROWS]) {
    Step steps[MOST_WEIGHT_ROWS];
    Vec sums[PANEL_ROWS][MOST_WEIGHT_ROWS];
    UNROLL for (int n = 0; n < weight_rows; n++) read_step(decoder, lanes, codes[n], &steps[n]);
    UNROLL for (int part = 0; part < NUM_PARTS; part++) {
        Vec values[MOST_WEIGHT_ROWS][4];
        UNROLL for (int n = 0; n < weight_rows; n++) decode_part(decoder, lanes, &sources[n], &steps[n], element, part, values[n]);
        if (!part || sums_of_step == 2)
            UNROLL for (int i = 0; i < panel_rows * weight_rows; i++) sums[i / weight_rows][i % weight_rows] = vec_zero();
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int m = 0; m < panel_rows; m++) {
                const Vec own = vec_load_f32(x + m * QUANT_BLOCK + part * 4 * LANES + j * LANES);
                UNROLL for (int n = 0; n < weight_rows; n++) sums[m][n] = vec_fma(sums[m][n], values[n][j], own);
            }
        if (!part && sums_of_step == 1) continue;
        UNROLL for (int n = 0; n < weight_rows; n++) {
            const Vec scales = scales_at(lanes, &sources[n], element, part);
            UNROLL for (int m = 0; m < panel_rows; m++) acc[m][n] = vec_fma(acc[m][n], sums[m][n], scales);
        }
    }
}

INLINE void lanes_rows(int decoder, int sums_of_step, int weight_rows, int panel_rows, const Lanes *lanes, const Source *sources,
                       int64_t k, const char *packed, float *out, int64_t ldo) {
    const int step_bytes = decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4 ? STEP / 2 : STEP;
    const float *x = (const float *)packed;
    const char *codes[MOST_WEIGHT_ROWS], *ahead[MOST_WEIGHT_ROWS];
    Vec acc[PANEL_ROWS][MOST_WEIGHT_ROWS];
    UNROLL for (int n = 0; n < weight_rows; n++) codes[n] = sources[n].codes, ahead[n] = sources[n].ahead;
    UNROLL for (int i = 0; i < panel_rows * weight_rows; i++) acc[i / weight_rows][i % weight_rows] = vec_zero();
    int64_t element = 0;
    for (; element + STEP <= k; element += STEP) {
        lanes_step(decoder, sums_of_step, weight_rows, panel_rows, lanes, sources, codes, x, element, acc);
        UNROLL for (int n = 0; n < weight_rows; n++) {
            __builtin_prefetch(ahead[n], 0, 3);
            codes[n] += step_bytes, ahead[n] += step_bytes;
        }
        /* the second half of a block of every row, or the next block */
        x += element % QUANT_BLOCK ? panel_rows * QUANT_BLOCK - STEP : STEP;
    }
    if (element < k) {
        /* The row may end at the end of the mapped memory: never read past it. */
        char padded[MOST_WEIGHT_ROWS][STEP] = {{0}};
        const size_t bytes = (size_t)((k - element) * step_bytes + STEP - 1) / STEP;
        UNROLL for (int n = 0; n < weight_rows; n++) {
            memcpy(padded[n], codes[n], bytes);
            codes[n] = padded[n];
        }
        lanes_step(decoder, sums_of_step, weight_rows, panel_rows, lanes, sources, codes, x, element, acc);
    }
    UNROLL for (int m = 0; m < panel_rows; m++) {
        float sums[4];
        vec_four_sums(acc[m][0], weight_rows > 1 ? acc[m][weight_rows - 1] : vec_zero(), vec_zero(), vec_zero(), sums);
        UNROLL for (int n = 0; n < weight_rows; n++) out[m * ldo + n] = sums[n];
    }
}

typedef void (*LanesRows)(const Lanes *lanes, const Source *sources, int64_t k, const char *packed, float *out, int64_t ldo);

#define DEFINE_LANES_ROWS(decoder, sums, rows, panel)                                                                       \
    static void lanes_##decoder##_##sums##_##rows##_##panel(const Lanes *lanes, const Source *sources, int64_t k,           \
                                                            const char *packed, float *out, int64_t ldo) {                 \
        lanes_rows(decoder, sums, rows, panel, lanes, sources, k, packed, out, ldo);                                        \
    }
#define NAME_LANES_ROWS(decoder, sums, rows, panel) lanes_##decoder##_##sums##_##rows##_##panel
#define FOR_LANES_PANELS(macro, decoder, sums, rows, separator)                                                    \
    macro(decoder, sums, rows, 1) separator() macro(decoder, sums, rows, 2) separator() macro(decoder, sums, rows, 3) separator() \
        macro(decoder, sums, rows, 4)
#define DEFINE_DECODER(decoder)                                                                                       \
    FOR_LANES_PANELS(DEFINE_LANES_ROWS, decoder, 1, 1, NO_SEPARATOR) FOR_LANES_PANELS(DEFINE_LANES_ROWS, decoder, 1, 2, NO_SEPARATOR) \
    FOR_LANES_PANELS(DEFINE_LANES_ROWS, decoder, 2, 1, NO_SEPARATOR) FOR_LANES_PANELS(DEFINE_LANES_ROWS, decoder, 2, 2, NO_SEPARATOR)
#define NAME_LANES(decoder, sums, rows) {FOR_LANES_PANELS(NAME_LANES_ROWS, decoder, sums, rows, COMMA)}
#define NAME_DECODER(decoder) \
    {{NAME_LANES(decoder, 1, 1), NAME_LANES(decoder, 1, 2)}, {NAME_LANES(decoder, 2, 1), NAME_LANES(decoder, 2, 2)}}

DEFINE_DECODER(DECODE_TABLE4)
DEFINE_DECODER(DECODE_ZEROS4)
DEFINE_DECODER(DECODE_E4M3)
DEFINE_DECODER(DECODE_BYTES)

static const LanesRows LANES_ROWS[NUM_DECODERS][2][MOST_WEIGHT_ROWS][PANEL_ROWS] = {
    NAME_DECODER(DECODE_TABLE4), NAME_DECODER(DECODE_ZEROS4), NAME_DECODER(DECODE_E4M3), NAME_DECODER(DECODE_BYTES)};

/* ---- whole matrices ---- */

static int quantized_kind(const Quantized *format, int x_dtype) {
    const int64_t group = format->group_cols;
    (void)x_dtype;
    return !is_in_blocks(format) && (!group || (group >= 16 && !(group & (group - 1)))) ? KIND_QUANT_F32 : KIND_QUANT;
}

static int decoder_of(const Quantized *format) {
    switch (format->codes) {
        case CODE_E2M1: return DECODE_TABLE4;
        case CODE_E4M3: return DECODE_E4M3;
        case CODE_UINT4: return format->zeros || format->zero > 15 ? DECODE_ZEROS4 : DECODE_TABLE4;
        default: return DECODE_BYTES;
    }
}

static void prepare_lanes(const Quantized *format, Lanes *lanes) {
    uint8_t low[16], high[16];
    int32_t expand[NUM_PARTS][LANES];
    lanes->shift = group_shift(format);
    for (int part = 0; part < NUM_PARTS; part++) {
        for (int lane = 0; lane < LANES; lane++) expand[part][lane] = (int32_t)((int64_t)(lane / 4 * 32 + part * 16) >> lanes->shift);
        lanes->expand[part] = _mm256_loadu_si256((const __m256i *)expand[part]);
    }
    for (int i = 0; i < 16; i++) {
        const float value = format->codes == CODE_E2M1 ? E2M1_VALUES[i] : (float)(i - format->zero);
        low[i] = (uint8_t)(bits_of(value) >> 16);
        high[i] = format->codes == CODE_E4M3 ? (uint8_t)((i & 8) << 4 | (0x3c + (i & 7))) : (uint8_t)(bits_of(value) >> 24);
    }
    lanes->low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    lanes->high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
    lanes->flip = _mm256_set1_epi8(format->codes == CODE_INT8 ? (char)0x80 : 0);
}

static void multiply_lanes(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo, Matrix next) {
    const Quantized *format = weight.quantized;
    const int decoder = decoder_of(format), sums_of_step = format->group_cols == 16 ? 2 : 1;
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t rows_ahead = LANES_AHEAD / (code_row_bytes(format, k) + 1) + 1, scale_bytes = fetched_scale_bytes(format, k);
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    Lanes lanes;
    ROW_GROUPS(first_row, weight, k);
    ROW_GROUPS(second_row, weight, k);
    RowGroups *rows[MOST_WEIGHT_ROWS] = {&first_row, &second_row};
    prepare_lanes(format, &lanes);
    if (format->codes == CODE_INT8)
        for (int64_t i = 0; i < first_row.groups; i++) first_row.zeros[i] = second_row.zeros[i] = 128;
    for (int64_t n = 0; n < num_weight_rows; n += MOST_WEIGHT_ROWS) {
        const int64_t count = num_weight_rows - n < MOST_WEIGHT_ROWS ? num_weight_rows - n : MOST_WEIGHT_ROWS;
        Source sources[MOST_WEIGHT_ROWS];
        for (int64_t i = 0; i < count; i++) {
            const char *codes = weight.data + (n + i) * weight.stride, *ahead = stream_row(&stream, n + i + rows_ahead);
            read_groups(rows[i], weight.first_row + n + i);
            fetch_scales(weight, n + i + rows_ahead < num_weight_rows ? n + i + rows_ahead : n, scale_bytes);
            sources[i] = (Source){.codes = codes, .ahead = ahead ? ahead : codes, .scales = rows[i]->scales, .zeros = rows[i]->zeros};
        }
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), last = panel_start(p + 1, panels, num_rows);
            LANES_ROWS[decoder][sums_of_step - 1][count - 1][last - first - 1](&lanes, sources, k, packed + first * row_bytes,
                                                                              out + first * ldo + n, ldo);
            for (int64_t i = 0; i < count; i++) sources[i].ahead = sources[i].codes;
        }
    }
}
