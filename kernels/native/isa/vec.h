/* The operations on vectors of fp32 that the kernels use. The file of an instruction set defines LANES and HAS_BF16_DOT;
 * otherwise they follow from the processor that is compiled for.
 *
 * Constants: LANES (of a vector), TILE_ROWS by PANEL_ROWS (most weight rows by rows of x whose sums stay in registers),
 * SINGLE_WEIGHT_ROWS (one row of x takes weight rows one by one: where one chain of sums keeps up with memory), HAS_BF16_DOT
 * (instructions for pairs of bf16, fours of bytes and tables of bytes), HAS_QUANT_LANES (codes are decoded in registers). */
#pragma once

#include "kernels.h"

#if !defined(LANES) && defined(__AVX512F__)
#define LANES 16
#elif !defined(LANES) && defined(__AVX2__)
#define LANES 8
#elif !defined(LANES)
#define LANES 4
#endif
#if !defined(HAS_BF16_DOT) && LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI2__)
#define HAS_BF16_DOT 1
#elif !defined(HAS_BF16_DOT)
#define HAS_BF16_DOT 0
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if LANES == 16
#define TILE_ROWS 4
#define PANEL_ROWS 6
#define SINGLE_WEIGHT_ROWS 1
#define HAS_QUANT_LANES 1

typedef __m512 Vec;

INLINE Vec vec_zero(void) { return _mm512_setzero_ps(); }
INLINE Vec vec_all(float value) { return _mm512_set1_ps(value); }
INLINE Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec vec_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, acc); }
INLINE Vec vec_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec vec_load_f32(const float *src) { return _mm512_loadu_ps(src); }

INLINE void vec_store_f32(float *dst, Vec a) { _mm512_storeu_ps(dst, a); }

INLINE Vec vec_load_i8(const char *src) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)src))); }

INLINE Vec vec_load_f16(const char *src) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src)); }

INLINE Vec vec_load_bf16_even(const char *src) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(src), 16));
}

INLINE Vec vec_load_bf16_odd(const char *src) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(src), _mm512_set1_epi32((int)0xffff0000u)));
}

/* The sums of four vectors by transposition. */
INLINE void vec_four_sums(Vec a, Vec b, Vec c, Vec d, float out[4]) {
    Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    Vec abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 top = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), top);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#if HAS_BF16_DOT
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

INLINE void vec_store_bf16(char *dst, Vec a) { _mm256_storeu_si256((__m256i *)dst, (__m256i)_mm512_cvtneps_pbh(a)); }

INLINE Vec dot_bf16(Vec acc, BfVec a, BfVec b) { return _mm512_dpbf16_ps(acc, a, b); }
#endif

#elif LANES == 8
#define TILE_ROWS 3
#define PANEL_ROWS 4
#define SINGLE_WEIGHT_ROWS 0
#define HAS_QUANT_LANES 1

typedef __m256 Vec;

INLINE Vec vec_zero(void) { return _mm256_setzero_ps(); }
INLINE Vec vec_all(float value) { return _mm256_set1_ps(value); }
INLINE Vec vec_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec vec_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, acc); }
INLINE Vec vec_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec vec_load_f32(const float *src) { return _mm256_loadu_ps(src); }

INLINE void vec_store_f32(float *dst, Vec a) { _mm256_storeu_ps(dst, a); }

INLINE Vec vec_load_i8(const char *src) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)src))); }

INLINE Vec vec_load_f16(const char *src) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src)); }

INLINE Vec vec_load_bf16_even(const char *src) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)src), 16));
}

INLINE Vec vec_load_bf16_odd(const char *src) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)src), high));
}

/* The sums of four vectors by transposition. */
INLINE void vec_four_sums(Vec a, Vec b, Vec c, Vec d, float out[4]) {
    Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#else
/* Vectors of four through the compiler's generic vector types: SSE2 on x86-64, NEON on aarch64. */
#define TILE_ROWS 2
#define PANEL_ROWS 4
#define SINGLE_WEIGHT_ROWS 0
#define HAS_QUANT_LANES 0

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

INLINE Vec vec_zero(void) { return (Vec){0.0f, 0.0f, 0.0f, 0.0f}; }
INLINE Vec vec_all(float value) { return (Vec){value, value, value, value}; }
INLINE Vec vec_add(Vec a, Vec b) { return a + b; }
INLINE Vec vec_mul(Vec a, Vec b) { return a * b; }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return acc + a * b; }

INLINE Vec vec_max(Vec a, Vec b) {
    const Words is_more = (Words)(a > b);
    return (Vec)(((Words)a & is_more) | ((Words)b & ~is_more));
}

INLINE Vec vec_load_f32(const float *src) {
    Vec value;
    memcpy(&value, src, sizeof value);
    return value;
}

INLINE void vec_store_f32(float *dst, Vec a) { memcpy(dst, &a, sizeof a); }

INLINE Vec vec_load_i8(const char *src) { return (Vec){(int8_t)src[0], (int8_t)src[1], (int8_t)src[2], (int8_t)src[3]}; }

INLINE Words load_words(const char *src) {
    Words words;
    memcpy(&words, src, sizeof words);
    return words;
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "the packed layouts assume a little-endian machine"
#endif

/* Element 2 i lies in the low half of word i, element 2 i + 1 in the high half. */
INLINE Vec vec_load_bf16_even(const char *src) { return (Vec)(load_words(src) << 16); }
INLINE Vec vec_load_bf16_odd(const char *src) { return (Vec)(load_words(src) & 0xffff0000u); }

INLINE Vec vec_load_f16(const char *src) {
    uint16_t halves[LANES];
    memcpy(halves, src, sizeof halves);
    Words half = {halves[0], halves[1], halves[2], halves[3]};
    Words magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const Words scale = {0x77800000u, 0x77800000u, 0x77800000u, 0x77800000u}; /* 2^112, see convert.h */
    Words finite = (Words)((Vec)(magnitude << 13) * (Vec)scale);
    Words special = (magnitude << 13) | 0x7f800000u;
    Words is_special = (Words)(magnitude >= 0x7c00u);
    return (Vec)(((special & is_special) | (finite & ~is_special)) | sign);
}

INLINE void vec_four_sums(Vec a, Vec b, Vec c, Vec d, float out[4]) {
    const Vec four[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) out[i] = (four[i][0] + four[i][2]) + (four[i][1] + four[i][3]);
}
#endif

typedef int32_t VecPlaces __attribute__((vector_size(4 * LANES)));

/* A vector of AT(d, i) for every lane i. All places are constants: gcc and clang make one instruction of it. */
#define FOUR_LANES(AT, d, i) AT(d, i), AT(d, i + 1), AT(d, i + 2), AT(d, i + 3)
#if LANES == 16
#define EACH_LANE(AT, d) (Vec){FOUR_LANES(AT, d, 0), FOUR_LANES(AT, d, 4), FOUR_LANES(AT, d, 8), FOUR_LANES(AT, d, 12)}
#elif LANES == 8
#define EACH_LANE(AT, d) (Vec){FOUR_LANES(AT, d, 0), FOUR_LANES(AT, d, 4)}
#else
#define EACH_LANE(AT, d) (Vec){FOUR_LANES(AT, d, 0)}
#endif
#define PARTNER(d, i) (((i) ^ (d)) % LANES)
#define SWAPPED(d, i) a[PARTNER(d, i)]
#define UPPER(d, i) ((i) & (d) ? second[PARTNER(d, i)] : first[i])
#define LOWER(d, i) ((i) & (d) ? second[i] : first[PARTNER(d, i)])

/* Lanes i and i ^ d change places; of every square of 2 * d rows and lanes, the quarters off the diagonal. */
#define VEC_SWAPS(d) \
    INLINE Vec vec_swapped_##d(Vec a) { return EACH_LANE(SWAPPED, d); } \
    INLINE void vec_swap_quarters_##d(Vec rows[LANES]) { \
        UNROLL for (int i = 0; i < LANES; i++) \
            if (!(i & d)) { \
                const Vec first = rows[i], second = rows[i + d]; \
                rows[i] = EACH_LANE(UPPER, d); \
                rows[i + d] = EACH_LANE(LOWER, d); \
            } \
    }
VEC_SWAPS(1)
VEC_SWAPS(2)
#if LANES > 4
VEC_SWAPS(4)
#endif
#if LANES > 8
VEC_SWAPS(8)
#endif

/* In all lanes; halves are added first. */
INLINE Vec vec_most(Vec a) {
#if LANES > 8
    a = vec_max(a, vec_swapped_8(a));
#endif
#if LANES > 4
    a = vec_max(a, vec_swapped_4(a));
#endif
    a = vec_max(a, vec_swapped_2(a));
    return vec_max(a, vec_swapped_1(a));
}

INLINE Vec vec_total(Vec a) {
#if LANES > 8
    a = vec_add(a, vec_swapped_8(a));
#endif
#if LANES > 4
    a = vec_add(a, vec_swapped_4(a));
#endif
    a = vec_add(a, vec_swapped_2(a));
    return vec_add(a, vec_swapped_1(a));
}

/* LANES rows become columns. */
INLINE void vec_transpose(Vec rows[LANES]) {
#if LANES > 8
    vec_swap_quarters_8(rows);
#endif
#if LANES > 4
    vec_swap_quarters_4(rows);
#endif
    vec_swap_quarters_2(rows);
    vec_swap_quarters_1(rows);
}

/* Two to the power of numbers up to 0, to a relative error of 2^-22: the best polynomial between -1/2 and 1/2 that is 1 at
 * 0. */
INLINE Vec vec_exp2(Vec x) {
    const Vec shifter = vec_all(12582912.0f + 127.0f); /* adding it leaves the exponent in the last bits */
    x = vec_max(vec_all(-126.0f), x); /* a NaN stays one */
    const Vec shifted = x + shifter, n = shifted - shifter, r = x - n;
    Vec p = vec_all(1.3264727197e-3f);
    p = p * r + vec_all(9.6715126397e-3f);
    p = p * r + vec_all(5.5507337433e-2f);
    p = p * r + vec_all(2.4022242085e-1f);
    p = p * r + vec_all(6.9314697760e-1f);
    p = p * r + vec_all(1.0f);
    return p * (Vec)((VecPlaces)shifted << 23);
}
