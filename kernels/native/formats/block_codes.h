/* Codes of blocks that hold their scales, 32 at a time, and the numbers of their groups; a part of quantized_template.h.
 *
 * A value is code * scale - minimum once what `zero_of` says was subtracted from codes that have no table. Scales and minima
 * are exact in fp32.
 */
typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));
typedef uint32_t FourWords __attribute__((vector_size(16)));

/* Of the groups of a block: 32 codes, or 16. */
typedef struct {
    float scales[16], minima[16];
} GroupNumbers;

INLINE int has_groups_of_16(int code) { return code == CODE_Q2_K || code == CODE_Q3_K || code == CODE_Q6_K; }

INLINE int has_minimum(int code) {
    return code == CODE_Q4_1 || code == CODE_Q5_1 || code == CODE_Q2_K || code == CODE_Q4_K || code == CODE_Q5_K;
}

INLINE Codes codes_at(const uint8_t *src) {
    Codes codes;
    memcpy(&codes, src, sizeof codes);
    return codes;
}

INLINE Codes code_field(Codes bytes, int shift, uint8_t mask) { return (Codes)((CodePairs)bytes >> shift) & mask; }
/* Of codes that stay bytes. */
INLINE Codes raised(Codes bytes, int shift) { return (Codes)((CodePairs)bytes << shift); }

/* The low nibbles of 16 bytes, and behind them the high ones. */
INLINE Codes nibble_codes(const uint8_t *src) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)src);
    return (Codes)_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1) & 15;
#else
    const Bytes halves[2] = {field(load_bytes(src), 0, 15), field(load_bytes(src), 4, 15)};
    return codes_at((const uint8_t *)halves);
#endif
}

/* 16 where a bit of four bytes is set, else 0. */
INLINE Codes fifth_codes(const uint8_t *src) {
#if defined(__AVX2__)
    int32_t bits;
    memcpy(&bits, src, sizeof bits);
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const Codes bit = (Codes)_mm256_set1_epi64x((long long)0x8040201008040201);
    return (Codes)(((Codes)_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte) & bit) == bit) & 16;
#else
    const Bytes halves[2] = {fifth_bits(src), fifth_bits(src + 2)};
    return codes_at((const uint8_t *)halves);
#endif
}

/* Group by group of 32. */
INLINE Codes block_codes(int code, const uint8_t *src, int group) {
    switch (code) {
        case CODE_Q4_0:
        case CODE_IQ4_NL: return nibble_codes(src + 2);
        case CODE_Q4_1: return nibble_codes(src + 4);
        case CODE_Q5_0: return nibble_codes(src + 6) | fifth_codes(src + 2);
        case CODE_Q5_1: return nibble_codes(src + 8) | fifth_codes(src + 4);
        case CODE_Q8_0: return codes_at(src + 2);
        case CODE_Q2_K: return code_field(codes_at(src + 16 + group / 4 * 32), group % 4 * 2, 3);
        case CODE_Q3_K:
            return code_field(codes_at(src + 32 + group / 4 * 32), group % 4 * 2, 3) | raised(code_field(codes_at(src), group, 1), 2);
        case CODE_Q4_K: return code_field(codes_at(src + 16 + group / 2 * 32), group % 2 * 4, 15);
        case CODE_Q5_K:
            return code_field(codes_at(src + 48 + group / 2 * 32), group % 2 * 4, 15) | raised(code_field(codes_at(src + 16), group, 1), 4);
        case CODE_Q6_K:
            return code_field(codes_at(src + group / 4 * 64 + group % 2 * 32), group % 4 / 2 * 4, 15) |
                   raised(code_field(codes_at(src + 128 + group / 4 * 32), group % 4 * 2, 3), 4);
        case CODE_IQ4_XS: return nibble_codes(src + 8 + 16 * group);
        default: return nibble_codes(src + 1);
    }
}

/* Signed bytes by what all of a block share. */
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
    for (int i = 0; i < 16; i++) out[i] = (float)(int8_t)factors[i] * shared;
#endif
}

/* Factors of six bits, those of eight groups for scales and then for minima. Those of the first four lie in the bytes of the
 * first word and of the second; of the last four the low bits in the third word and the high ones above those of the first. */
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
            int8_t factors[16];
            for (int i = 0; i < 16; i++)
                factors[i] = (int8_t)(((src[96 + i % 8] >> (i / 8 * 4) & 15) | (src[104 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
            by_shared(load_bytes((const uint8_t *)factors), half_at(src + 108), out->scales);
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

/* What is subtracted from codes that have no table. */
INLINE float zero_of(int code) {
    return code == CODE_Q5_0 ? 16.0f : code == CODE_Q6_K ? 32.0f : code == CODE_Q3_K ? 4.0f : 0.0f;
}

/* Whether codes of four bits stand for numbers of a table. */
INLINE int has_table(int code) {
    return code == CODE_Q4_0 || code == CODE_Q4_1 || code == CODE_Q4_K || code == CODE_IQ4_NL || code == CODE_IQ4_XS ||
           code == CODE_MXFP4_BLOCK;
}

/* What the codes of a table stand for, before the scale. */
INLINE int table_value(int64_t code, int i) {
    if (code == CODE_Q4_0) return i - 8;
    if (code == CODE_MXFP4_BLOCK) return DOUBLED_E2M1[i];
    return code == CODE_IQ4_NL || code == CODE_IQ4_XS ? NONLINEAR_VALUES[i] : i;
}

#define FOR_BLOCKS(macro, separator)                                                                                           \
    macro(CODE_Q4_0) separator() macro(CODE_Q4_1) separator() macro(CODE_Q5_0) separator() macro(CODE_Q5_1) separator()       \
        macro(CODE_Q8_0) separator() macro(CODE_Q2_K) separator() macro(CODE_Q3_K) separator() macro(CODE_Q4_K) separator()   \
            macro(CODE_Q5_K) separator() macro(CODE_Q6_K) separator() macro(CODE_IQ4_NL) separator() macro(CODE_IQ4_XS) separator() \
                macro(CODE_MXFP4_BLOCK)
