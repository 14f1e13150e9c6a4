/* Products of blocks with scales of their own by rows of x rounded to int8.
 *
 * A weight is code * scale - minimum. Codes are unsigned: what is subtracted from them, times the scale, counts as the
 * minimum; where pairs of products would not fit in 16 bits, codes are signed and nothing is subtracted. Products of 32
 * codes, or of 16 that share a scale, are summed as integers, which is exact, and multiplied by both scales in fp32; minima
 * are multiplied by the sum of the 32 or 16 values of x. These sums add up in one order, whatever the other rows are.
 *
 * For one row of x codes are used as they lie; for more rows, the codes of a few weight rows are written out first, a byte
 * each. */
#pragma once

#include "formats/blocks.h"
#include "formats/int8.h"

enum { INT8_GROUPS_OF_STEP = INT8_BLOCK_STEP / INT8_GROUP, INT8_PAIRS = INT8_GROUPS_OF_STEP / 2 };

/* A packed step of x: codes in order, and the sums of the values of each group and of each half. */
typedef struct {
    uint8_t codes[INT8_BLOCK_STEP];
    float scales[INT8_GROUPS_OF_STEP], sums[INT8_GROUPS_OF_STEP], half_sums[2 * INT8_GROUPS_OF_STEP];
} Int8Step;

/* Weights of a step. Numbers: the scales of eight groups, then their minima; or those of 16 halves. Without minima the
 * scales come twice, and `minimum_factor` makes up for it in the end. */
typedef struct {
    Codes codes[INT8_GROUPS_OF_STEP];
    float numbers[4 * INT8_GROUPS_OF_STEP];
} BlockStep;

/* Whether codes are bytes that use all bits: pairs of products fit in 16 bits only if codes are signed. */
INLINE int has_signed_codes(int code) { return !HAS_BF16_DOT && TRAITS(code).int8_zero == 128; }

/* What is subtracted from codes. */
INLINE int int8_zero(int code) { return has_signed_codes(code) ? 0 : TRAITS(code).int8_zero; }

INLINE float minimum_factor(int code) { return TRAITS(code).has_minimum ? 1.0f : (float)int8_zero(code); }

INLINE int is_one_group(int code) { return TRAITS(code).codes == INT8_GROUP; }

INLINE int int8_step_bytes(int code) { return TRAITS(code).bytes * (is_one_group(code) ? INT8_GROUPS_OF_STEP : 1); }

#if defined(__AVX2__)
INLINE Codes int8_table(const int8_t table[16], int zero, Codes codes) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)zero));
    return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
}
#endif

INLINE Codes int8_codes_of(int code, const char *step, int group) {
    const uint8_t *src = (const uint8_t *)step + (is_one_group(code) ? group * TRAITS(code).bytes : 0);
#if defined(__AVX2__)
    const Codes codes = codes_of(code, src, group, 0);
    if (code == CODE_Q8_0) return codes ^ (uint8_t)int8_zero(code);
    if (code == CODE_MXFP4_BLOCK) return int8_table(DOUBLED_E2M1, int8_zero(code), codes);
    return code == CODE_IQ4_NL || code == CODE_IQ4_XS ? int8_table(NONLINEAR_VALUES, int8_zero(code), codes) : codes;
#else
    Bytes halves[2];
    for (int half = 0; half < 2; half++) halves[half] = half_numbers(code, src, group, half) + (uint8_t)int8_zero(code);
    return codes_at((const uint8_t *)halves);
#endif
}

#if HAS_QUANT_LANES
/* One number of each of eight blocks, of which `groups` are there. They are put together in registers: a wide load after
 * many small stores would wait. */
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
    const int apart = TRAITS(code).bytes;
    return code == CODE_MXFP4_BLOCK ? eight_e8m0(step, apart, groups) : eight_halves(step, apart, groups);
}

/* The minima of blocks that have them, else the scales again. */
INLINE __m256 eight_minima(int code, const char *step, int groups, __m256 scales) {
    if (!TRAITS(code).has_minimum) return scales;
    return _mm256_xor_ps(eight_halves(step + 2, TRAITS(code).bytes, groups), _mm256_set1_ps(-0.0f));
}

/* Scales of eight groups and then their minima, or of 16 halves. */
typedef struct {
    Vec numbers[2 * 16 / LANES];
} StepNumbers;

INLINE void load_numbers(int has_halves, const float *src, StepNumbers *out) {
    UNROLL for (int i = 0; i < (1 + has_halves) * 16 / LANES; i++) out->numbers[i] = vec_load_f32(src + LANES * i);
}

INLINE void store_numbers(int has_halves, const StepNumbers *numbers, float *dst) {
    UNROLL for (int i = 0; i < (1 + has_halves) * 16 / LANES; i++) vec_store_f32(dst + LANES * i, numbers->numbers[i]);
}

/* For a row of x: sums over groups, or pairs of groups, at even and at odd places, and the sum of the minima. */
typedef struct {
    Vec sums[2], minima;
} Int8Row;

INLINE void clear_rows(int count, Int8Row *rows) {
    UNROLL for (int m = 0; m < count; m++) rows[m] = (Int8Row){{vec_zero(), vec_zero()}, vec_zero()};
}

#if LANES == 8
/* A lane has the sums of four columns. */

/* Codes of two groups. */
typedef struct {
    Codes codes[2];
} CodePair;

INLINE CodePair pair_of(int code, const char *step, int pair, int groups) {
    const Codes first = int8_codes_of(code, step, 2 * pair);
    return (CodePair){{first, 2 * pair + 1 < groups ? int8_codes_of(code, step, 2 * pair + 1) : first}};
}

INLINE CodePair load_pair(const Codes *src) { return (CodePair){{src[0], src[1]}}; }
INLINE void store_pair(CodePair pair, Codes *dst) { dst[0] = pair.codes[0], dst[1] = pair.codes[1]; }

INLINE void numbers_of(int code, const char *step, int groups, StepNumbers *out) {
    if (is_one_group(code)) {
        out->numbers[0] = eight_scales(code, step, groups);
        out->numbers[1] = eight_minima(code, step, groups, out->numbers[0]);
        return;
    }
    const int halves = TRAITS(code).has_groups_of_16;
    GroupNumbers numbers;
    block_numbers(code, (const uint8_t *)step, &numbers);
    UNROLL for (int i = 0; i < 1 + halves; i++) {
        out->numbers[i] = vec_load_f32(numbers.scales + 8 * i);
        out->numbers[1 + halves + i] = TRAITS(code).has_minimum ? vec_load_f32(numbers.minima + 8 * i) : out->numbers[i];
    }
}

INLINE float whole_sum(int has_halves, const Int8Row *row, float factor) {
    (void)has_halves;
    const __m256 all = _mm256_fnmadd_ps(row->minima, _mm256_set1_ps(factor), _mm256_add_ps(row->sums[0], row->sums[1]));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* Scales of groups, or of their halves, times those of x. */
typedef struct {
    float scales[16];
} StepScales;

INLINE void step_scales(int has_halves, const StepNumbers *numbers, const Int8Step *x, Int8Row *row, StepScales *out) {
    const __m256 of_x = _mm256_loadu_ps(x->scales);
    const __m256 low = _mm256_unpacklo_ps(of_x, of_x), high = _mm256_unpackhi_ps(of_x, of_x);
    const __m256 twice[2] = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    UNROLL for (int i = 0; i < 1 + has_halves; i++) {
        _mm256_storeu_ps(out->scales + 8 * i, _mm256_mul_ps(numbers->numbers[i], has_halves ? twice[i] : of_x));
        row->minima = _mm256_fmadd_ps(numbers->numbers[1 + has_halves + i], _mm256_loadu_ps((has_halves ? x->half_sums : x->sums) + 8 * i), row->minima);
    }
}

INLINE __m256 scale_of_group(int has_halves, const StepScales *scales, int group) {
    if (!has_halves) return _mm256_broadcast_ss(scales->scales + group);
    const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(scales->scales + 2 * group)));
    return _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

INLINE void add_pair(int has_halves, int is_signed, CodePair pair, const Int8Step *x, const StepScales *scales, int place, Int8Row *row) {
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i w = (__m256i)pair.codes[i], of_x = _mm256_loadu_si256((const __m256i *)x->codes + 2 * place + i);
        const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(of_x, w)) : _mm256_maddubs_epi16(w, of_x);
        const __m256 sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        row->sums[i] = _mm256_fmadd_ps(sums, scale_of_group(has_halves, scales, 2 * place + i), row->sums[i]);
    }
}
#else
/* A lane has the sums of four columns; the lower half of a vector belongs to a group at an even place. Minima are summed in
 * the upper half. */

typedef __m512i CodePair;

INLINE __m512i joined(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
INLINE __m512 joined_ps(__m256 low, __m256 high) { return _mm512_castsi512_ps(joined(_mm256_castps_si256(low), _mm256_castps_si256(high))); }

/* 64 codes of Q6_K: four bits from 64 bytes, two from 32 bytes, of which the first half has the lower ones. */
INLINE CodePair q6_k_pair(const char *src, int pair) {
    const __m512i four = _mm512_loadu_si512(src + pair / 2 * 64);
    const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(src + 128 + pair / 2 * 32)));
    const __m512i low = _mm512_and_si512(pair % 2 ? _mm512_srli_epi16(four, 4) : four, _mm512_set1_epi8(15));
    const __m512i shifts = pair % 2 ? _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2) : _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2);
    const __m512i high = pair % 2 ? _mm512_srlv_epi64(two, shifts) : _mm512_sllv_epi64(two, shifts);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
}

INLINE CodePair pair_of(int code, const char *step, int pair, int groups) {
    if (code == CODE_Q6_K) return q6_k_pair(step, pair);
    if (code == CODE_Q4_K) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(step + 16 + 32 * pair));
        return _mm512_and_si512(joined(bytes, _mm256_srli_epi16(bytes, 4)), _mm512_set1_epi8(15));
    }
    const __m256i first = (__m256i)int8_codes_of(code, step, 2 * pair);
    return joined(first, 2 * pair + 1 < groups ? (__m256i)int8_codes_of(code, step, 2 * pair + 1) : first);
}

INLINE CodePair load_pair(const Codes *src) { return _mm512_loadu_si512(src); }
INLINE void store_pair(CodePair pair, Codes *dst) { _mm512_storeu_si512(dst, pair); }

INLINE void numbers_of(int code, const char *step, int groups, StepNumbers *out) {
    if (is_one_group(code)) {
        const __m256 scales = eight_scales(code, step, groups);
        out->numbers[0] = joined_ps(scales, eight_minima(code, step, groups, scales));
        return;
    }
    if (code == CODE_Q4_K || code == CODE_Q5_K) {
        const __m512 factors = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)six_bit_factors((const uint8_t *)step + 4)));
        const __m512 shared = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_loadu_si32(step)));
        const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        out->numbers[0] = _mm512_mul_ps(factors, _mm512_permutexvar_ps(places, shared));
        return;
    }
    GroupNumbers numbers;
    block_numbers(code, (const uint8_t *)step, &numbers);
    if (TRAITS(code).has_groups_of_16) {
        out->numbers[0] = _mm512_loadu_ps(numbers.scales);
        out->numbers[1] = TRAITS(code).has_minimum ? _mm512_loadu_ps(numbers.minima) : out->numbers[0];
    } else {
        out->numbers[0] = joined_ps(_mm256_loadu_ps(numbers.scales), _mm256_loadu_ps(numbers.scales));
    }
}

INLINE float whole_sum(int has_halves, const Int8Row *row, float factor) {
    const __m512 minima = has_halves ? row->minima : _mm512_maskz_mov_ps(0xff00, row->minima);
    return _mm512_reduce_add_ps(_mm512_fnmadd_ps(minima, _mm512_set1_ps(factor), _mm512_add_ps(row->sums[0], row->sums[1])));
}

/* Scales of groups, or of their halves, times those of x. */
typedef struct {
    __m512 scales;
} StepScales;

INLINE void step_scales(int has_halves, const StepNumbers *numbers, const Int8Step *x, Int8Row *row, StepScales *out) {
    if (!has_halves) {
        const __m512 both = _mm512_mul_ps(numbers->numbers[0], _mm512_loadu_ps(x->scales)); /* and the sums after them */
        row->minima = _mm512_add_ps(row->minima, both);
        out->scales = both;
        return;
    }
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    row->minima = _mm512_fmadd_ps(numbers->numbers[1], _mm512_loadu_ps(x->half_sums), row->minima);
    out->scales = _mm512_mul_ps(numbers->numbers[0], _mm512_permutexvar_ps(twice, _mm512_loadu_ps(x->scales)));
}

/* Exact products of 64 codes, four to a lane. */
INLINE __m512i code_products(int is_signed, __m512i w, __m512i x) {
#if HAS_BF16_DOT
    (void)is_signed;
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
#else
    if (is_signed) x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x), w = _mm512_abs_epi8(w);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#endif
}

INLINE void add_pair(int has_halves, int is_signed, CodePair codes, const Int8Step *x, const StepScales *scales, int place, Int8Row *row) {
    const __m512i groups = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i places = _mm512_add_epi32(has_halves ? halves : groups, _mm512_set1_epi32((has_halves ? 4 : 2) * place));
    const __m512 sums = _mm512_cvtepi32_ps(code_products(is_signed, codes, _mm512_loadu_si512(x->codes + 64 * place)));
    row->sums[place % 2] = _mm512_fmadd_ps(sums, _mm512_permutexvar_ps(places, scales->scales), row->sums[place % 2]);
}
#endif

/* One row of x by a weight row, over a step with `groups` groups left. */
INLINE void add_block_step(int code, const char *weight, int groups, const Int8Step *x, Int8Row *row) {
    StepNumbers numbers;
    StepScales scales;
    numbers_of(code, weight, groups, &numbers);
    step_scales(TRAITS(code).has_groups_of_16, &numbers, x, row, &scales);
    UNROLL for (int pair = 0; pair < INT8_PAIRS; pair++)
        if (2 * pair < groups)
            add_pair(TRAITS(code).has_groups_of_16, has_signed_codes(code), pair_of(code, weight, pair, groups), x, &scales, pair, row);
}

INLINE void row_by_blocks(int code, Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
    const int64_t steps = k / INT8_BLOCK_STEP;
    const int rest = (int)(k % INT8_BLOCK_STEP / INT8_GROUP);
    for (int64_t n = 0; n < num_weight_rows; n++) {
        const char *step = weight.data + n * weight.stride;
        Int8Row row;
        clear_rows(1, &row);
        for (int64_t i = 0; i < steps; i++, step += int8_step_bytes(code)) {
            /* fetching past the last row is harmless */
            UNROLL for (int b = 0; b < int8_step_bytes(code); b += CACHE_LINE) __builtin_prefetch(step + LANES_AHEAD + b, 0, 3);
            add_block_step(code, step, INT8_GROUPS_OF_STEP, x + i, &row);
        }
        if (is_one_group(code) && rest) add_block_step(code, step, rest, x + steps, &row);
        out[n] = whole_sum(TRAITS(code).has_groups_of_16, &row, minimum_factor(code));
    }
}

static void multiply_row_of_int8(Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
#define ROW_CASE(code) \
    case code: row_by_blocks(code, weight, num_weight_rows, k, x, out); break;
    switch (weight.quantized->codes) { FOR_BLOCKS(ROW_CASE) }
}

INLINE void write_step(int code, const char *weight, int groups, BlockStep *out) {
    StepNumbers numbers;
    numbers_of(code, weight, groups, &numbers);
    store_numbers(TRAITS(code).has_groups_of_16, &numbers, out->numbers);
    UNROLL for (int pair = 0; pair < INT8_PAIRS; pair++)
        if (2 * pair < groups) store_pair(pair_of(code, weight, pair, groups), out->codes + 2 * pair);
}

INLINE void panel_steps(int has_halves, int is_signed, int panel_rows, const BlockStep *weights, int64_t steps, const Int8Step *x,
                        float factor, float *sums) {
    Int8Row rows[PANEL_ROWS];
    clear_rows(panel_rows, rows);
    for (int64_t i = 0; i < steps; i++, weights++, x += panel_rows) {
        StepNumbers numbers;
        load_numbers(has_halves, weights->numbers, &numbers);
        StepScales scales[PANEL_ROWS];
        UNROLL for (int m = 0; m < panel_rows; m++) step_scales(has_halves, &numbers, x + m, &rows[m], &scales[m]);
        UNROLL for (int pair = 0; pair < INT8_PAIRS; pair++)
            UNROLL for (int m = 0; m < panel_rows; m++)
                add_pair(has_halves, is_signed, load_pair(weights->codes + 2 * pair), x + m, &scales[m], pair, &rows[m]);
    }
    UNROLL for (int m = 0; m < panel_rows; m++) sums[m] = whole_sum(has_halves, &rows[m], factor);
}

/* A weight row by the rows of a panel. */
static __attribute__((noinline)) void steps_by_panel(int code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
    const float factor = minimum_factor(code);
#define PANEL_CASE(halves, rows) \
    case rows: panel_steps(halves, is_signed, rows, weights, steps, x, factor, sums); break;
#define BY_PANEL_ROWS(halves, has_sign)                              \
    do {                                                             \
        enum { is_signed = has_sign };                               \
        switch (panel_rows) { FOR_PANEL_ROWS(PANEL_CASE, halves) }   \
    } while (0)
    if (TRAITS(code).has_groups_of_16)
        BY_PANEL_ROWS(1, 0);
    else if (has_signed_codes(code))
        BY_PANEL_ROWS(0, 1);
    else
        BY_PANEL_ROWS(0, 0);
}
#else
INLINE void write_step(int code, const char *weight, int groups, BlockStep *out) {
    const int halves = TRAITS(code).has_groups_of_16 ? 2 : 1, count = INT8_GROUPS_OF_STEP * halves;
    for (int group = 0; group < groups; group++) out->codes[group] = int8_codes_of(code, weight, group);
    if (!is_one_group(code)) {
        GroupNumbers numbers;
        block_numbers(code, (const uint8_t *)weight, &numbers);
        memcpy(out->numbers, numbers.scales, (size_t)count * 4);
        memcpy(out->numbers + count, TRAITS(code).has_minimum ? numbers.minima : numbers.scales, (size_t)count * 4);
        return;
    }
    for (int group = 0; group < INT8_GROUPS_OF_STEP; group++) {
        GroupNumbers numbers = {{0}, {0}};
        if (group < groups) block_numbers(code, (const uint8_t *)weight + group * TRAITS(code).bytes, &numbers);
        out->numbers[group] = numbers.scales[0];
        out->numbers[count + group] = TRAITS(code).has_minimum ? numbers.minima[0] : numbers.scales[0];
    }
}

/* A weight row by the rows of a panel. */
static __attribute__((noinline)) void steps_by_panel(int code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
    const int halves = TRAITS(code).has_groups_of_16 ? 2 : 1, columns = INT8_GROUP / halves, count = INT8_GROUPS_OF_STEP * halves;
    float acc[PANEL_ROWS][2] = {0}, minima[PANEL_ROWS] = {0};
    for (int64_t i = 0; i < steps; i++, weights++) {
        for (int m = 0; m < panel_rows; m++, x++) {
            for (int part = 0; part < count; part++) {
                /* unsigned codes have fewer bits than signed bytes */
                const int8_t *codes = (const int8_t *)weights->codes + part * columns, *of_x = (const int8_t *)x->codes + part * columns;
                int32_t sum = 0;
                for (int j = 0; j < columns; j++) sum += codes[j] * of_x[j];
                acc[m][part / halves % 2] += (float)sum * (weights->numbers[part] * x->scales[part / halves]);
                minima[m] += weights->numbers[count + part] * (halves == 2 ? x->half_sums : x->sums)[part];
            }
        }
    }
    for (int m = 0; m < panel_rows; m++) sums[m] = (acc[m][0] + acc[m][1]) - minima[m] * minimum_factor(code);
}
#endif

INLINE void write_steps(int code, const char *weight, int64_t k, BlockStep *out) {
    for (; k > 0; k -= INT8_BLOCK_STEP, weight += int8_step_bytes(code), out++) {
        if (k >= INT8_BLOCK_STEP) {
            write_step(code, weight, INT8_GROUPS_OF_STEP, out);
        } else {
            memset(out->codes, 0, sizeof out->codes);
            write_step(code, weight, (int)(k / INT8_GROUP), out);
        }
    }
}

static void write_row(int64_t code, const char *weight, int64_t k, BlockStep *out) {
#define WRITE_CASE(code) \
    case code: write_steps(code, weight, k, out); break;
    switch (code) { FOR_BLOCKS(WRITE_CASE) }
}

static void pack_int8_blocks(const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows, int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? round_up(k, INT8_BLOCK_STEP) : last_k;
    for (int64_t at = first_k; at < end; at += INT8_GROUP) {
        Int8Step *step = (Int8Step *)panel + at / INT8_BLOCK_STEP * panel_rows + row;
        const int group = (int)(at % INT8_BLOCK_STEP / INT8_GROUP);
        float values[INT8_GROUP];
        char rounded[INT8_BLOCK_BYTES];
        int sums[2] = {0};
        load_group(src, dtype, at - first_k, last_k - at, values);
        store_int8_group(KIND_QUANT_INT8, values, rounded, 0);
        memcpy(step->codes + group * INT8_GROUP, rounded, INT8_GROUP);
        memcpy(&step->scales[group], rounded + INT8_SCALES_AT, 4);
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 16; i++) sums[half] += (int8_t)rounded[16 * half + i];
            step->half_sums[2 * group + half] = (float)sums[half] * step->scales[group];
        }
        step->sums[group] = (float)(sums[0] + sums[1]) * step->scales[group];
    }
}

/* Weight rows written out before they are multiplied by the panels of x. */
enum { INT8_BLOCK_ROWS = 16 };

static void multiply_int8_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                                 int64_t ldo) {
#if HAS_QUANT_LANES
    if (num_rows == 1) {
        multiply_row_of_int8(weight, num_weight_rows, k, (const Int8Step *)packed, out);
        return;
    }
#endif
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), steps = parts_of(k, INT8_BLOCK_STEP);
    const int64_t fitting = VALUE_BYTES / (int64_t)sizeof(BlockStep) / (steps + !steps);
    const int64_t at_once = panels == 1 || fitting < 2 ? 1 : fitting < INT8_BLOCK_ROWS ? fitting : INT8_BLOCK_ROWS;
    BlockStep weights[at_once * steps + 1];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++)
            write_row(weight.quantized->codes, weight.data + (first + n) * weight.stride, k, weights + n * steps);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t row = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - row;
            const Int8Step *x = (const Int8Step *)packed + row * steps;
            for (int64_t n = 0; n < count; n++) {
                float sums[PANEL_ROWS] = {0};
                steps_by_panel((int)weight.quantized->codes, weights + n * steps, steps, x, (int)panel_rows, sums);
                for (int64_t m = 0; m < panel_rows; m++) out[(row + m) * ldo + first + n] = sums[m];
            }
        }
    }
}
