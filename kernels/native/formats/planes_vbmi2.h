/* A block of the lossless code in registers, with AVX-512 VBMI2: escapes are dealt out to their places by one instruction. */
#ifndef MOE_RUNTIME_PLANES_VBMI2_H
#define MOE_RUNTIME_PLANES_VBMI2_H

#include <immintrin.h>
#include <string.h>

#include "formats/planes.h"

/* Where the next block lies. */
typedef struct {
    const char *indices, *signs;
    const uint8_t *escapes;
} PlanesPlace;

static inline PlanesPlace planes_place(const char *row, const uint8_t *escapes, int64_t blocks) {
    return (PlanesPlace){row, row + blocks * PLANES_INDEX_BYTES, escapes};
}

static inline __m512i planes_exponents(const uint8_t *book) {
    return _mm512_broadcast_i64x2(_mm_loadl_epi64((const __m128i *)book));
}

static inline uint64_t planes_word(const char *indices, int number) {
    uint64_t word;
    memcpy(&word, indices + 8 * number, sizeof word);
    return word;
}

/* How many escapes a row has. */
static inline int64_t planes_escapes(const char *row, int64_t blocks) {
    int64_t count = 0;
    for (; blocks > 0; blocks--, row += PLANES_INDEX_BYTES)
        count += __builtin_popcountll(planes_word(row, 0) & planes_word(row, 1) & planes_word(row, 2));
    return count;
}

/* The first and the last 32 elements of a block, and on to the next one. */
static inline void planes_block(PlanesPlace *place, __m512i exponents, __m512i out[2]) {
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

/* Fetches what is read PLANES_AHEAD bytes later, and moves on as far as a block is long. */
static inline void planes_fetch(const char **ahead) {
    __builtin_prefetch(*ahead, 0, 3);
    __builtin_prefetch(*ahead + 64, 0, 3);
    *ahead += PLANES_INDEX_BYTES + PLANES_BLOCK;
}

#endif
