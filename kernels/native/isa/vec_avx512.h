/* Vector operations of both AVX-512 variants. */
#include <immintrin.h>

#define LANES 16
#define TILE_ROWS 4
#define PANEL_ROWS 6
#define SINGLE_WEIGHT_ROWS 1
#define HAS_TALL_STEPS 0
#define HAS_QUANT_LANES 1

#define INLINE static inline __attribute__((always_inline))
typedef __m512 Vec;

INLINE Vec vec_zero(void) { return _mm512_setzero_ps(); }
INLINE Vec vec_all(float value) { return _mm512_set1_ps(value); }
INLINE Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, acc); }
INLINE Vec vec_load_f32(const float *src) { return _mm512_loadu_ps(src); }

INLINE void vec_store_f32(float *dst, Vec a) { _mm512_storeu_ps(dst, a); }

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
