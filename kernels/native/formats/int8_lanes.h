/* Products of integer codes with rows rounded to int8, eight weight rows in the lanes of a vector; a part of quantized_int8.h.
 *
 * Codes of eight rows are decoded into a tile, fours of columns by rows, which then serves all rows of x: a four of x in
 * every lane, multiplied by the fours of eight rows, gives the sums of eight rows. Unsigned codes of 4 bits are multiplied as
 * they are; their zero point, 16 at most, times the sums of x is where the 16-bit sums begin, modulo 2^16, in which the whole sum of a
 * group fits. Codes of 8 bits are multiplied as magnitudes by what takes over their signs.
 */
enum { INT8_PART = 512, INT8_FOURS = INT8_GROUP / 4, INT8_PANELS = 32 };
enum { INT8_GROUPS = INT8_PART / INT8_GROUP, INT8_EIGHTS = INT8_ROWS / 8 };

typedef struct {
    __m256i codes[INT8_FOURS];
    __m256 scales;
    __m256i minus_zeros; /* twice in every lane, as 16 bits */
} Int8Group;

/* Sixteen bytes of eight rows, rows 0 to 3 in the lower and 4 to 7 in the upper halves of four vectors, to a vector for each
 * four of the bytes, rows in its lanes. */
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

/* 32 values as int8, and the sums of what they become. */
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

/* Scales and zero points of eight rows, of a multiple of four groups. */
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

/* Keeps the compiler from computing more at a time than there are registers for. */
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
#define INT8_CASE(rows)                                                                \
    case rows:                                                                         \
        if (kind == KIND_QUANT_INT4)                                                   \
            part_by_panel(KIND_QUANT_INT4, rows, weights, blocks, x, acc);            \
        else                                                                           \
            part_by_panel(KIND_QUANT_INT8, rows, weights, blocks, x, acc);            \
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

/* The last codes of rows, behind which nothing may be read, as whole blocks. */
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
                if (kind == KIND_QUANT_INT4)
                    decode_codes(KIND_QUANT_INT4, how, codes + 8 * e, weights[e] + block * (QUANT_BLOCK / INT8_GROUP));
                else
                    decode_codes(KIND_QUANT_INT8, how, codes + 8 * e, weights[e] + block * (QUANT_BLOCK / INT8_GROUP));
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

#include "formats/int8_one_row.h"

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
