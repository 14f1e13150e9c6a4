/* Products of blocks that hold their scales with rows of x rounded to int8; a part of quantized_template.h.
 *
 * A weight is code * scale - minimum with codes of no sign, what is subtracted from codes being a part of the minimum, or, where
 * pairs of such products would not fit in 16 bits, code * scale with signed codes. Products of codes of 32 columns, or of 16
 * where as many share a scale, are summed as integers, which is exact, and multiplied by both scales in fp32; minima are
 * multiplied by the sum of the codes of x times their scale. Lanes of two sums, of groups at even and at odd places, take
 * four columns each. They add up in one order, whatever the other rows are.
 *
 * A packed step of x has 256 codes in their order, eight scales, and fp32 sums of what each 32 codes stand for, then of each 16.
 */
enum { INT8_BLOCK_GROUPS = INT8_BLOCK_STEP / INT8_GROUP };

/* Of a packed step of x. */
typedef struct {
    uint8_t codes[INT8_BLOCK_STEP];
    float scales[INT8_BLOCK_GROUPS], sums[INT8_BLOCK_GROUPS], half_sums[2 * INT8_BLOCK_GROUPS];
} Int8Step;

/* Weights of a step. */
typedef struct {
    Codes codes[INT8_BLOCK_GROUPS];
    GroupNumbers numbers;
} BlockStep;

/* Whether codes are bytes that use all bits: products of pairs of them fit in 16 bits with their sign only. */
INLINE int has_signed_codes(int code) {
    return !HAS_BYTE_DOT && (code == CODE_Q8_0 || code == CODE_IQ4_NL || code == CODE_IQ4_XS);
}

/* What is subtracted from codes that have no sign. */
INLINE int int8_zero(int code) {
    if (has_signed_codes(code)) return 0;
    switch (code) {
        case CODE_Q8_0:
        case CODE_IQ4_NL:
        case CODE_IQ4_XS: return 128;
        case CODE_Q4_0: return 8;
        case CODE_MXFP4_BLOCK: return 12;
        default: return (int)zero_of(code);
    }
}

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

INLINE Codes int8_codes_of(int code, const uint8_t *src, int group) {
    const Codes codes = block_codes(code, src, group);
    const uint8_t zero = (uint8_t)int8_zero(code);
    if (code == CODE_Q8_0) return codes ^ zero;
    if (code == CODE_MXFP4_BLOCK) return looked_up(DOUBLED_E2M1, zero, codes);
    return code == CODE_IQ4_NL || code == CODE_IQ4_XS ? looked_up(NONLINEAR_VALUES, zero, codes) : codes;
}

INLINE int is_one_group(int code) { return BLOCK_SIZES[code - CODE_BLOCKS].codes == INT8_GROUP; }

/* Where the block of a group lies, from that of the first of a step on. */
INLINE const uint8_t *block_of_group(int code, const char *step, int group) {
    return (const uint8_t *)step + (is_one_group(code) ? group * BLOCK_SIZES[code - CODE_BLOCKS].bytes : 0);
}

/* Numbers of a step's first groups, zeros for the others. */
INLINE void step_numbers(int code, const char *step, int groups, GroupNumbers *out) {
    const float zero = (float)int8_zero(code);
    if (is_one_group(code)) {
        memset(out, 0, sizeof *out);
        for (int group = 0; group < groups; group++) {
            GroupNumbers own;
            block_numbers(code, block_of_group(code, step, group), &own);
            out->scales[group] = own.scales[0];
            if (has_minimum(code)) out->minima[group] = own.minima[0];
        }
    } else {
        block_numbers(code, (const uint8_t *)step, out);
    }
    if (!has_minimum(code))
        for (int i = 0; i < (has_groups_of_16(code) ? 16 : 8); i++) out->minima[i] = zero * out->scales[i];
}

#if HAS_QUANT_LANES
#include "formats/int8_blocks_avx2.h"
#else
/* A weight row by the rows of a panel. */
static void steps_by_panel(int64_t code, const BlockStep *weights, int64_t steps, const Int8Step *x, int panel_rows, float *sums) {
    const int halves = has_groups_of_16((int)code) ? 2 : 1, columns = INT8_GROUP / halves;
    float acc[PANEL_ROWS][2] = {0}, minima[PANEL_ROWS] = {0};
    for (int64_t i = 0; i < steps; i++, weights++) {
        for (int m = 0; m < panel_rows; m++, x++) {
            for (int part = 0; part < INT8_BLOCK_GROUPS * halves; part++) {
                /* codes without a sign use fewer bits than signed bytes have */
                const int8_t *codes = (const int8_t *)weights->codes + part * columns, *of_x = (const int8_t *)x->codes + part * columns;
                int32_t sum = 0;
                for (int j = 0; j < columns; j++) sum += codes[j] * of_x[j];
                acc[m][part / halves % 2] += (float)sum * (weights->numbers.scales[part] * x->scales[part / halves]);
                minima[m] += weights->numbers.minima[part] * (halves == 2 ? x->half_sums : x->sums)[part];
            }
        }
    }
    for (int m = 0; m < panel_rows; m++) sums[m] = (acc[m][0] + acc[m][1]) - minima[m];
}
#endif

/* ---- weights by steps ---- */

INLINE void decode_steps_of(int code, const char *weight, int64_t k, BlockStep *out) {
    const int bytes = BLOCK_SIZES[code - CODE_BLOCKS].bytes, step_bytes = is_one_group(code) ? INT8_BLOCK_GROUPS * bytes : bytes;
    for (; k > 0; k -= INT8_BLOCK_STEP, weight += step_bytes, out++) {
        const int groups = k < INT8_BLOCK_STEP ? (int)(k / INT8_GROUP) : INT8_BLOCK_GROUPS;
        step_numbers(code, weight, groups, &out->numbers);
        for (int group = 0; group < groups; group++) out->codes[group] = int8_codes_of(code, block_of_group(code, weight, group), group);
        for (int group = groups; group < INT8_BLOCK_GROUPS; group++) out->codes[group] = (Codes){0};
    }
}

static void decode_row(int64_t code, const char *weight, int64_t k, BlockStep *out) {
#define DECODE_CASE(code) \
    case code: decode_steps_of(code, weight, k, out); break;
    switch (code) { FOR_BLOCKS(DECODE_CASE, NO_SEPARATOR) }
}

static void pack_int8_blocks(const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows, int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + INT8_BLOCK_STEP - 1) / INT8_BLOCK_STEP * INT8_BLOCK_STEP : last_k;
    for (int64_t at = first_k; at < end; at += INT8_GROUP) {
        Int8Step *step = (Int8Step *)panel + at / INT8_BLOCK_STEP * panel_rows + row;
        const int group = (int)(at % INT8_BLOCK_STEP / INT8_GROUP);
        const int64_t filled = last_k - at < INT8_GROUP ? last_k - at : INT8_GROUP;
        float values[INT8_GROUP] = {0};
        char rounded[INT8_BLOCK_BYTES];
        int sums[2] = {0};
        for (int64_t i = 0; i < filled; i++) values[i] = load_element(src, dtype, at - first_k + i);
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

/* Weight rows that are decoded before the panels of x are multiplied with them, one panel after the other. */
enum { INT8_BLOCK_ROWS = 16 };

static void multiply_int8_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                                 int64_t ldo) {
    const int64_t code = weight.quantized->codes, panels = num_panels(num_rows, PANEL_ROWS);
    const int64_t steps = (k + INT8_BLOCK_STEP - 1) / INT8_BLOCK_STEP;
    const int64_t fitting = VALUE_BYTES / (int64_t)sizeof(BlockStep) / (steps + !steps);
    const int64_t at_once = panels == 1 || fitting < 2 ? 1 : fitting < INT8_BLOCK_ROWS ? fitting : INT8_BLOCK_ROWS;
#if HAS_QUANT_LANES
    if (num_rows == 1) {
        multiply_row_of_int8(weight, num_weight_rows, k, (const Int8Step *)packed, out);
        return;
    }
#endif
    BlockStep weights[at_once * steps + 1];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++) decode_row(code, weight.data + (first + n) * weight.stride, k, weights + n * steps);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t row = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - row;
            const Int8Step *x = (const Int8Step *)packed + row * steps;
            for (int64_t n = 0; n < count; n++) {
                float sums[PANEL_ROWS];
                steps_by_panel(code, weights + n * steps, steps, x, (int)panel_rows, sums);
                for (int64_t m = 0; m < panel_rows; m++) out[(row + m) * ldo + first + n] = sums[m];
            }
        }
    }
}
