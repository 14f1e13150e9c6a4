/* Products of blocks that hold their scales with rows of x rounded to int8; a part of quantized_template.h.
 *
 * A weight is code * scale - minimum. Codes have no sign: what is subtracted from them, times the scale, is the minimum; but
 * where pairs of such products would not fit in 16 bits codes are signed and nothing is subtracted. Products of the codes of
 * 32 columns, or of 16 where as many share a scale, are summed as integers, which is exact, and multiplied by both scales in
 * fp32; minima are multiplied by the sum of what 32 or 16 codes of x stand for. These sums add up in one order, whatever the
 * other rows are.
 *
 * A row of x is multiplied by codes as they lie. For more rows codes of a few weight rows are written out, a byte each.
 */
enum { INT8_GROUPS_OF_STEP = INT8_BLOCK_STEP / INT8_GROUP, INT8_PAIRS = INT8_GROUPS_OF_STEP / 2 };

/* A packed step of x: codes in their order, and sums of what those of a group, or of its halves, stand for. */
typedef struct {
    uint8_t codes[INT8_BLOCK_STEP];
    float scales[INT8_GROUPS_OF_STEP], sums[INT8_GROUPS_OF_STEP], half_sums[2 * INT8_GROUPS_OF_STEP];
} Int8Step;

/* Weights of a step. Numbers are the scales of eight groups and then their minima, or of 16 halves. Without minima the scales
 * stand there again: the sum of all takes what `minimum_factor` says. */
typedef struct {
    Codes codes[INT8_GROUPS_OF_STEP];
    float numbers[4 * INT8_GROUPS_OF_STEP];
} BlockStep;

/* Whether codes are bytes that use all bits: products of pairs of them fit in 16 bits with their sign only. */
INLINE int has_signed_codes(int code) {
    return !HAS_BYTE_DOT && (code == CODE_Q8_0 || code == CODE_IQ4_NL || code == CODE_IQ4_XS);
}

/* What is subtracted from codes. */
INLINE int int8_zero(int code) {
    switch (code) {
        case CODE_Q8_0:
        case CODE_IQ4_NL:
        case CODE_IQ4_XS: return has_signed_codes(code) ? 0 : 128;
        case CODE_Q4_0: return 8;
        case CODE_MXFP4_BLOCK: return 12;
        default: return (int)zero_of(code);
    }
}

INLINE float minimum_factor(int code) { return has_minimum(code) ? 1.0f : (float)int8_zero(code); }

INLINE Codes looked_up(const int8_t table[16], uint8_t zero, Codes codes) {
#if defined(__AVX2__)
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)zero));
    return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#else
    Codes values;
    for (int i = 0; i < 32; i++) values[i] = (uint8_t)(table[codes[i]] + zero);
    return values;
#endif
}

INLINE int is_one_group(int code) { return BLOCK_SIZES[code - CODE_BLOCKS].codes == INT8_GROUP; }

INLINE int int8_step_bytes(int code) { return BLOCK_SIZES[code - CODE_BLOCKS].bytes * (is_one_group(code) ? INT8_GROUPS_OF_STEP : 1); }

INLINE Codes int8_codes_of(int code, const char *step, int group) {
    const int offset = is_one_group(code) ? group * BLOCK_SIZES[code - CODE_BLOCKS].bytes : 0;
    const Codes codes = block_codes(code, (const uint8_t *)step + offset, group);
    const uint8_t zero = (uint8_t)int8_zero(code);
    if (code == CODE_Q8_0) return codes ^ zero;
    if (code == CODE_MXFP4_BLOCK) return looked_up(DOUBLED_E2M1, zero, codes);
    return code == CODE_IQ4_NL || code == CODE_IQ4_XS ? looked_up(NONLINEAR_VALUES, zero, codes) : codes;
}

#if HAS_QUANT_LANES
#if LANES == 8
#include "formats/int8_blocks_avx2.h"
#else
#include "formats/int8_blocks_avx512.h"
#endif

/* A step of one row of x and a weight row of which `groups` are left. */
INLINE void add_block_step(int code, const char *weight, int groups, const Int8Step *x, Int8Row *row) {
    StepNumbers numbers;
    StepScales scales;
    numbers_of(code, weight, groups, &numbers);
    step_scales(has_groups_of_16(code), &numbers, x, row, &scales);
    UNROLL for (int pair = 0; pair < INT8_PAIRS; pair++)
        if (2 * pair < groups)
            add_pair(has_groups_of_16(code), has_signed_codes(code), pair_of(code, weight, pair, groups), x, &scales, pair, row);
}

INLINE void row_by_blocks(int code, Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
    const int64_t steps = k / INT8_BLOCK_STEP;
    const int rest = (int)(k % INT8_BLOCK_STEP / INT8_GROUP);
    for (int64_t n = 0; n < num_weight_rows; n++) {
        const char *step = weight.data + n * weight.stride;
        Int8Row row;
        clear_rows(1, &row);
        for (int64_t i = 0; i < steps; i++, step += int8_step_bytes(code)) {
            /* past the last row fetching is harmless */
            UNROLL for (int b = 0; b < int8_step_bytes(code); b += CACHE_LINE) __builtin_prefetch(step + LANES_AHEAD + b, 0, 3);
            add_block_step(code, step, INT8_GROUPS_OF_STEP, x + i, &row);
        }
        if (is_one_group(code) && rest) add_block_step(code, step, rest, x + steps, &row);
        out[n] = whole_sum(has_groups_of_16(code), &row, minimum_factor(code));
    }
}

static void multiply_row_of_int8(Matrix weight, int64_t num_weight_rows, int64_t k, const Int8Step *x, float *out) {
#define ROW_CASE(code) \
    case code: row_by_blocks(code, weight, num_weight_rows, k, x, out); break;
    switch (weight.quantized->codes) { FOR_BLOCKS(ROW_CASE, NO_SEPARATOR) }
}

INLINE void write_step(int code, const char *weight, int groups, BlockStep *out) {
    StepNumbers numbers;
    numbers_of(code, weight, groups, &numbers);
    store_numbers(has_groups_of_16(code), &numbers, out->numbers);
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
static void steps_by_panel(int code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
    const float factor = minimum_factor(code);
#define PANEL_CASE(rows)                                              \
    case rows:                                                        \
        if (has_groups_of_16(code))                                   \
            panel_steps(1, 0, rows, weights, steps, x, factor, sums); \
        else if (has_signed_codes(code))                              \
            panel_steps(0, 1, rows, weights, steps, x, factor, sums); \
        else                                                          \
            panel_steps(0, 0, rows, weights, steps, x, factor, sums); \
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
#else
INLINE void write_step(int code, const char *weight, int groups, BlockStep *out) {
    const int halves = has_groups_of_16(code) ? 2 : 1, count = INT8_GROUPS_OF_STEP * halves;
    for (int group = 0; group < groups; group++) out->codes[group] = int8_codes_of(code, weight, group);
    if (!is_one_group(code)) {
        GroupNumbers numbers;
        block_numbers(code, (const uint8_t *)weight, &numbers);
        memcpy(out->numbers, numbers.scales, (size_t)count * 4);
        memcpy(out->numbers + count, has_minimum(code) ? numbers.minima : numbers.scales, (size_t)count * 4);
        return;
    }
    for (int group = 0; group < INT8_GROUPS_OF_STEP; group++) {
        GroupNumbers numbers = {{0}, {0}};
        if (group < groups) block_numbers(code, (const uint8_t *)weight + group * BLOCK_SIZES[code - CODE_BLOCKS].bytes, &numbers);
        out->numbers[group] = numbers.scales[0];
        out->numbers[count + group] = has_minimum(code) ? numbers.minima[0] : numbers.scales[0];
    }
}

/* A weight row by the rows of a panel. */
static void steps_by_panel(int code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
    const int halves = has_groups_of_16(code) ? 2 : 1, columns = INT8_GROUP / halves, count = INT8_GROUPS_OF_STEP * halves;
    float acc[PANEL_ROWS][2] = {0}, minima[PANEL_ROWS] = {0};
    for (int64_t i = 0; i < steps; i++, weights++) {
        for (int m = 0; m < panel_rows; m++, x++) {
            for (int part = 0; part < count; part++) {
                /* codes without a sign use fewer bits than signed bytes have */
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
    switch (code) { FOR_BLOCKS(WRITE_CASE, NO_SEPARATOR) }
}

static void pack_int8_blocks(const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows, int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + INT8_BLOCK_STEP - 1) / INT8_BLOCK_STEP * INT8_BLOCK_STEP : last_k;
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

/* Weight rows that are written out before the panels of x are multiplied with them. */
enum { INT8_BLOCK_ROWS = 16 };

static void multiply_int8_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                                 int64_t ldo) {
#if HAS_QUANT_LANES
    if (num_rows == 1) {
        multiply_row_of_int8(weight, num_weight_rows, k, (const Int8Step *)packed, out);
        return;
    }
#endif
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), steps = (k + INT8_BLOCK_STEP - 1) / INT8_BLOCK_STEP;
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
