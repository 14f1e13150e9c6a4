/* Products of blocks with rows rounded to int8 by vectors of eight sums, which AVX-512 takes too; a part of int8_blocks.h.
 *
 * One row of x is multiplied by codes as they lie. More rows are multiplied by codes that were written out.
 */

/* Exact products of 32 codes, four to a lane. */
INLINE __m256i code_products(int is_signed, Codes codes, __m256i x) {
    const __m256i w = (__m256i)codes;
#if HAS_BYTE_DOT
    (void)is_signed;
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, x);
#else
    const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Scales of a step's groups, or halves of groups, times those of x; and what minima take. */
INLINE __m256 step_scales(int has_halves, const GroupNumbers *numbers, const Int8Step *x, float scales[16], __m256 minima) {
    const __m256 of_x = _mm256_loadu_ps(x->scales);
    if (!has_halves) {
        _mm256_storeu_ps(scales, _mm256_mul_ps(_mm256_loadu_ps(numbers->scales), of_x));
        return _mm256_fmadd_ps(_mm256_loadu_ps(numbers->minima), _mm256_loadu_ps(x->sums), minima);
    }
    const __m256 low = _mm256_unpacklo_ps(of_x, of_x), high = _mm256_unpackhi_ps(of_x, of_x);
    const __m256 twice[2] = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    UNROLL for (int i = 0; i < 2; i++) {
        _mm256_storeu_ps(scales + 8 * i, _mm256_mul_ps(_mm256_loadu_ps(numbers->scales + 8 * i), twice[i]));
        minima = _mm256_fmadd_ps(_mm256_loadu_ps(numbers->minima + 8 * i), _mm256_loadu_ps(x->half_sums + 8 * i), minima);
    }
    return minima;
}

INLINE __m256 scale_of_group(int has_halves, const float scales[16], int group) {
    if (!has_halves) return _mm256_broadcast_ss(scales + group);
    const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(scales + 2 * group)));
    return _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

/* Of a row of x: sums over groups at even and at odd places, and what minima take. */
typedef struct {
    __m256 sums[2], minima;
} Int8Row;

INLINE float whole_sum(const Int8Row *row) {
    const __m256 all = _mm256_sub_ps(_mm256_add_ps(row->sums[0], row->sums[1]), row->minima);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

INLINE void clear_rows(int count, Int8Row *rows) {
    UNROLL for (int m = 0; m < count; m++) rows[m] = (Int8Row){{_mm256_setzero_ps(), _mm256_setzero_ps()}, _mm256_setzero_ps()};
}

INLINE void add_group(int has_halves, int is_signed, Codes codes, const Int8Step *x, const float scales[16], int group, Int8Row *row) {
    const __m256i products = code_products(is_signed, codes, _mm256_loadu_si256((const __m256i *)x->codes + group));
    row->sums[group % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale_of_group(has_halves, scales, group), row->sums[group % 2]);
}

/* ---- one row of x ---- */

INLINE void add_block_step(int code, const char *weight, int groups, const Int8Step *x, Int8Row *row) {
    GroupNumbers numbers;
    float scales[16];
    step_numbers(code, weight, groups, &numbers);
    row->minima = step_scales(has_groups_of_16(code), &numbers, x, scales, row->minima);
    UNROLL for (int group = 0; group < INT8_BLOCK_GROUPS; group++)
        if (group < groups)
            add_group(has_groups_of_16(code), has_signed_codes(code), int8_codes_of(code, block_of_group(code, weight, group), group), x,
                      scales, group, row);
}

INLINE void row_by_blocks(int code, Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
    const int step_bytes = BLOCK_SIZES[code - CODE_BLOCKS].bytes * (is_one_group(code) ? INT8_BLOCK_GROUPS : 1);
    const int64_t steps = k / INT8_BLOCK_STEP;
    const int rest = (int)(k % INT8_BLOCK_STEP / INT8_GROUP);
    for (int64_t n = 0; n < num_weight_rows; n++) {
        const char *step = weight.data + n * weight.stride;
        Int8Row row;
        clear_rows(1, &row);
        for (int64_t i = 0; i < steps; i++, step += step_bytes) {
            /* past the last row fetching is harmless */
            UNROLL for (int b = 0; b < step_bytes; b += CACHE_LINE) __builtin_prefetch(step + LANES_AHEAD + b, 0, 3);
            add_block_step(code, step, INT8_BLOCK_GROUPS, x + i, &row);
        }
        if (is_one_group(code) && rest) add_block_step(code, step, rest, x + steps, &row);
        out[n] = whole_sum(&row);
    }
}

static void multiply_row_of_int8(Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
#define ROW_CASE(code) \
    case code: row_by_blocks(code, weight, num_weight_rows, k, x, out); break;
    switch (weight.quantized->codes) { FOR_BLOCKS(ROW_CASE, NO_SEPARATOR) }
}

/* ---- more rows of x ---- */

INLINE void panel_steps(int has_halves, int is_signed, int panel_rows, const BlockStep *weights, int64_t steps, const Int8Step *x,
                        float *sums) {
    Int8Row rows[PANEL_ROWS];
    clear_rows(panel_rows, rows);
    for (int64_t i = 0; i < steps; i++, weights++, x += panel_rows) {
        float scales[PANEL_ROWS][16];
        UNROLL for (int m = 0; m < panel_rows; m++)
            rows[m].minima = step_scales(has_halves, &weights->numbers, x + m, scales[m], rows[m].minima);
        UNROLL for (int group = 0; group < INT8_BLOCK_GROUPS; group++)
            UNROLL for (int m = 0; m < panel_rows; m++)
                add_group(has_halves, is_signed, weights->codes[group], x + m, scales[m], group, &rows[m]);
    }
    UNROLL for (int m = 0; m < panel_rows; m++) sums[m] = whole_sum(&rows[m]);
}

/* A weight row by the rows of a panel. */
static void steps_by_panel(int64_t code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
#define PANEL_CASE(rows)                                             \
    case rows:                                                       \
        if (has_groups_of_16((int)code))                             \
            panel_steps(1, 0, rows, weights, steps, x, sums);        \
        else if (has_signed_codes((int)code))                        \
            panel_steps(0, 1, rows, weights, steps, x, sums);        \
        else                                                         \
            panel_steps(0, 0, rows, weights, steps, x, sums);        \
        break;
    switch (panel_rows) {
        PANEL_CASE(1)
        PANEL_CASE(2)
        PANEL_CASE(3)
        PANEL_CASE(4)
#if PANEL_ROWS == 6
        PANEL_CASE(5)
        PANEL_CASE(6)
#endif
    }
}
