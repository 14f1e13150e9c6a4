/* Any CPU: vectors of four through the compiler's generic vector types (SSE2 on x86-64, NEON on aarch64). */
#include <stdint.h>
#include <string.h>

#define ISA_NAME "portable"
#define ISA_SYMBOL isa_portable
#define LANES 4
#define TILE_ROWS 2
#define PANEL_ROWS 4
#define HAS_BF16_DOT 0
#define HAS_BYTE_DOT 0
#define HAS_PLANES_DOT 0
#define SINGLE_WEIGHT_ROWS 0
#define HAS_TALL_STEPS 0
#define HAS_QUANT_LANES 0

#define INLINE static inline __attribute__((always_inline))
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

INLINE Vec vec_zero(void) { return (Vec){0.0f, 0.0f, 0.0f, 0.0f}; }
INLINE Vec vec_all(float value) { return (Vec){value, value, value, value}; }
INLINE Vec vec_add(Vec a, Vec b) { return a + b; }
INLINE Vec vec_fma(Vec acc, Vec a, Vec b) { return acc + a * b; }

INLINE Vec vec_load_f32(const float *src) {
    Vec value;
    memcpy(&value, src, sizeof value);
    return value;
}

INLINE void vec_store_f32(float *dst, Vec a) { memcpy(dst, &a, sizeof a); }

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

#include "isa/isa_template.h"
