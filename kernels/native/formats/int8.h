/* Products of integer codes by rows of x rounded to int8, only where the caller asks for it.
 *
 * INT8_GROUP columns of a row of x share a scale, their largest magnitude over 127, as in ggml's q8_0. Products of a group
 * are summed as integers, which is exact, and multiplied by both scales in fp32; groups at even places and at odd places
 * have a sum each. So a row's result does not depend on how many others there are. 4-bit codes of e2m1 become twice their
 * value; half a scale makes up for it.
 *
 * A packed block has 128 codes of x, then four scales, then two 16-bit sums for each group: of the codes in the first and in
 * the second halves of all its fours. KIND_QUANT_INT4 has 64 codes at a time, those of even columns first, as nibbles come
 * out of bytes. */
#pragma once

#include "formats/values.h"

enum { INT8_STEP = 64, INT8_SCALES_AT = QUANT_BLOCK, INT8_SUMS_AT = QUANT_BLOCK + 4 * QUANT_BLOCK / INT8_GROUP };

/* Weight rows multiplied together. */
enum { INT8_ROWS = 16 };

#define LARGEST_F32 0x1.fffffep127f

/* A group's values times int8_inverse are codes; codes times int8_scale are values. Less than 2^-100 counts as 0: its
 * reciprocal could be infinite. */
INLINE float int8_inverse(int is_finite, float largest) { return is_finite && largest >= 0x1p-100f ? 127.0f / largest : 0.0f; }
INLINE float int8_scale(int is_finite, float largest) { return !is_finite ? NAN : largest >= 0x1p-100f ? largest / 127.0f : 0.0f; }

/* What codes stand for: 4 bits by a table; 8 bits as signed, the highest bit of unsigned ones flipped. The table has
 * unsigned numbers; `zero` is subtracted unless each group has a zero point. */
typedef struct {
    uint8_t table[16];
    uint8_t flip;
    int zero, has_zeros;
    float factor;
} Int8Codes;

static Int8Codes int8_codes(const Quantized *format) {
    Int8Codes codes = {.flip = format->codes == CODE_UINT8 ? 0x80 : 0, .factor = format->codes == CODE_E2M1 ? 0.5f : 1.0f};
    codes.has_zeros = format->zeros != NULL;
    codes.zero = format->codes == CODE_E2M1 ? 12 : (int)format->zero;
    for (int i = 0; i < 16; i++)
        codes.table[i] = (uint8_t)(format->codes == CODE_E2M1 ? (int)(2.0f * E2M1_VALUES[i]) + 12 : i);
    return codes;
}

/* Some weight rows: codes, and for every INT8_GROUP columns scales and zero points, `groups` of them a row. */
typedef struct {
    const char *codes[INT8_ROWS], *ahead[INT8_ROWS];
    const float *scales;
    const int32_t *zeros;
    int64_t groups;
} Int8Rows;

/* The codes of a block, padded at the end of a row, after which nothing may be read. */
INLINE const char *int8_block_codes(int kind, const char *row, int64_t element, int64_t k, char padded[QUANT_BLOCK]) {
    const int block_bytes = kind == KIND_QUANT_INT4 ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    const char *codes = row + element / QUANT_BLOCK * block_bytes;
    if (element + QUANT_BLOCK <= k) return codes;
    memset(padded, 0, QUANT_BLOCK);
    memcpy(padded, codes, (size_t)((k - element) * block_bytes + QUANT_BLOCK - 1) / QUANT_BLOCK);
    return padded;
}

/* Where a group of a block lies: its even columns or its first half, and the distance to the others. */
INLINE int int8_group_at(int kind, int group) { return kind == KIND_QUANT_INT8 ? group * INT8_GROUP : group / 2 * INT8_STEP + group % 2 * 16; }
INLINE int int8_halves_apart(int kind) { return kind == KIND_QUANT_INT8 ? 16 : 32; }

#if HAS_QUANT_LANES
/* ---- eight weight rows in the lanes of a vector ----
 *
 * The codes of eight rows are decoded to a tile, fours of columns by rows, that serves all rows of x: four values of x in
 * every lane, times the fours of eight rows, give the sums of eight rows. 4-bit codes are multiplied as unsigned numbers;
 * their 16-bit sums begin at minus the zero point, 16 at most, times the sum of x, modulo 2^16, which is enough for the
 * whole sum of a group. 8-bit codes are multiplied as magnitudes, by values of x that take over their signs. */
enum { INT8_PART = 512, INT8_FOURS = INT8_GROUP / 4, INT8_PANELS = 32 };
enum { INT8_GROUPS = INT8_PART / INT8_GROUP, INT8_EIGHTS = INT8_ROWS / 8 };

typedef struct {
    __m256i codes[INT8_FOURS];
    __m256 scales;
    __m256i minus_zeros; /* twice in every lane, as 16 bits */
} Int8Group;

/* Sixteen bytes of eight rows, transposed: a vector for each four of the bytes, with the rows in its lanes. */
INLINE void fours_of_eight_rows(const char *const rows[8], int64_t offset, __m256i fours[4]) {
    __m256i v[4], pairs[4];
    UNROLL for (int n = 0; n < 4; n++) {
        const __m128i lower = _mm_loadu_si128((const __m128i *)(rows[n] + offset));
        v[n] = _mm256_inserti128_si256(_mm256_castsi128_si256(lower), _mm_loadu_si128((const __m128i *)(rows[n + 4] + offset)), 1);
    }
    UNROLL for (int n = 0; n < 4; n += 2) {
        pairs[n] = _mm256_unpacklo_epi32(v[n], v[n + 1]);
        pairs[n + 1] = _mm256_unpackhi_epi32(v[n], v[n + 1]);
    }
    UNROLL for (int n = 0; n < 2; n++) {
        fours[2 * n] = _mm256_unpacklo_epi64(pairs[n], pairs[n + 2]);
        fours[2 * n + 1] = _mm256_unpackhi_epi64(pairs[n], pairs[n + 2]);
    }
}

/* ---- rows of x ---- */

INLINE __m256 magnitudes(__m256 values) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values); }

/* Rounds 32 values to int8 and stores them with their scale and sums. */
INLINE void store_int8_group(int kind, const float values[INT8_GROUP], char *block, int group) {
    const __m256i natural = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m256 v[4], most = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    __m256i codes[4];
    float largest_of[8], largest = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(values + 8 * i);
        finite = _mm256_and_ps(finite, _mm256_cmp_ps(magnitudes(v[i]), _mm256_set1_ps(LARGEST_F32), _CMP_LE_OQ));
        most = _mm256_max_ps(most, magnitudes(v[i]));
    }
    _mm256_storeu_ps(largest_of, most);
    for (int i = 0; i < 8; i++) largest = largest_of[i] > largest ? largest_of[i] : largest;
    const int is_finite = _mm256_movemask_ps(finite) == 0xff;
    const float scale = int8_scale(is_finite, largest);
    const __m256 inverse = _mm256_set1_ps(int8_inverse(is_finite, largest));
    UNROLL for (int i = 0; i < 4; i++)
        codes[i] = is_finite ? _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)) : _mm256_setzero_si256();
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, natural);
    if (kind == KIND_QUANT_INT4) bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, apart), 0xd8);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m128i sums = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi16(sums, _mm_srli_si128(sums, 8));
    sums = _mm_add_epi16(sums, _mm_srli_si128(sums, 4));
    char *first = block + int8_group_at(kind, group);
    _mm_storeu_si128((__m128i *)first, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(first + int8_halves_apart(kind)), _mm256_extracti128_si256(bytes, 1));
    memcpy(block + INT8_SCALES_AT + 4 * group, &scale, 4);
    const int32_t both = _mm_cvtsi128_si32(sums);
    memcpy(block + INT8_SUMS_AT + 4 * group, &both, 4);
}

/* ---- weights ---- */

/* Scales and zero points of eight rows, for a multiple of four groups. */
INLINE void decode_groups(const Int8Codes *how, const Int8Rows *rows, int first_row, int64_t first_group, int64_t count, Int8Group *out) {
    const char *scales[8], *zeros[8];
    UNROLL for (int n = 0; n < 8; n++) {
        const int64_t at = (first_row + n) * rows->groups + first_group;
        scales[n] = (const char *)(rows->scales + at), zeros[n] = (const char *)(rows->zeros + (how->has_zeros ? at : 0));
    }
    for (int64_t group = 0; group < count; group += 4, out += 4) {
        __m256i fours[4];
        fours_of_eight_rows(scales, 4 * group, fours);
        UNROLL for (int i = 0; i < 4; i++) out[i].scales = _mm256_castsi256_ps(fours[i]);
        UNROLL for (int i = 0; i < 4; i++) fours[i] = _mm256_set1_epi32(how->zero);
        if (how->has_zeros) fours_of_eight_rows(zeros, 4 * group, fours);
        UNROLL for (int i = 0; i < 4; i++) {
            const __m256i twice = _mm256_or_si256(fours[i], _mm256_slli_epi32(fours[i], 16));
            out[i].minus_zeros = _mm256_sub_epi16(_mm256_setzero_si256(), twice);
        }
    }
}

/* A block of 128 columns of eight rows. */
INLINE void decode_codes(int kind, const Int8Codes *how, const char *const codes[8], Int8Group *out) {
    const __m256i mask = _mm256_set1_epi8(15), flip = _mm256_set1_epi8((char)how->flip);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)how->table));
    UNROLL for (int group = 0; group < QUANT_BLOCK / INT8_GROUP; group++, out++) {
        __m256i fours[4];
        if (kind == KIND_QUANT_INT4) {
            fours_of_eight_rows(codes, 16 * group, fours);
            UNROLL for (int j = 0; j < 4; j++) {
                out->codes[j] = _mm256_shuffle_epi8(table, _mm256_and_si256(fours[j], mask));
                out->codes[4 + j] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(fours[j], 4), mask));
            }
        } else {
            UNROLL for (int half = 0; half < 2; half++) {
                fours_of_eight_rows(codes, 32 * group + 16 * half, fours);
                UNROLL for (int j = 0; j < 4; j++) out->codes[4 * half + j] = _mm256_xor_si256(fours[j], flip);
            }
        }
    }
}

/* ---- products ---- */

/* Keeps the compiler from computing more at a time than fits in registers. */
#define IN_ORDER(vector) __asm__("" : "+x"(vector))

INLINE __m256i four_of_x(const char *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

/* Exact sums of a group, [row of x][eight weight rows]. */
typedef __m256i Int8GroupSums[PANEL_ROWS][INT8_EIGHTS];

INLINE void group_sums(int kind, int panel_rows, const Int8Group weights[][INT8_GROUPS], const char *x, int group, Int8GroupSums sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    UNROLL for (int m = 0; m < panel_rows; m++) {
        const __m256i of_x = four_of_x(x + m * INT8_BLOCK_BYTES + INT8_SUMS_AT + 4 * group);
        UNROLL for (int e = 0; e < INT8_EIGHTS; e++)
            sums[m][e] = kind == KIND_QUANT_INT8 ? _mm256_setzero_si256() : _mm256_mullo_epi16(weights[e]->minus_zeros, of_x);
    }
    UNROLL for (int j = 0; j < INT8_FOURS; j++) {
        const int at = int8_group_at(kind, group) + j / 4 * int8_halves_apart(kind) + j % 4 * 4;
        __m256i codes[INT8_EIGHTS], sizes[INT8_EIGHTS];
        UNROLL for (int e = 0; e < INT8_EIGHTS; e++) codes[e] = weights[e]->codes[j], sizes[e] = _mm256_abs_epi8(codes[e]);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            const __m256i four = four_of_x(x + m * INT8_BLOCK_BYTES + at);
            UNROLL for (int e = 0; e < INT8_EIGHTS; e++) {
                if (kind == KIND_QUANT_INT8)
                    sums[m][e] = _mm256_add_epi32(sums[m][e], _mm256_madd_epi16(_mm256_maddubs_epi16(sizes[e], _mm256_sign_epi8(four, codes[e])), ones));
                else
                    sums[m][e] = _mm256_add_epi16(sums[m][e], _mm256_maddubs_epi16(codes[e], four));
                IN_ORDER(sums[m][e]);
            }
        }
    }
    if (kind == KIND_QUANT_INT4)
        UNROLL for (int m = 0; m < panel_rows; m++)
            UNROLL for (int e = 0; e < INT8_EIGHTS; e++) sums[m][e] = _mm256_madd_epi16(sums[m][e], ones);
}

/* Sums over groups at even and at odd places, [row of x][2][eight weight rows]. */
typedef __m256 Int8Sums[PANEL_ROWS][2][INT8_EIGHTS];

INLINE void part_by_panel(int kind, int panel_rows, const Int8Group weights[][INT8_GROUPS], int64_t blocks, const char *x, Int8Sums acc) {
    for (; blocks > 0; blocks--, x += panel_rows * INT8_BLOCK_BYTES) {
        UNROLL for (int group = 0; group < QUANT_BLOCK / INT8_GROUP; group++, weights = (const Int8Group(*)[INT8_GROUPS])(weights[0] + 1)) {
            Int8GroupSums sums;
            group_sums(kind, panel_rows, weights, x, group, sums);
            UNROLL for (int m = 0; m < panel_rows; m++) {
                const __m256 scale = _mm256_broadcast_ss((const float *)(x + m * INT8_BLOCK_BYTES + INT8_SCALES_AT) + group);
                UNROLL for (int e = 0; e < INT8_EIGHTS; e++) {
                    acc[m][group % 2][e] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][e]), _mm256_mul_ps(weights[e]->scales, scale), acc[m][group % 2][e]);
                }
            }
        }
    }
}

static void part_by_rows(int kind, int panel_rows, const Int8Group weights[][INT8_GROUPS], int64_t blocks, const char *x, Int8Sums acc) {
#define INT8_CASE(kind, rows)                                                                   \
    case rows:                                                                                  \
        kind == KIND_QUANT_INT4 ? part_by_panel(KIND_QUANT_INT4, rows, weights, blocks, x, acc) \
                                : part_by_panel(KIND_QUANT_INT8, rows, weights, blocks, x, acc); \
        break;
    switch (panel_rows) { FOR_PANEL_ROWS(INT8_CASE, kind) }
}

/* The last codes of rows, as whole blocks: nothing after them may be read. */
static __attribute__((noinline)) void end_of_rows(const char **codes, int num_rows, size_t num_bytes, char *padded, size_t block_bytes) {
    memset(padded, 0, (size_t)num_rows * block_bytes);
    for (int n = 0; n < num_rows; n++) codes[n] = memcpy(padded + (size_t)n * block_bytes, codes[n], num_bytes);
}

/* Weight rows, of which `num_weight_rows` are stored, by the rows of some panels. */
static void int8_panels(int kind, const Int8Codes *how, const Int8Rows *rows, int num_weight_rows, int64_t k, const char *packed,
                        int64_t num_rows, int64_t first_panel, int64_t last_panel, float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t block_bytes = kind == KIND_QUANT_INT4 ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    Int8Group weights[INT8_EIGHTS][INT8_GROUPS];
    Int8Sums acc[INT8_PANELS];
    char padded[INT8_ROWS][QUANT_BLOCK];
    memset(acc, 0, sizeof acc[0] * (size_t)(last_panel - first_panel));
    for (int64_t element = 0; element < k; element += INT8_PART) {
        const int64_t end = element + INT8_PART < k ? element + INT8_PART : k, blocks = (end - element + QUANT_BLOCK - 1) / QUANT_BLOCK;
        for (int e = 0; e < INT8_EIGHTS; e++)
            decode_groups(how, rows, 8 * e, element / INT8_GROUP, blocks * (QUANT_BLOCK / INT8_GROUP), weights[e]);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = element + block * QUANT_BLOCK, offset = at / QUANT_BLOCK * block_bytes;
            const char *codes[INT8_ROWS];
            for (int n = 0; n < INT8_ROWS; n++) {
                codes[n] = rows->codes[n] + offset;
                for (int64_t b = 0; b < block_bytes; b += CACHE_LINE) __builtin_prefetch(rows->ahead[n] + offset + b, 0, 3);
            }
            if (at + QUANT_BLOCK > k) end_of_rows(codes, INT8_ROWS, (size_t)((k - at) * block_bytes + QUANT_BLOCK - 1) / QUANT_BLOCK, padded[0], QUANT_BLOCK);
            for (int e = 0; e < INT8_EIGHTS; e++) {
                Int8Group *into = weights[e] + block * (QUANT_BLOCK / INT8_GROUP);
                kind == KIND_QUANT_INT4 ? decode_codes(KIND_QUANT_INT4, how, codes + 8 * e, into)
                                        : decode_codes(KIND_QUANT_INT8, how, codes + 8 * e, into);
            }
        }
        for (int64_t p = first_panel; p < last_panel; p++) {
            const int64_t first = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - first;
            const char *x = packed + first * row_bytes + element / QUANT_BLOCK * panel_rows * INT8_BLOCK_BYTES;
            part_by_rows(kind, (int)panel_rows, weights, blocks, x, acc[p - first_panel]);
        }
    }
    for (int64_t p = first_panel; p < last_panel; p++) {
        const int64_t first = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - first;
        for (int64_t m = 0; m < panel_rows; m++) {
            float sums[INT8_ROWS];
            UNROLL for (int e = 0; e < INT8_EIGHTS; e++) {
                const __m256 both = _mm256_add_ps(acc[p - first_panel][m][0][e], acc[p - first_panel][m][1][e]);
                _mm256_storeu_ps(sums + 8 * e, _mm256_mul_ps(both, _mm256_set1_ps(how->factor)));
            }
            memcpy(out + (first + m) * ldo, sums, (size_t)num_weight_rows * 4);
        }
    }
}

/* ---- one row of x by 4-bit weight rows, four at a time ----
 *
 * A tile would be used only once: the codes of a row are multiplied as they lie, and sums over lanes put four rows side by
 * side, groups at even places in the lower half. The bits are those of the tile. */
enum { QUAD = 4 };

/* Four 32-bit numbers of each of four rows, transposed. */
INLINE void transpose_quad(const char *rows, int64_t row_bytes, __m128i out[QUAD]) {
    __m128i v[QUAD], pairs[QUAD];
    UNROLL for (int n = 0; n < QUAD; n++) v[n] = _mm_loadu_si128((const __m128i *)(rows + n * row_bytes));
    UNROLL for (int n = 0; n < QUAD; n += 2) {
        pairs[n] = _mm_unpacklo_epi32(v[n], v[n + 1]);
        pairs[n + 1] = _mm_unpackhi_epi32(v[n], v[n + 1]);
    }
    UNROLL for (int n = 0; n < 2; n++) {
        out[2 * n] = _mm_unpacklo_epi64(pairs[n], pairs[n + 2]);
        out[2 * n + 1] = _mm_unpackhi_epi64(pairs[n], pairs[n + 2]);
    }
}

/* One number for each of two groups, each in its half of the vector. */
INLINE __m256i by_halves(const char *groups) {
    int32_t two[2];
    memcpy(two, groups, sizeof two);
    return _mm256_inserti128_si256(_mm256_set1_epi32(two[0]), _mm_set1_epi32(two[1]), 1);
}

/* Sums of 64 columns, two groups, of four rows; zero points are not subtracted yet. */
INLINE __m256i quad_sums(__m256i table, const char *const codes[QUAD], const char *x) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i even = _mm256_loadu_si256((const __m256i *)x), odd = _mm256_loadu_si256((const __m256i *)x + 1);
    __m256i sums[QUAD];
    UNROLL for (int n = 0; n < QUAD; n++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)codes[n]);
        const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, mask));
        const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
        sums[n] = _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd));
    }
    const __m256i first = _mm256_madd_epi16(_mm256_hadd_epi16(sums[0], sums[1]), ones);
    const __m256i last = _mm256_madd_epi16(_mm256_hadd_epi16(sums[2], sums[3]), ones);
    return _mm256_hadd_epi32(first, last);
}

static void int8_one_row(const Int8Codes *how, const Int8Rows *rows, int first, int num_weight_rows, int64_t k, const char *x,
                         float *out) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)how->table));
    const char *scales = (const char *)(rows->scales + first * rows->groups);
    const char *zeros = (const char *)(rows->zeros + (how->has_zeros ? first * rows->groups : 0));
    __m256 acc = _mm256_setzero_ps();
    char padded[QUAD][QUANT_BLOCK / 2];
    UNROLL for (int n = 0; n < QUAD; n++) __builtin_prefetch(rows->ahead[first + n] + (k - 1) / 2, 0, 3);
    for (int64_t at = 0; at < k; at += QUANT_BLOCK, x += INT8_BLOCK_BYTES, scales += 16, zeros += 16) {
        const char *codes[QUAD];
        __m128i of_rows[QUAD], zeros_of_rows[QUAD];
        UNROLL for (int n = 0; n < QUAD; n++) {
            codes[n] = rows->codes[first + n] + at / 2;
            __builtin_prefetch(rows->ahead[first + n] + at / 2, 0, 3);
        }
        if (at + QUANT_BLOCK > k) end_of_rows(codes, QUAD, (size_t)(k - at + 1) / 2, padded[0], QUANT_BLOCK / 2);
        transpose_quad(scales, 4 * rows->groups, of_rows);
        if (how->has_zeros) transpose_quad(zeros, 4 * rows->groups, zeros_of_rows);
        UNROLL for (int step = 0; step < QUANT_BLOCK / INT8_STEP; step++) {
            const __m256i sums_of_x = by_halves(x + INT8_SUMS_AT + 8 * step);
            const __m256i weight_scales = _mm256_inserti128_si256(_mm256_castsi128_si256(of_rows[2 * step]), of_rows[2 * step + 1], 1);
            const __m256 scale = _mm256_mul_ps(_mm256_castsi256_ps(weight_scales), _mm256_castsi256_ps(by_halves(x + INT8_SCALES_AT + 8 * step)));
            __m256i own = _mm256_set1_epi16((int16_t)how->zero);
            if (how->has_zeros) {
                own = _mm256_inserti128_si256(_mm256_castsi128_si256(zeros_of_rows[2 * step]), zeros_of_rows[2 * step + 1], 1);
                own = _mm256_or_si256(own, _mm256_slli_epi32(own, 16));
            }
            const __m256i sums = _mm256_sub_epi32(quad_sums(table, codes, x + step * INT8_STEP), _mm256_madd_epi16(own, sums_of_x));
            acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, acc);
            UNROLL for (int n = 0; n < QUAD; n++) codes[n] += INT8_STEP / 2;
        }
    }
    float sums[QUAD];
    const __m128 both = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
    _mm_storeu_ps(sums, _mm_mul_ps(both, _mm_set1_ps(how->factor)));
    for (int n = 0; n < QUAD && n < num_weight_rows; n++) out[n] = sums[n];
}

static void int8_rows(int kind, const Int8Codes *how, const Int8Rows *rows, int num_weight_rows, int64_t k, const char *packed,
                      int64_t num_rows, float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS);
    if (kind == KIND_QUANT_INT4 && num_rows == 1) {
        for (int n = 0; n < num_weight_rows; n += QUAD) int8_one_row(how, rows, n, num_weight_rows - n, k, packed, out + n);
        return;
    }
    for (int64_t first = 0; first < panels; first += INT8_PANELS)
        int8_panels(kind, how, rows, num_weight_rows, k, packed, num_rows, first,
                    first + INT8_PANELS < panels ? first + INT8_PANELS : panels, out, ldo);
}
#else
/* Rounds 32 values to int8 and stores them with their scale and sums. */
INLINE void store_int8_group(int kind, const float values[INT8_GROUP], char *block, int group) {
    float largest = 0;
    int16_t sums[2] = {0};
    int is_finite = 1;
    for (int i = 0; i < INT8_GROUP; i++) {
        const float magnitude = fabsf(values[i]);
        is_finite &= magnitude <= LARGEST_F32;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float inverse = int8_inverse(is_finite, largest), scale = int8_scale(is_finite, largest);
    memcpy(block + INT8_SCALES_AT + 4 * group, &scale, 4);
    for (int i = 0; i < INT8_GROUP; i++) {
        const int8_t code = is_finite ? (int8_t)lrintf(values[i] * inverse) : 0;
        const int half = kind == KIND_QUANT_INT8 ? i / 16 : i % 2, within = kind == KIND_QUANT_INT8 ? i % 16 : i / 2;
        ((int8_t *)block)[int8_group_at(kind, group) + half * int8_halves_apart(kind) + within] = code;
        sums[within % 4 / 2] = (int16_t)(sums[within % 4 / 2] + code);
    }
    memcpy(block + INT8_SUMS_AT + 4 * group, sums, sizeof sums);
}

/* Weight rows by the rows of panels, one after another. */
static void int8_rows(int kind, const Int8Codes *how, const Int8Rows *rows, int num_weight_rows, int64_t k, const char *packed,
                      int64_t num_rows, float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    for (int n = 0; n < num_weight_rows; n++) {
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - first;
            float acc[PANEL_ROWS][2] = {0};
            char padded[QUANT_BLOCK];
            for (int64_t element = 0; element < k; element += QUANT_BLOCK) {
                const uint8_t *codes = (const uint8_t *)int8_block_codes(kind, rows->codes[n], element, k, padded);
                const char *blocks = packed + first * row_bytes + element / QUANT_BLOCK * panel_rows * INT8_BLOCK_BYTES;
                int weights[QUANT_BLOCK]; /* as x lies */
                for (int i = 0; i < QUANT_BLOCK; i++) {
                    const int nibbles = codes[i / INT8_STEP * 32 + i % 32];
                    const int group = i / INT8_STEP * 2 + i % 32 / 16;
                    const int zero = how->has_zeros ? rows->zeros[n * rows->groups + element / INT8_GROUP + group] : how->zero;
                    weights[i] = kind == KIND_QUANT_INT8 ? (int8_t)(codes[i] ^ how->flip)
                                                         : how->table[i % INT8_STEP < 32 ? nibbles & 15 : nibbles >> 4] - zero;
                }
                for (int64_t m = 0; m < panel_rows; m++) {
                    const int8_t *x = (const int8_t *)blocks + m * INT8_BLOCK_BYTES;
                    for (int group = 0; group < QUANT_BLOCK / INT8_GROUP; group++) {
                        const int first_of = int8_group_at(kind, group), apart = int8_halves_apart(kind);
                        float scale;
                        int32_t sum = 0;
                        memcpy(&scale, x + INT8_SCALES_AT + 4 * group, 4);
                        for (int i = 0; i < INT8_GROUP; i++) {
                            const int at = first_of + i / 16 * apart + i % 16;
                            sum += weights[at] * x[at];
                        }
                        acc[m][group % 2] += (float)sum * (rows->scales[n * rows->groups + element / INT8_GROUP + group] * scale);
                    }
                }
            }
            for (int64_t m = 0; m < panel_rows; m++) out[(first + m) * ldo + n] = (acc[m][0] + acc[m][1]) * how->factor;
        }
    }
}
#endif

/* A group of a row, of which `filled` values exist; a whole group in a loop of vectors. */
INLINE void load_group(const char *src, int dtype, int64_t first, int64_t filled, float values[INT8_GROUP]) {
#define LOAD_GROUP(type) for (int i = 0; i < INT8_GROUP; i++) values[i] = load_as(type, src, first + i)
    if (filled >= INT8_GROUP) {
        BY_DTYPE(dtype, LOAD_GROUP)
        return;
    }
    for (int i = 0; i < INT8_GROUP; i++) values[i] = i < filled ? load_as(dtype, src, first + i) : 0.0f;
}

static void pack_int8(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows,
                      int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? round_up(k, QUANT_BLOCK) : last_k;
    for (int64_t at = first_k; at < end; at += INT8_GROUP) {
        float values[INT8_GROUP];
        char *block = panel + (at / QUANT_BLOCK * panel_rows + row) * INT8_BLOCK_BYTES;
        const int group = (int)(at % QUANT_BLOCK / INT8_GROUP);
        load_group(src, dtype, at - first_k, last_k - at, values);
        kind == KIND_QUANT_INT4 ? store_int8_group(KIND_QUANT_INT4, values, block, group)
                                : store_int8_group(KIND_QUANT_INT8, values, block, group);
    }
}

/* Writes `count` 32-bit numbers, each source number `times` times. */
static void spread_groups(const void *groups, int64_t count, int64_t times, void *out) {
    const char *src = groups;
    char *to = out;
    if (times == 1) {
        memcpy(to, src, (size_t)count * 4);
        return;
    }
    for (; count > 0; count -= times, src += 4, to += 4 * times)
        for (int64_t i = 0; i < times && i < count; i++) memcpy(to + 4 * i, src, 4);
}

static void multiply_int8(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                          float *out, int64_t ldo, Matrix next) {
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    const Int8Codes how = int8_codes(weight.quantized);
    const int64_t padded_groups = parts_of(k, QUANT_BLOCK) * (QUANT_BLOCK / INT8_GROUP);
    const int64_t num_groups = parts_of(k, INT8_GROUP);
    /* a scale serves several INT8_GROUP columns, or all */
    const int64_t times = weight.quantized->group_cols ? weight.quantized->group_cols / INT8_GROUP : num_groups + 1;
    float scales[INT8_ROWS * padded_groups];
    int32_t zeros[how.has_zeros ? INT8_ROWS * padded_groups : 1];
    ROW_GROUPS(groups, weight, k);
    memset(scales, 0, sizeof scales);
    memset(zeros, 0, sizeof zeros);
    Int8Rows rows = {.scales = scales, .zeros = zeros, .groups = padded_groups};
    for (int64_t first = 0; first < num_weight_rows; first += INT8_ROWS) {
        const int count = num_weight_rows - first < INT8_ROWS ? (int)(num_weight_rows - first) : INT8_ROWS;
        for (int n = 0; n < INT8_ROWS; n++) {
            const int64_t row = first + (n < count ? n : count - 1);
            const char *ahead = stream_row(&stream, row + INT8_ROWS);
            rows.codes[n] = weight.data + row * weight.stride;
            rows.ahead[n] = ahead ? ahead : rows.codes[n];
            read_groups(&groups, weight.first_row + row);
            spread_groups(groups.scales, num_groups, times, scales + n * padded_groups);
            if (how.has_zeros) spread_groups(groups.zeros, num_groups, times, zeros + n * padded_groups);
        }
        int8_rows(kind, &how, &rows, count, k, packed, num_rows, out + first, ldo);
    }
}
