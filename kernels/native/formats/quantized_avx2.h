/* Products of quantised matrices for vectors of eight; codes are decoded in registers.
 *
 * Codes become fp32, which is exact. 64 of them are two parts of four vectors: part p has elements 16 p to 16 p + 15 of the
 * first 32 in its lower lanes and of the last 32 in its upper lanes; lane q of vector j has element 4 q + j of those 16. So
 * every lane of a part belongs to one group of a multiple of 16: its sum starts at zero and is multiplied by the group's
 * scale, and no weight is rounded. With groups of 32 columns or more the sums of both parts are added first. */
#pragma once

#include "formats/blocks.h"

/* How codes are decoded: 4 bits by a table; 4 bits with zero points of groups; fp8; 8-bit integers with zero points of
 * groups. */
enum { DECODE_TABLE4, DECODE_ZEROS4, DECODE_E4M3, DECODE_BYTES, NUM_DECODERS };
enum { STEP = 64, NUM_PARTS = 2 };

typedef struct {
    int shift;                 /* binary logarithm of a group's columns */
    __m256i expand[NUM_PARTS]; /* group of each lane, counted from the first of the 64 codes: at most 3 */
    __m256i low, high;         /* bytes of the upper half of fp32: by 4-bit codes, or by the upper four bits of fp8 */
    __m256i flip;              /* makes codes unsigned */
} Lanes;

/* One weight row: its codes, and those of a later row, to be fetched. Zero points are raised as decoded codes are. */
typedef struct {
    const char *codes, *ahead;
    const float *scales, *zeros;
} Source;

/* 64 codes on their way to fp32: bytes of the upper halves of fp32 for low and high nibbles, or 8-bit codes by parts. */
typedef struct {
    __m256i low[2], high[2];
    int is_special;
} Step;

/* The number of each lane's group. */
INLINE __m256 by_lanes(const Lanes *lanes, const float *groups, int64_t element, int part) {
    const __m256 four = _mm256_broadcast_ps((const __m128 *)(groups + (element >> lanes->shift)));
    return _mm256_permutevar_ps(four, lanes->expand[part]);
}

/* Sixteen bytes from here, and sixteen from 32 bytes on. */
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

/* Twice the magnitudes of normal fp8 codes are 0x10 to 0xfc: less 0x10, only subnormal codes, zeros and NaN exceed 0xec. */
INLINE __m256i above_normal(__m256i codes) {
    return _mm256_sub_epi8(_mm256_add_epi8(codes, codes), _mm256_set1_epi8(0x10));
}

/* Pairs of bytes for the vectors of a part; elements 4 q and 4 q + 1 lie side by side in the first. */
INLINE void read_step(int decoder, const Lanes *lanes, const char *codes, Step *step) {
    if (decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)codes), mask = _mm256_set1_epi8(15);
        const __m256i nibbles[2] = {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
        UNROLL for (int i = 0; i < 2; i++) {
            step->low[i] = decoder == DECODE_TABLE4 ? _mm256_shuffle_epi8(lanes->low, nibbles[i]) : nibbles[i];
            /* 128 + code: a bf16 number of this size has seven bits for an integer */
            step->high[i] = decoder == DECODE_TABLE4 ? _mm256_shuffle_epi8(lanes->high, nibbles[i]) : _mm256_set1_epi8(0x43);
        }
        return;
    }
    UNROLL for (int part = 0; part < NUM_PARTS; part++) step->low[part] = load_part(codes + 16 * part);
    if (decoder == DECODE_E4M3) {
        const __m256i most = _mm256_max_epu8(above_normal(step->low[0]), above_normal(step->low[1]));
        const __m256i found = _mm256_subs_epu8(most, _mm256_set1_epi8((char)0xec));
        step->is_special = !_mm256_testz_si256(found, found);
    }
}

/* fp8: the upper half of fp32 is a table of the sign and the upper exponent bits, then, except in special codes, the code's
 * other bits. */
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

/* 8-bit integers: the lowest bytes of fp32 numbers from 2^23 on. */
INLINE void decode_bytes(const Lanes *lanes, const Step *step, int part, __m256 zeros, __m256 out[4]) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i own = _mm256_xor_si256(step->low[part], lanes->flip), high = _mm256_set1_epi16(0x4b00);
    const __m256i codes = _mm256_shuffle_epi8(own, _mm256_broadcastsi128_si256(order));
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i pairs = i ? _mm256_unpackhi_epi8(codes, zero) : _mm256_unpacklo_epi8(codes, zero);
        out[2 * i] = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(pairs, high)), zeros);
        out[2 * i + 1] = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(pairs, high)), zeros);
    }
}

INLINE void decode_part(int decoder, const Lanes *lanes, const Source *source, const Step *step, int64_t element, int part,
                        __m256 out[4]) {
    if (decoder == DECODE_E4M3) {
        decode_e4m3(lanes, step, part, out);
        return;
    }
    if (decoder == DECODE_BYTES) {
        decode_bytes(lanes, step, part, by_lanes(lanes, source->zeros, element, part), out);
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i halves = part ? _mm256_unpackhi_epi8(step->low[i], step->high[i]) : _mm256_unpacklo_epi8(step->low[i], step->high[i]);
        out[i] = even_halves(halves), out[2 + i] = odd_halves(halves);
    }
    if (decoder == DECODE_ZEROS4) {
        const __m256 zeros = by_lanes(lanes, source->zeros, element, part);
        UNROLL for (int j = 0; j < 4; j++) out[j] = _mm256_sub_ps(out[j], zeros);
    }
}

/* ---- one weight row by one panel ---- */

/* Each part has its own sum: one chain of eight would take longer than its step. */
INLINE void lanes_step(int decoder, int scales_of_step, int panel_rows, const Lanes *lanes, const Source *source, const char *codes,
                       const float *x, int64_t element, Vec acc[PANEL_ROWS][NUM_PARTS]) {
    Step step;
    Vec sums[PANEL_ROWS][NUM_PARTS];
    read_step(decoder, lanes, codes, &step);
    UNROLL for (int part = 0; part < NUM_PARTS; part++) {
        Vec values[4];
        decode_part(decoder, lanes, source, &step, element, part, values);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            const float *own = x + m * QUANT_BLOCK + part * 4 * LANES;
            sums[m][part] = _mm256_mul_ps(values[0], vec_load_f32(own));
            UNROLL for (int j = 1; j < 4; j++) sums[m][part] = vec_fma(sums[m][part], values[j], vec_load_f32(own + j * LANES));
        }
    }
    if (scales_of_step == 1) {
        const Vec scales = by_lanes(lanes, source->scales, element, 0);
        UNROLL for (int m = 0; m < panel_rows; m++) acc[m][0] = vec_fma(acc[m][0], vec_add(sums[m][0], sums[m][1]), scales);
        return;
    }
    UNROLL for (int part = 0; part < NUM_PARTS; part++) {
        const Vec scales = by_lanes(lanes, source->scales, element, part);
        UNROLL for (int m = 0; m < panel_rows; m++) acc[m][part] = vec_fma(acc[m][part], sums[m][part], scales);
    }
}

INLINE void lanes_row(int decoder, int scales_of_step, int panel_rows, const Lanes *lanes, const Source *source, int64_t k,
                      const char *packed, float *out, int64_t ldo) {
    const int step_bytes = decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4 ? STEP / 2 : STEP;
    const float *x = (const float *)packed;
    const char *codes = source->codes, *ahead = source->ahead;
    Vec acc[PANEL_ROWS][NUM_PARTS];
    UNROLL for (int i = 0; i < PANEL_ROWS * NUM_PARTS; i++) acc[i / NUM_PARTS][i % NUM_PARTS] = vec_zero();
    int64_t element = 0;
    for (; element + QUANT_BLOCK <= k; element += QUANT_BLOCK) {
        UNROLL for (int i = 0; i < 2 * step_bytes; i += CACHE_LINE) __builtin_prefetch(ahead + i, 0, 3);
        UNROLL for (int i = 0; i < QUANT_BLOCK / STEP; i++)
            lanes_step(decoder, scales_of_step, panel_rows, lanes, source, codes + i * step_bytes, x + i * STEP, element + i * STEP, acc);
        codes += 2 * step_bytes, ahead += 2 * step_bytes;
        x += panel_rows * QUANT_BLOCK;
    }
    __builtin_prefetch(ahead + step_bytes - 1, 0, 3); /* a row that begins within a line ends in one more */
    if (element + STEP <= k) {
        __builtin_prefetch(ahead, 0, 3);
        lanes_step(decoder, scales_of_step, panel_rows, lanes, source, codes, x, element, acc);
        element += STEP, codes += step_bytes, x += STEP;
    }
    if (element < k) {
        /* The row may end at the end of the mapped memory: never read past it. */
        char padded[STEP] = {0};
        memcpy(padded, codes, (size_t)((k - element) * step_bytes + STEP - 1) / STEP);
        lanes_step(decoder, scales_of_step, panel_rows, lanes, source, padded, x, element, acc);
    }
    float sums[4];
    UNROLL for (int m = panel_rows; m < PANEL_ROWS; m++) acc[m][0] = acc[m][1] = vec_zero();
    if (scales_of_step == 2)
        UNROLL for (int m = 0; m < panel_rows; m++) acc[m][0] = vec_add(acc[m][0], acc[m][1]);
    vec_four_sums(acc[0][0], acc[1][0], acc[2][0], acc[3][0], sums);
    UNROLL for (int m = 0; m < panel_rows; m++) out[m * ldo] = sums[m];
}

typedef void (*LanesRow)(const Lanes *lanes, const Source *source, int64_t k, const char *packed, float *out, int64_t ldo);

#define DEFINE_LANES_ROW(decoder, scales, panel)                                                                              \
    static void lanes_##decoder##_##scales##_##panel(const Lanes *lanes, const Source *source, int64_t k, const char *packed, \
                                                     float *out, int64_t ldo) {                                               \
        lanes_row(decoder, scales, panel, lanes, source, k, packed, out, ldo);                                                \
    }
#define NAME_LANES_ROW(decoder, scales, panel) lanes_##decoder##_##scales##_##panel,
#define FOR_PANELS(macro, decoder, scales) \
    macro(decoder, scales, 1) macro(decoder, scales, 2) macro(decoder, scales, 3) macro(decoder, scales, 4)
#define DEFINE_DECODER(decoder) FOR_PANELS(DEFINE_LANES_ROW, decoder, 1) FOR_PANELS(DEFINE_LANES_ROW, decoder, 2)
#define NAME_DECODER(decoder) {{FOR_PANELS(NAME_LANES_ROW, decoder, 1)}, {FOR_PANELS(NAME_LANES_ROW, decoder, 2)}},
#define FOR_DECODERS(macro) macro(DECODE_TABLE4) macro(DECODE_ZEROS4) macro(DECODE_E4M3) macro(DECODE_BYTES)

FOR_DECODERS(DEFINE_DECODER)
static const LanesRow LANES_ROWS[NUM_DECODERS][2][PANEL_ROWS] = {FOR_DECODERS(NAME_DECODER)};

/* ---- more rows of x than a panel has ----
 *
 * A part of some weight rows is decoded once and stays in the nearest caches while all panels are multiplied by it. Sums add
 * up in the order of lanes_step and go from one part of k to the next as vectors: a row's result does not depend on how many
 * others there are. */
enum { MANY_WEIGHT_ROWS = 24, MANY_STEPS = 4, MANY_PANELS = 16, MANY_GROUPS = 64 << 10 };

/* Codes as fp32, and the scale of each lane. */
typedef struct {
    Vec values[4], scales;
} DecodedPart;

typedef DecodedPart DecodedSteps[MANY_STEPS][NUM_PARTS];

INLINE void decode_steps(int decoder, const Lanes *lanes, const Source *source, int64_t first, int64_t k, DecodedSteps out) {
    const int step_bytes = decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4 ? STEP / 2 : STEP;
    for (int i = 0; i < MANY_STEPS && first + i * STEP < k; i++) {
        const int64_t element = first + i * STEP;
        const char *codes = source->codes + element / STEP * step_bytes;
        char padded[STEP] = {0};
        Step step;
        if (k - element < STEP) {
            /* The row may end at the end of the mapped memory: never read past it. */
            memcpy(padded, codes, (size_t)((k - element) * step_bytes + STEP - 1) / STEP);
            codes = padded;
        }
        read_step(decoder, lanes, codes, &step);
        UNROLL for (int part = 0; part < NUM_PARTS; part++) {
            decode_part(decoder, lanes, source, &step, element, part, out[i][part].values);
            out[i][part].scales = by_lanes(lanes, source->scales, element, part);
        }
    }
}

static void decode_row_steps(int decoder, const Lanes *lanes, const Source *source, int64_t first, int64_t k, DecodedSteps out) {
#define DECODE_CASE(decoder) \
    case decoder: decode_steps(decoder, lanes, source, first, k, out); break;
    switch (decoder) { FOR_DECODERS(DECODE_CASE) }
}

/* A part of three weight rows by the rows of a panel: twelve sums from zero, three weights and a value of x take all
 * registers, which are named as in steps_avx2.h. Then the sums are either kept, for those of the other part to be added, or
 * multiplied by the scales and added to the sums of the steps before. */
#define MUL3(a, b, c)                        \
    "vmulps %%ymm12, %%ymm15, %%ymm" #a "\n" \
    "vmulps %%ymm13, %%ymm15, %%ymm" #b "\n" \
    "vmulps %%ymm14, %%ymm15, %%ymm" #c "\n"
#define PART_ROW(m, j, products) "vmovups 512*" #m "+32*" #j "(%[x]), %%ymm15\n" products
#define PART_ROWS_2(j, products) PART_ROW(0, j, products(0, 1, 2)) PART_ROW(1, j, products(3, 4, 5))
#define PART_ROWS_3(j, products) PART_ROWS_2(j, products) PART_ROW(2, j, products(6, 7, 8))
#define PART_ROWS_4(j, products) PART_ROWS_3(j, products) PART_ROW(3, j, products(9, 10, 11))
#define OF_THREE_ROWS(j) \
    "vmovaps 32*" #j "(%[w0]), %%ymm12\nvmovaps 32*" #j "(%[w1]), %%ymm13\nvmovaps 32*" #j "(%[w2]), %%ymm14\n"
#define PART_SUMS(panel)                                                                     \
    OF_THREE_ROWS(0) PART_ROWS_##panel(0, MUL3) OF_THREE_ROWS(1) PART_ROWS_##panel(1, FMA3) \
    OF_THREE_ROWS(2) PART_ROWS_##panel(2, FMA3) OF_THREE_ROWS(3) PART_ROWS_##panel(3, FMA3)
#define ADD_SUM(n) "vaddps 32*" #n "(%[sums]), %%ymm" #n ", %%ymm" #n "\n"
#define SCALE_SUM(n, scales) \
    "vfmadd213ps 32*" #n "(%[acc]), %%ymm" #scales ", %%ymm" #n "\nvmovaps %%ymm" #n ", 32*" #n "(%[acc])\n"
#define SCALE3(a, b, c) SCALE_SUM(a, 12) SCALE_SUM(b, 13) SCALE_SUM(c, 14)
#define SCALE_SUMS_2 OF_THREE_ROWS(4) SCALE3(0, 1, 2) SCALE3(3, 4, 5)
#define SCALE_SUMS_3 SCALE_SUMS_2 SCALE3(6, 7, 8)
#define SCALE_SUMS_4 SCALE_SUMS_3 SCALE3(9, 10, 11)
#define PART(panel, ends)                                                                                                 \
    __asm__ volatile(PART_SUMS(panel) ends                                                                                \
                     :                                                                                                    \
                     : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [x] "r"(x), [sums] "r"(sums), [acc] "r"(acc)             \
                     : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
                       "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define PART_OF_PANEL(panel)                                    \
    do {                                                        \
        if (keeps)                                              \
            PART(panel, EACH_SUM_##panel(STORE_SUM));           \
        else if (adds)                                          \
            PART(panel, EACH_SUM_##panel(ADD_SUM) SCALE_SUMS_##panel); \
        else                                                    \
            PART(panel, SCALE_SUMS_##panel);                    \
    } while (0)

INLINE void sum_part(int panel_rows, int keeps, int adds, const DecodedPart *w0, const DecodedPart *w1, const DecodedPart *w2,
                     const float *x, Vec *sums, Vec *acc) {
    if (panel_rows == 2)
        PART_OF_PANEL(2);
    else if (panel_rows == 3)
        PART_OF_PANEL(3);
    else
        PART_OF_PANEL(4);
}

/* Sums of three weight rows by the rows of a panel, [row of x][3]. */
typedef Vec TripleSums[NUM_PARTS][PANEL_ROWS * 3];

INLINE void triple_steps(int scales_of_step, int panel_rows, const DecodedSteps *const w[3], int64_t steps, const float *x,
                         TripleSums acc) {
    const int are_added = scales_of_step == 1;
    for (int64_t i = 0; i < steps; i++) {
        const float *own = x + (i / 2 * panel_rows * 2 + i % 2) * STEP;
        Vec sums[PANEL_ROWS * 3];
        UNROLL for (int part = 0; part < NUM_PARTS; part++)
            sum_part(panel_rows, are_added && !part, are_added && part, &(*w[0])[i][part], &(*w[1])[i][part], &(*w[2])[i][part],
                     own + part * 4 * LANES, sums, acc[are_added ? 0 : part]);
    }
}

typedef void (*TripleSteps)(const DecodedSteps *const w[3], int64_t steps, const float *x, TripleSums acc);

#define DEFINE_TRIPLE_STEPS(scales, panel)                                                                                     \
    static void triple_steps_##scales##_##panel(const DecodedSteps *const w[3], int64_t steps, const float *x, TripleSums acc) { \
        triple_steps(scales, panel, w, steps, x, acc);                                                                         \
    }
#define NAME_TRIPLE_STEPS(scales, panel) triple_steps_##scales##_##panel,
#define FOR_TRIPLE_PANELS(macro, scales) macro(scales, 2) macro(scales, 3) macro(scales, 4)

FOR_TRIPLE_PANELS(DEFINE_TRIPLE_STEPS, 1)
FOR_TRIPLE_PANELS(DEFINE_TRIPLE_STEPS, 2)

/* Several panels have two rows of x at least. */
static const TripleSteps TRIPLE_STEPS[2][PANEL_ROWS - 1] = {{FOR_TRIPLE_PANELS(NAME_TRIPLE_STEPS, 1)},
                                                            {FOR_TRIPLE_PANELS(NAME_TRIPLE_STEPS, 2)}};

static void store_triple_sums(int scales_of_step, int panel_rows, int weight_rows, TripleSums acc, float *out, int64_t ldo) {
    for (int n = 0; n < weight_rows; n++) {
        Vec whole[PANEL_ROWS];
        float sums[4];
        for (int m = 0; m < PANEL_ROWS; m++) {
            const int at = 3 * m + n;
            whole[m] = m >= panel_rows ? vec_zero() : scales_of_step == 2 ? vec_add(acc[0][at], acc[1][at]) : acc[0][at];
        }
        vec_four_sums(whole[0], whole[1], whole[2], whole[3], sums);
        for (int m = 0; m < panel_rows; m++) out[m * ldo + n] = sums[m];
    }
}

/* Packed rows of x, and the distance of their sums in floats. */
typedef struct {
    const float *packed;
    int64_t num_rows, row_floats, ldo;
} ManyRows;

/* Weight rows, up to MANY_WEIGHT_ROWS, by panels, up to MANY_PANELS; `out` begins at the first weight row. */
static void multiply_many(int decoder, int scales_of_step, const Lanes *lanes, const Source *sources, int weight_rows, int64_t k,
                          const ManyRows *x, int64_t first_panel, int64_t last_panel, float *out) {
    const int64_t panels = num_panels(x->num_rows, PANEL_ROWS);
    DecodedSteps decoded[MANY_WEIGHT_ROWS];
    TripleSums acc[MANY_PANELS][MANY_WEIGHT_ROWS / 3];
    memset(acc, 0, (size_t)(last_panel - first_panel) * sizeof acc[0]);
    for (int64_t element = 0; element < k; element += MANY_STEPS * STEP) {
        const int64_t left = (k - element + STEP - 1) / STEP, steps = left < MANY_STEPS ? left : MANY_STEPS;
        for (int n = 0; n < weight_rows; n++) decode_row_steps(decoder, lanes, &sources[n], element, k, decoded[n]);
        for (int64_t p = first_panel; p < last_panel; p++) {
            const int64_t row = panel_start(p, panels, x->num_rows), rows = panel_start(p + 1, panels, x->num_rows) - row;
            const float *own = x->packed + row * x->row_floats + element * rows;
            for (int n = 0; n < weight_rows; n += 3) {
                const DecodedSteps *w[3];
                for (int i = 0; i < 3; i++) w[i] = &decoded[n + i < weight_rows ? n + i : n];
                TRIPLE_STEPS[scales_of_step - 1][rows - 2](w, steps, own, acc[p - first_panel][n / 3]);
            }
        }
    }
    for (int64_t p = first_panel; p < last_panel; p++) {
        const int64_t row = panel_start(p, panels, x->num_rows), rows = panel_start(p + 1, panels, x->num_rows) - row;
        for (int n = 0; n < weight_rows; n += 3)
            store_triple_sums(scales_of_step, (int)rows, weight_rows - n < 3 ? weight_rows - n : 3, acc[p - first_panel][n / 3],
                              out + row * x->ldo + n, x->ldo);
    }
}

/* ---- whole matrices ---- */

static int quantized_kind(const Quantized *format, int x_dtype) {
    const int64_t group = format->group_cols;
    (void)x_dtype;
    if (is_in_blocks(format)) return KIND_QUANT_BLOCKS;
    return !group || (group >= 16 && !(group & (group - 1))) ? KIND_QUANT_F32 : KIND_F32;
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

/* Zero points of groups, raised as decoded codes are. */
static void read_lane_zeros(const RowGroups *row, int64_t index, int decoder, float *out) {
    const Quantized *format = row->format;
    const float above = decoder == DECODE_BYTES ? 8388608.0f : 128.0f;
    const uint8_t *zeros = (const uint8_t *)format->zeros + group_of(index, format->group_rows) * format->zero_stride;
    const float same = (float)(format->codes == CODE_INT8 ? 128 : format->zero) + above;
    for (int64_t i = 0; i < row->groups; i++) out[i] = format->zeros ? (float)zeros[i] + above : same;
}

static void multiply_lanes(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo, Matrix next) {
    const Quantized *format = weight.quantized;
    const int decoder = decoder_of(format), scales_of_step = format->group_cols == 16 ? 2 : 1;
    const int has_zeros = decoder == DECODE_ZEROS4 || decoder == DECODE_BYTES;
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t rows_ahead = LANES_AHEAD / (code_row_bytes(format, k) + 1) + 1, scale_bytes = fetched_scale_bytes(format, k);
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    const ManyRows many = {.packed = (const float *)packed, .num_rows = num_rows, .row_floats = row_bytes / 4, .ldo = ldo};
    Lanes lanes;
    ROW_GROUPS(row, weight, k);
    /* The numbers of all their groups lie on the stack. */
    const int64_t padded_groups = row.groups + GROUP_PADDING, fitting = MANY_GROUPS / padded_groups;
    const int at_once = panels == 1 || fitting < 2 ? 1 : fitting < MANY_WEIGHT_ROWS ? (int)fitting : MANY_WEIGHT_ROWS;
    float scales[at_once * padded_groups], zeros[at_once * padded_groups];
    Source sources[MANY_WEIGHT_ROWS];
    memset(scales, 0, sizeof scales);
    memset(zeros, 0, sizeof zeros);
    prepare_lanes(format, &lanes);
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int count = (int)(num_weight_rows - first < at_once ? num_weight_rows - first : at_once);
        for (int i = 0; i < count; i++) {
            const int64_t n = first + i;
            const char *codes = weight.data + n * weight.stride, *ahead = stream_row(&stream, n + rows_ahead);
            sources[i] = (Source){.codes = codes, .ahead = ahead ? ahead : codes, .scales = scales + i * padded_groups,
                                  .zeros = zeros + i * padded_groups};
            row.scales = scales + i * padded_groups;
            read_scales(format, weight.first_row + n, row.groups, row.scales);
            if (has_zeros && (!first || format->zeros)) read_lane_zeros(&row, weight.first_row + n, decoder, zeros + i * padded_groups);
            fetch_scales(&stream, n + rows_ahead, 1, scale_bytes);
        }
        if (panels == 1) {
            LANES_ROWS[decoder][scales_of_step - 1][num_rows - 1](&lanes, sources, k, packed, out + first, ldo);
            continue;
        }
        for (int64_t p = 0; p < panels; p += MANY_PANELS)
            multiply_many(decoder, scales_of_step, &lanes, sources, count, k, &many, p, p + MANY_PANELS < panels ? p + MANY_PANELS : panels,
                          out + first);
    }
}
