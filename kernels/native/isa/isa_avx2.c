/* x86-64 with AVX2, FMA and F16C. */
#include <immintrin.h>

#include "kernels.h"

#define ISA_NAME "avx2"
#define ISA_SYMBOL isa_avx2
#define LANES 8
#define TILE_ROWS 3
#define PANEL_ROWS 4
#define HAS_BF16_DOT 0
#define HAS_BYTE_DOT 0
#define HAS_PLANES_DOT 0
#define SINGLE_WEIGHT_ROWS 0
#define HAS_QUANT_LANES 1
#define HAS_TALL_STEPS 1

#define INLINE static inline __attribute__((always_inline))
typedef __m256 Vec;

INLINE Vec vec_zero(void) { return _mm256_setzero_ps(); }
INLINE Vec vec_all(float value) { return _mm256_set1_ps(value); }
INLINE Vec vec_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, acc); }
INLINE Vec vec_load_f32(const float *src) { return _mm256_loadu_ps(src); }

INLINE void vec_store_f32(float *dst, Vec a) { _mm256_storeu_ps(dst, a); }

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

#include "isa/steps_avx2.h"
#include "isa/isa_template.h"
