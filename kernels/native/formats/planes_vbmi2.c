/* Decoding the lossless code with AVX-512 VBMI2: escapes are dealt out to their places by one instruction. */
#include <immintrin.h>
#include <string.h>

#include "formats/planes.h"

static inline __m512i indices(uint64_t low, uint64_t middle, uint64_t high) {
    const __m512i ones = _mm512_maskz_set1_epi8(low, 1), twos = _mm512_maskz_set1_epi8(middle, 2);
    return _mm512_ternarylogic_epi64(ones, twos, _mm512_maskz_set1_epi8(high, 4), 0xfe);
}

const uint8_t *planes_decode_vbmi2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                        char *out) {
    const char *signs = row + blocks * PLANES_INDEX_BYTES, *ahead = row + PLANES_AHEAD;
    const __m512i exponents = _mm512_broadcast_i64x2(_mm_loadl_epi64((const __m128i *)book));
    const __m512i top = _mm512_set1_epi8((char)0x80), rest = _mm512_set1_epi8(0x7f);
    for (int64_t block = 0; block < blocks; block++, row += PLANES_INDEX_BYTES, signs += PLANES_BLOCK, out += 2 * PLANES_BLOCK) {
        uint64_t words[3];
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
        ahead += PLANES_INDEX_BYTES + PLANES_BLOCK;
        memcpy(words, row, sizeof words);
        const __mmask64 escaped = words[0] & words[1] & words[2];
        if (escapes > end) return NULL;
        __m512i exponent = _mm512_shuffle_epi8(exponents, indices(words[0], words[1], words[2]));
        exponent = _mm512_mask_expand_epi8(exponent, escaped, _mm512_loadu_si512(escapes));
        escapes += __builtin_popcountll(escaped);
        /* The high byte is the sign and seven bits of the exponent, the low byte the eighth and the mantissa. */
        const __m512i sign = _mm512_loadu_si512(signs);
        const __m512i high = _mm512_ternarylogic_epi64(_mm512_and_si512(_mm512_srli_epi16(exponent, 1), rest), sign, top, 0xf8);
        const __m512i low = _mm512_ternarylogic_epi64(_mm512_and_si512(_mm512_slli_epi16(exponent, 7), top), sign, rest, 0xf8);
        _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(out + PLANES_BLOCK, _mm512_unpackhi_epi8(low, high));
    }
    return escapes <= end ? escapes : NULL;
}
