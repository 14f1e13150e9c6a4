/* The lossless code in registers, with AVX-512 VBMI2: one instruction moves all escapes of a block to their places. With
 * dot_bf16 there are also products that decode rows as they multiply them, without writing them to memory. */
#pragma once

#include <immintrin.h>

#include "formats/planes.h"
#if defined(__AVX512BF16__)
#include "isa/tiles.h"
#endif

/* Where the next block lies. */
typedef struct {
    const char *indices, *signs;
    const uint8_t *escapes;
} PlanesPlace;

INLINE PlanesPlace planes_place(const char *row, const uint8_t *escapes, int64_t blocks) {
    return (PlanesPlace){row, row + blocks * PLANES_INDEX_BYTES, escapes};
}

INLINE __m512i planes_exponents(const uint8_t *book) {
    return _mm512_broadcast_i64x2(_mm_loadl_epi64((const __m128i *)book));
}

INLINE uint64_t planes_word(const char *indices, int number) {
    uint64_t word;
    memcpy(&word, indices + 8 * number, sizeof word);
    return word;
}

/* How many escapes a row has. */
INLINE int64_t planes_escapes(const char *row, int64_t blocks) {
    int64_t count = 0;
    for (; blocks > 0; blocks--, row += PLANES_INDEX_BYTES)
        count += __builtin_popcountll(planes_word(row, 0) & planes_word(row, 1) & planes_word(row, 2));
    return count;
}

/* The first and the last 32 elements of a block; moves on to the next block. */
INLINE void planes_block(PlanesPlace *place, __m512i exponents, __m512i out[2]) {
    const __m512i top = _mm512_set1_epi8((char)0x80), rest = _mm512_set1_epi8(0x7f);
    const uint64_t low_bits = planes_word(place->indices, 0), middle_bits = planes_word(place->indices, 1);
    const uint64_t high_bits = planes_word(place->indices, 2), escaped = low_bits & middle_bits & high_bits;
    const __m512i ones = _mm512_maskz_set1_epi8(low_bits, 1), twos = _mm512_maskz_set1_epi8(middle_bits, 2);
    const __m512i indices = _mm512_ternarylogic_epi64(ones, twos, _mm512_maskz_set1_epi8(high_bits, 4), 0xfe);
    __m512i exponent = _mm512_shuffle_epi8(exponents, indices);
    exponent = _mm512_mask_expand_epi8(exponent, escaped, _mm512_loadu_si512(place->escapes));
    /* The high byte is the sign and seven bits of the exponent, the low byte the eighth and the mantissa. */
    const __m512i sign = _mm512_loadu_si512(place->signs);
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_and_si512(_mm512_srli_epi16(exponent, 1), rest), sign, top, 0xf8);
    const __m512i low = _mm512_ternarylogic_epi64(_mm512_and_si512(_mm512_slli_epi16(exponent, 7), top), sign, rest, 0xf8);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
    place->indices += PLANES_INDEX_BYTES;
    place->signs += PLANES_BLOCK;
    place->escapes += __builtin_popcountll(escaped);
}

/* Fetches what is read PLANES_AHEAD bytes later and moves on by a block. */
INLINE void planes_fetch(const char **ahead) {
    __builtin_prefetch(*ahead, 0, 3);
    __builtin_prefetch(*ahead + 64, 0, 3);
    *ahead += PLANES_INDEX_BYTES + PLANES_BLOCK;
}

#if defined(__AVX512BF16__)
/* Sums as in tiles.h, in the same order: one chain for each row of x and of the weights. Two weight rows at once, since a
 * single chain is slower than memory. */

/* Half a block of each row times half a step of a panel. */
INLINE void dot_planes_half(int rows, int panel_rows, Vec acc[PANEL_ROWS][TILE_ROWS], __m512i values[2][2], int half,
                            const char *panel) {
    UNROLL for (int m = 0; m < panel_rows; m++) {
        const BfVec x = vec_load_bf16_pairs(panel + m * K_STEP * 2);
        UNROLL for (int n = 0; n < rows; n++) acc[m][n] = dot_bf16(acc[m][n], (BfVec)values[n][half], x);
    }
}

INLINE const uint8_t *dot_planes_of(int rows, int panel_rows, const char *row, const uint8_t *escapes, const uint8_t *end,
                                    const uint8_t *book, int64_t cols, const char *panel, float *out, int64_t ldo) {
    const int64_t blocks = planes_blocks(cols), row_bytes = planes_row_bytes(cols);
    const int step_bytes = panel_rows * K_STEP * 2;
    const __m512i exponents = planes_exponents(book);
    const uint8_t *second = rows == 1 ? escapes : escapes + planes_escapes(row, blocks);
    if (second > end) return NULL;
    PlanesPlace places[2] = {planes_place(row, escapes, blocks), planes_place(row + row_bytes, second, blocks)};
    PlanesPlace *last = &places[rows - 1];
    const char *ahead[2] = {row + PLANES_AHEAD, row + row_bytes + PLANES_AHEAD};
    Vec acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int m = 0; m < panel_rows; m++)
        UNROLL for (int n = 0; n < rows; n++) acc[m][n] = vec_zero();
    for (int64_t left = cols; left > 0; left -= PLANES_BLOCK, panel += 2 * step_bytes) {
        __m512i values[2][2];
        if (last->escapes > end) return NULL;
        UNROLL for (int n = 0; n < rows; n++) {
            planes_fetch(&ahead[n]);
            planes_block(&places[n], exponents, values[n]);
        }
        dot_planes_half(rows, panel_rows, acc, values, 0, panel);
        if (left <= K_STEP) break; /* the panel ends here */
        dot_planes_half(rows, panel_rows, acc, values, 1, panel + step_bytes);
    }
    store_sums(rows, panel_rows, acc, out, ldo);
    return last->escapes <= end ? last->escapes : NULL;
}

static const uint8_t *dot_planes(const char *row, int rows, const uint8_t *escapes, const uint8_t *end, const uint8_t *book,
                                 int64_t cols, const char *panel, int panel_rows, float *out, int64_t ldo) {
#define PLANES_CASE(rows, panel_rows) \
    case panel_rows: return dot_planes_of(rows, panel_rows, row, escapes, end, book, cols, panel, out, ldo);
    if (rows == 2)
        switch (panel_rows) { FOR_PANEL_ROWS(PLANES_CASE, 2) }
    else
        switch (panel_rows) { FOR_PANEL_ROWS(PLANES_CASE, 1) }
    return NULL;
}
#endif
