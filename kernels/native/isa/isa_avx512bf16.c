/* x86-64 with AVX-512 and its instructions for pairs of bf16, fours of bytes and tables of bytes (Zen 4, Sapphire Rapids
 * and newer). */
#define ISA_NAME "avx512bf16"
#define ISA_SYMBOL isa_avx512bf16
#define HAS_BF16_DOT 1
#define HAS_BYTE_DOT 1
#define HAS_PLANES_DOT 1

#include "isa/vec_avx512.h"

typedef __m512bh BfVec;

INLINE BfVec vec_load_bf16_pairs(const char *src) { return (__m512bh)_mm512_loadu_si512(src); }
INLINE BfVec vec_bf16_pair(const char *src) {
    int pair;
    __builtin_memcpy(&pair, src, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

INLINE void vec_pair_rows(const char *even, const char *odd, char *low, char *high) {
    const __m512i first = _mm512_loadu_si512(even), second = _mm512_loadu_si512(odd);
    _mm512_storeu_si512(low, _mm512_unpacklo_epi16(first, second));
    _mm512_storeu_si512(high, _mm512_unpackhi_epi16(first, second));
}

INLINE Vec dot_bf16(Vec acc, BfVec a, BfVec b) { return _mm512_dpbf16_ps(acc, a, b); }

#include "isa/isa_template.h"
