/* Blocks with scales of their own: their codes and numbers, 32 codes at a time, their values, and products that decode them
 * in registers. kernels/quantized/block_reference.py defines them.
 *
 * A value is code * scale - minimum. The product is exact in fp32 (11 bits of fp16, at most 7 of a second scale, and a code
 * of fewer than 8), so a value is rounded once, by the subtraction, whether or not that is fused. */
#pragma once

#include "formats/values.h"

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));
typedef uint32_t FourWords __attribute__((vector_size(16)));

/* The numbers of a block's groups, of 32 codes or of 16. */
typedef struct {
    float scales[16], minima[16];
} GroupNumbers;

static const int8_t NONLINEAR_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t DOUBLED_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE Bytes load_bytes(const uint8_t *src) {
    Bytes bytes;
    memcpy(&bytes, src, sizeof bytes);
    return bytes;
}

/* The bits of `mask` of every byte, shifted to the right; and codes that stay bytes, shifted to the left. */
INLINE Bytes field(Bytes bytes, int shift, uint8_t mask) { return (Bytes)((Pairs)bytes >> shift) & mask; }

INLINE Bytes raised_bytes(Bytes bytes, int shift) { return (Bytes)((Pairs)bytes << shift); }

INLINE Codes codes_at(const uint8_t *src) {
    Codes codes;
    memcpy(&codes, src, sizeof codes);
    return codes;
}

INLINE Codes code_field(Codes bytes, int shift, uint8_t mask) { return (Codes)((CodePairs)bytes >> shift) & mask; }
INLINE Codes raised(Codes bytes, int shift) { return (Codes)((CodePairs)bytes << shift); }

INLINE float half_at(const uint8_t *src) {
#if defined(__F16C__)
    return _cvtsh_ss(load_u16((const char *)src));
#else
    return load_f16((const char *)src);
#endif
}

/* Half of the scale, as the table has doubled values; the two smallest are subnormal. */
INLINE float half_of_e8m0(uint8_t code) { return from_bits(code < 2 ? 1u << (21 + code) : (uint32_t)(code - 1) << 23); }

INLINE Bytes looked_up(const int8_t table[16], Bytes codes) {
#if defined(__AVX2__)
    return (Bytes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table), (__m128i)codes);
#else
    uint8_t numbers[16];
    memcpy(numbers, &codes, sizeof numbers);
    for (int i = 0; i < 16; i++) numbers[i] = (uint8_t)table[numbers[i]];
    return load_bytes(numbers);
#endif
}

/* 16 where a bit of two bytes is set, else 0. */
INLINE Bytes fifth_bits(const uint8_t *src) {
    const uint64_t twice[2] = {src[0] * 0x0101010101010101u, src[1] * 0x0101010101010101u};
    const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (Bytes)((load_bytes((const uint8_t *)twice) & bit) == bit) & 16;
}

/* The codes of a group of 32, or of half of it: `src` is the block, and `half` adds 16 bytes in blocks of 256. */
#define DEFINE_CODES(NAME, VECTOR, LOAD, FIELD, RAISED, NIBBLES, FIFTH)                                                          \
    INLINE VECTOR NAME(int code, const uint8_t *src, int group, int half) {                                                     \
        const uint8_t *at = src + 16 * half;                                                                                    \
        switch (code) {                                                                                                         \
            case CODE_Q8_0: return LOAD(at + 2);                                                                                \
            case CODE_Q2_K: return FIELD(LOAD(at + 16 + group / 4 * 32), group % 4 * 2, 3);                                     \
            case CODE_Q3_K: return FIELD(LOAD(at + 32 + group / 4 * 32), group % 4 * 2, 3) | RAISED(FIELD(LOAD(at), group, 1), 2); \
            case CODE_Q4_K: return FIELD(LOAD(at + 16 + group / 2 * 32), group % 2 * 4, 15);                                    \
            case CODE_Q5_K:                                                                                                     \
                return FIELD(LOAD(at + 48 + group / 2 * 32), group % 2 * 4, 15) | RAISED(FIELD(LOAD(at + 16), group, 1), 4);    \
            case CODE_Q6_K:                                                                                                     \
                return FIELD(LOAD(at + group / 4 * 64 + group % 2 * 32), group % 4 / 2 * 4, 15) |                               \
                       RAISED(FIELD(LOAD(at + 128 + group / 4 * 32), group % 4 * 2, 3), 4);                                     \
            default: {                                                                                                          \
                const VECTOR nibbles = NIBBLES(src + TRAITS(code).nibbles + (code == CODE_IQ4_XS ? 16 * group : 0), half);      \
                return TRAITS(code).fifth ? nibbles | FIFTH(src + TRAITS(code).fifth + 2 * half) : nibbles;                     \
            }                                                                                                                   \
        }                                                                                                                       \
    }
#define HALF_OF_NIBBLES(src, half) field(load_bytes(src), 4 * (half), 15)

DEFINE_CODES(half_codes, Bytes, load_bytes, field, raised_bytes, HALF_OF_NIBBLES, fifth_bits)

#if defined(__AVX2__)
/* The low nibbles of 16 bytes, and after them the high ones. */
INLINE Codes nibble_codes(const uint8_t *src) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)src);
    return (Codes)_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1) & 15;
}

/* 16 where a bit of four bytes is set, else 0. */
INLINE Codes fifth_codes(const uint8_t *src) {
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const Codes bit = (Codes)_mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i bits = _mm256_set1_epi32((int)bits_of(load_f32((const char *)src)));
    return (Codes)(((Codes)_mm256_shuffle_epi8(bits, byte) & bit) == bit) & 16;
}
#define ALL_NIBBLES(src, half) nibble_codes(src)

DEFINE_CODES(codes_of, Codes, codes_at, code_field, raised, ALL_NIBBLES, fifth_codes)
#endif

/* What half a group's codes stand for, before the scale. */
INLINE Bytes half_numbers(int code, const uint8_t *src, int group, int half) {
    const Bytes codes = half_codes(code, src, group, half);
    if (code == CODE_MXFP4_BLOCK) return looked_up(DOUBLED_E2M1, codes);
    if (code == CODE_IQ4_NL || code == CODE_IQ4_XS) return looked_up(NONLINEAR_VALUES, codes);
    return codes - (uint8_t)(code == CODE_Q4_0 ? 8 : TRAITS(code).zero);
}

/* Signed bytes times the block's shared scale. */
INLINE void by_shared(Bytes factors, float shared, float out[16]) {
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)factors));
    _mm512_storeu_ps(out, _mm512_mul_ps(wide, _mm512_set1_ps(shared)));
#elif defined(__AVX2__)
    UNROLL for (int half = 0; half < 2; half++) {
        const __m256i wide = _mm256_cvtepi8_epi32(half ? _mm_srli_si128((__m128i)factors, 8) : (__m128i)factors);
        _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(shared)));
    }
#else
    int8_t numbers[16];
    memcpy(numbers, &factors, sizeof numbers);
    for (int i = 0; i < 16; i++) out[i] = (float)numbers[i] * shared;
#endif
}

/* 6-bit factors of eight groups: for scales, then for minima. The first four lie in the bytes of the first and second word;
 * of the last four the low bits in the third word and the high bits above the first four. */
INLINE Bytes six_bit_factors(const uint8_t *src) {
    const FourWords words = (FourWords)load_bytes(src);
    const FourWords low = {words[0], words[2], words[1], words[2]}, high = {0, words[0], 0, words[1]};
    const FourWords shifts = {0, 0, 0, 4}, low_bits = {0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}, high_bits = {0, 0x30303030, 0, 0x30303030};
    return (Bytes)((low >> shifts & low_bits) | (high >> 2 & high_bits));
}

INLINE void block_numbers(int code, const uint8_t *src, GroupNumbers *out) {
    switch (code) {
        case CODE_Q4_1:
        case CODE_Q5_1: out->scales[0] = half_at(src), out->minima[0] = -half_at(src + 2); break;
        case CODE_Q2_K: {
            by_shared(field(load_bytes(src), 0, 15), half_at(src + 80), out->scales);
            by_shared(field(load_bytes(src), 4, 15), half_at(src + 82), out->minima);
            break;
        }
        case CODE_Q3_K: {
            uint64_t low, words[2];
            uint32_t high;
            memcpy(&low, src + 96, sizeof low), memcpy(&high, src + 104, sizeof high);
            for (int i = 0; i < 2; i++)
                words[i] = (low >> 4 * i & 0x0f0f0f0f0f0f0f0f) | (uint64_t)(high >> 4 * i & 0x03030303) << 4 |
                           (uint64_t)(high >> (4 * i + 2) & 0x03030303) << 36;
            by_shared(load_bytes((const uint8_t *)words) - 32, half_at(src + 108), out->scales);
            break;
        }
        case CODE_Q4_K:
        case CODE_Q5_K: {
            const FourWords factors = (FourWords)six_bit_factors(src + 4);
            by_shared((Bytes)factors, half_at(src), out->scales);
            by_shared((Bytes)(FourWords){factors[2], factors[3], 0, 0}, half_at(src + 2), out->minima);
            break;
        }
        case CODE_Q6_K: by_shared(load_bytes(src + 192), half_at(src + 208), out->scales); break;
        case CODE_IQ4_XS:
            for (int i = 0; i < 8; i++)
                out->scales[i] =
                    half_at(src) * (float)(((src[4 + i / 2] >> (i % 2 * 4) & 15) | (src[2 + i / 4] >> (i % 4 * 2) & 3) << 4) - 32);
            break;
        case CODE_MXFP4_BLOCK: out->scales[0] = half_of_e8m0(src[0]); break;
        default: out->scales[0] = half_at(src);
    }
}

/* What the codes of a table stand for, before the scale. */
INLINE int table_value(int64_t code, int i) {
    if (code == CODE_MXFP4_BLOCK) return DOUBLED_E2M1[i];
    return code == CODE_Q4_0 ? i - 8 : code == CODE_IQ4_NL || code == CODE_IQ4_XS ? NONLINEAR_VALUES[i] : i;
}

/* ---- values ---- */

/* 16 values of codes that are signed bytes. A minimum of zero changes nothing: x - 0 is x. */
INLINE void write_values(Bytes codes, float scale, float minimum, float *out) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
    _mm512_storeu_ps(out, _mm512_fmsub_ps(numbers, _mm512_set1_ps(scale), _mm512_set1_ps(minimum)));
#elif defined(__AVX2__)
    const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
    const __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
    _mm256_storeu_ps(out, _mm256_fmsub_ps(first, _mm256_set1_ps(scale), _mm256_set1_ps(minimum)));
    _mm256_storeu_ps(out + 8, _mm256_fmsub_ps(second, _mm256_set1_ps(scale), _mm256_set1_ps(minimum)));
#else
    int8_t numbers[16];
    memcpy(numbers, &codes, sizeof numbers);
    for (int i = 0; i < 16; i++) out[i] = (float)numbers[i] * scale - minimum;
#endif
}

INLINE void row_of_blocks(int code, const uint8_t *src, int64_t k, float *out) {
    for (; k > 0; k -= TRAITS(code).codes, src += TRAITS(code).bytes) {
        GroupNumbers numbers;
        block_numbers(code, src, &numbers);
        UNROLL for (int group = 0; group < TRAITS(code).codes / 32; group++) {
            UNROLL for (int half = 0; half < 2; half++, out += 16) {
                const int place = TRAITS(code).has_groups_of_16 ? 2 * group + half : group;
                write_values(half_numbers(code, src, group, half), numbers.scales[place], TRAITS(code).has_minimum ? numbers.minima[place] : 0.0f, out);
            }
        }
    }
}

/* The values of a row of whole blocks, in a loop of its own for every format. */
static void block_values(int64_t kind, const uint8_t *src, int64_t k, float *out) {
#define ROW_OF(code) \
    case code: row_of_blocks(code, src, k, out); break;
    switch (kind) {
        FOR_BLOCKS(ROW_OF)
        case CODE_F16_BLOCK:
            for (int64_t i = 0; i < k; i++) out[i] = half_at(src + 2 * i);
            break;
        default: memcpy(out, src, (size_t)(4 * k));
    }
}

/* ---- products ---- */

#if HAS_QUANT_LANES
/* Numbers are read again for every group: kept in registers each would take a shuffle. */
#define IN_MEMORY(numbers) __asm__("" : "+m"(numbers))
/* Values of x serve several rows; compilers would load them again for each. */
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))

#if LANES == 8
/* 32 codes, a byte each, become four vectors: vector 2 h + i has codes 8 h + i, 8 h + i + 2, + 4 and + 6 of the first 16 in
 * its lower lanes and of the last 16 in its upper lanes, as unpacking leaves them. Rows of x are packed in that order. */

/* Of upper halves of fp32 that lie side by side. */
INLINE __m256 even_halves(__m256i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)); }
INLINE __m256 odd_halves(__m256i halves) {
    return _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32((int)0xffff0000u)));
}

/* The bytes of bf16 by 4-bit codes. */
typedef struct {
    __m256i low, high;
} CodeTable;

INLINE Vec group_number(int code, const float *numbers, int group) {
    if (!TRAITS(code).has_groups_of_16) return _mm256_broadcast_ss(numbers + group);
    return _mm256_set_m128(_mm_broadcast_ss(numbers + 2 * group + 1), _mm_broadcast_ss(numbers + 2 * group));
}

INLINE void group_values(int code, const CodeTable *table, const uint8_t *src, int group, const GroupNumbers *numbers, Vec out[4]) {
    const __m256i codes = (__m256i)codes_of(code, src, group, 0);
    if (code == CODE_Q8_0) {
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i zero = _mm256_setzero_si256();
            const __m256i pairs = half ? _mm256_unpackhi_epi8(zero, codes) : _mm256_unpacklo_epi8(zero, codes);
            out[2 * half] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24));
            out[2 * half + 1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 24));
        }
    } else {
        /* 128 + code: a bf16 number of this size has seven bits for an integer */
        const __m256i low = TRAITS(code).has_table ? _mm256_shuffle_epi8(table->low, codes) : codes;
        const __m256i high = TRAITS(code).has_table ? _mm256_shuffle_epi8(table->high, codes) : _mm256_set1_epi8(0x43);
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i halves = half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
            out[2 * half] = even_halves(halves), out[2 * half + 1] = odd_halves(halves);
        }
        if (!TRAITS(code).has_table)
            UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_sub_ps(out[i], _mm256_set1_ps(128.0f + (float)TRAITS(code).zero));
    }
    const Vec scales = group_number(code, numbers->scales, group);
    if (TRAITS(code).has_minimum) {
        const Vec minima = group_number(code, numbers->minima, group);
        UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_fmsub_ps(out[i], scales, minima);
    } else {
        UNROLL for (int i = 0; i < 4; i++) out[i] = _mm256_mul_ps(out[i], scales);
    }
}

static void prepare_table(int64_t code, CodeTable *table) {
    uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        const uint32_t value = bits_of((float)table_value(code, i));
        low[i] = (uint8_t)(value >> 16), high[i] = (uint8_t)(value >> 24);
    }
    table->low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    table->high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
}

/* In the order of the decoded vectors. */
static void pack_blocks(const char *src, int dtype, int64_t count, float *panel, int64_t first_k, int row, int panel_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t element = first_k + i, within = element % 32;
        const int64_t vector = element / 32 * 4 + within % 16 / 8 * 2 + within % 2, lane = within / 16 * 4 + within % 8 / 2;
        panel[(vector / 2 * panel_rows + row) * K_STEP + vector % 2 * LANES + lane] = load_as(dtype, src, i);
    }
}
#else
/* 4-bit codes choose among the sixteen values that they have under their scale and minimum; others are widened. Everything
 * keeps its order, rows of x too. */
typedef Vec CodeTable; /* values of 4-bit codes before the scale */

static void prepare_table(int64_t code, CodeTable *table) {
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = (float)table_value(code, i);
    *table = vec_load_f32(values);
}

/* Where the nibbles of 32 codes begin: two to a byte in 16 bytes, or all high or all low ones of 32 bytes. */
INLINE const uint8_t *nibbles_of(int code, const uint8_t *src, int group) {
    if (code == CODE_Q4_K) return src + 16 + group / 2 * 32;
    return src + TRAITS(code).nibbles + (code == CODE_IQ4_XS ? 16 * group : 0);
}

INLINE Vec scaled(int code, Vec values, const GroupNumbers *numbers, int place) {
    const Vec scale = vec_all(numbers->scales[place]);
    return TRAITS(code).has_minimum ? _mm512_fmsub_ps(values, scale, vec_all(numbers->minima[place])) : _mm512_mul_ps(values, scale);
}

INLINE void group_values(int code, const CodeTable *table, const uint8_t *src, int group, const GroupNumbers *numbers, Vec out[2]) {
    if (TRAITS(code).has_table) {
        const uint8_t *nibbles = nibbles_of(code, src, group);
        const Vec values = scaled(code, *table, numbers, group);
        UNROLL for (int half = 0; half < 2; half++) {
            const uint8_t *bytes = nibbles + (code == CODE_Q4_K ? 16 * half : 0);
            const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
            const int is_high = code == CODE_Q4_K ? group % 2 : half;
            out[half] = _mm512_permutexvar_ps(is_high ? _mm512_srli_epi32(codes, 4) : codes, values);
        }
        return;
    }
    const __m256i codes = (__m256i)(codes_of(code, src, group, 0) - (uint8_t)TRAITS(code).zero);
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i bytes = half ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
        const int place = TRAITS(code).has_groups_of_16 ? 2 * group + half : group;
        out[half] = scaled(code, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), numbers, place);
    }
}

static void pack_blocks(const char *src, int dtype, int64_t count, float *panel, int64_t first_k, int row, int panel_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t element = first_k + i;
        panel[(element / K_STEP * panel_rows + row) * K_STEP + element % K_STEP] = load_as(dtype, src, i);
    }
}
#endif

/* Values are rounded once and sums add up as in a tile of fp32: a row of x has the same bits whether values are multiplied
 * in registers or from memory. */

/* `count` weight rows, one or a tile's, times one row of x; or their values to `out`, one row after the other. */
INLINE void block_rows(int code, int is_dot, int count, const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x,
                       float *out) {
    const int codes = TRAITS(code).codes, bytes = TRAITS(code).bytes;
    const int64_t apart = count * stride, ahead = apart > 0 ? (LANES_AHEAD / apart + 1) * apart : 0; /* rows may lie in one place */
    Vec acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int n = 0; n < TILE_ROWS; n++) acc[0][n] = vec_zero();
    for (int64_t first = 0; first < k; first += codes, weight += bytes) {
        GroupNumbers numbers[TILE_ROWS];
        /* the same block of later rows; fetching past the last row is harmless */
        UNROLL for (int n = 0; n < count; n++)
            UNROLL for (int i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(weight + ahead + n * stride + i, 0, 3);
        UNROLL for (int n = 0; n < count; n++) {
            block_numbers(code, (const uint8_t *)weight + n * stride, &numbers[n]);
            IN_MEMORY(numbers[n]);
        }
        UNROLL for (int group = 0; group < codes / 32; group++) {
            const int64_t at = first + 32 * group;
            Vec of_x[32 / LANES];
            if (is_dot) {
                UNROLL for (int i = 0; i < 32 / LANES; i++) {
                    of_x[i] = vec_load_f32(x + at + LANES * i);
                    IN_REGISTER(of_x[i]);
                }
            }
            UNROLL for (int n = 0; n < count; n++) {
                Vec values[32 / LANES];
                group_values(code, table, (const uint8_t *)weight + n * stride, group, &numbers[n], values);
                UNROLL for (int i = 0; i < 32 / LANES; i++) {
                    if (is_dot)
                        acc[0][n] = vec_fma(acc[0][n], values[i], of_x[i]);
                    else
                        vec_store_f32(out + n * k + at + LANES * i, values[i]);
                }
            }
        }
    }
    if (is_dot) store_sums(count, 1, acc, out, 0);
}

typedef void (*BlockRows)(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out);

#define DEFINE_BLOCK_ROWS(code)                                                                                              \
    static void write_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 0, 1, table, weight, stride, k, x, out);                                                            \
    }                                                                                                                        \
    static void dot_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, 1, table, weight, stride, k, x, out);                                                               \
    }                                                                                                                        \
    static void dots_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, TILE_ROWS, table, weight, stride, k, x, out);                                                       \
    }
#define NAME_BLOCK_ROWS(code) {write_##code, dot_##code, dots_##code},

FOR_BLOCKS(DEFINE_BLOCK_ROWS)

enum { WRITE_ROW, DOT_ROW, DOT_ROWS, NUM_BLOCK_ROWS };
static const BlockRows BLOCK_ROWS[END_OF_CODES - CODE_BLOCKS][NUM_BLOCK_ROWS] = {FOR_BLOCKS(NAME_BLOCK_ROWS)};

static void multiply_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                            int64_t ldo) {
    const BlockRows *rows = BLOCK_ROWS[weight.quantized->codes - CODE_BLOCKS];
    const int64_t at_once = rows_of_values(k, num_rows);
    CodeTable table;
    prepare_table(weight.quantized->codes, &table);
    if (num_rows == 1) {
        int64_t n = 0;
        for (; n + TILE_ROWS <= num_weight_rows; n += TILE_ROWS)
            rows[DOT_ROWS](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        for (; n < num_weight_rows; n++)
            rows[DOT_ROW](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        return;
    }
    float values[at_once * k];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++)
            rows[WRITE_ROW](&table, weight.data + (first + n) * weight.stride, weight.stride, k, NULL, values + n * k);
        multiply_cached(KIND_F32, (Matrix){.data = (const char *)values, .stride = 4 * k}, count, k, packed, num_rows, out + first, ldo);
    }
}
#endif
