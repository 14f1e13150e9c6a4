/* Values of blocks that hold their scales, as kernels/quantized/block_reference.py defines them; a part of
 * quantized_template.h.
 *
 * Every product of a code and a scale is exact in fp32 (11 bits of an fp16 number, at most 7 of a second scale and 8 of a
 * code less than its largest), so a value is rounded once, by the subtraction of a minimum, whether or not that is fused.
 */

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));

INLINE Bytes load_bytes(const uint8_t *src) {
    Bytes bytes;
    memcpy(&bytes, src, sizeof bytes);
    return bytes;
}

/* The bits of `mask` of every byte, from place `shift` on. */
INLINE Bytes field(Bytes bytes, int shift, uint8_t mask) { return (Bytes)((Pairs)bytes >> shift) & mask; }

/* Of codes that stay bytes. */
INLINE Bytes raised_bytes(Bytes bytes, int shift) { return (Bytes)((Pairs)bytes << shift); }

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

static const int8_t NONLINEAR_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t DOUBLED_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE Bytes look_up(const int8_t table[16], Bytes codes) {
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

INLINE float half_at(const uint8_t *src) {
#if defined(__F16C__)
    return _cvtsh_ss(load_u16((const char *)src));
#else
    return load_f16((const char *)src);
#endif
}

/* Blocks of 32 codes: 16 bytes of nibbles from `nibbles` on, the low ones first, and at `fifth` one more bit of each. */
INLINE void nibble_block(const uint8_t *nibbles, const uint8_t *fifth, uint8_t zero, float scale, float minimum, float *out) {
    const Bytes bytes = load_bytes(nibbles);
    UNROLL for (int half = 0; half < 2; half++) {
        Bytes codes = field(bytes, 4 * half, 15);
        if (fifth) codes |= fifth_bits(fifth + 2 * half);
        write_values(codes - zero, scale, minimum, out + 16 * half);
    }
}

/* The same by a table. */
INLINE void table_block(const uint8_t *nibbles, const int8_t table[16], float scale, float *out) {
    const Bytes bytes = load_bytes(nibbles);
    UNROLL for (int half = 0; half < 2; half++) write_values(look_up(table, field(bytes, 4 * half, 15)), scale, 0.0f, out + 16 * half);
}

INLINE void q8_0_block(const uint8_t *src, float *out) {
    const float scale = half_at(src);
    write_values(load_bytes(src + 2), scale, 0.0f, out);
    write_values(load_bytes(src + 18), scale, 0.0f, out + 16);
}

/* Half of the scale, as the table's values are doubled: subnormal for the two least exponents. */
INLINE float half_of_e8m0(uint8_t code) { return from_bits(code < 2 ? 1u << (21 + code) : (uint32_t)(code - 1) << 23); }

INLINE void q2_k_block(const uint8_t *src, float *out) {
    const float scale = half_at(src + 80), minimum = half_at(src + 82);
    UNROLL for (int group = 0; group < 16; group++) {
        const Bytes codes = field(load_bytes(src + 16 + group / 8 * 32 + group % 2 * 16), group % 8 / 2 * 2, 3);
        write_values(codes, scale * (float)(src[group] & 15), minimum * (float)(src[group] >> 4), out + 16 * group);
    }
}

INLINE void q3_k_block(const uint8_t *src, float *out) {
    const uint8_t *low = src + 96, *high = src + 104;
    const float scale = half_at(src + 108);
    UNROLL for (int group = 0; group < 16; group++) {
        const Bytes two = field(load_bytes(src + 32 + group / 8 * 32 + group % 2 * 16), group % 8 / 2 * 2, 3);
        const Bytes third = field(load_bytes(src + group % 2 * 16), group / 2, 1);
        const int factor = (low[group % 8] >> (group / 8 * 4) & 15) | (high[group % 4] >> (group / 4 * 2) & 3) << 4;
        write_values((two | raised_bytes(third, 2)) - 4, scale * (float)(factor - 32), 0.0f, out + 16 * group);
    }
}

/* Q4_K, and Q5_K with its fifth bits. */
INLINE void q45_k_block(int has_fifth, const uint8_t *src, float *out) {
    const float scale = half_at(src), minimum = half_at(src + 2);
    const uint8_t *packed = src + 4, *nibbles = has_fifth ? src + 48 : src + 16;
    UNROLL for (int group = 0; group < 8; group++) {
        const uint8_t *top = packed + group % 4;
        const int factor = group < 4 ? top[0] & 63 : (top[8] & 15) | top[0] >> 6 << 4;
        const int least = group < 4 ? top[4] & 63 : top[8] >> 4 | top[4] >> 6 << 4;
        UNROLL for (int half = 0; half < 2; half++) {
            Bytes codes = field(load_bytes(nibbles + group / 2 * 32 + 16 * half), group % 2 * 4, 15);
            if (has_fifth) codes |= raised_bytes(field(load_bytes(src + 16 + 16 * half), group, 1), 4);
            write_values(codes, scale * (float)factor, minimum * (float)least, out + 32 * group + 16 * half);
        }
    }
}

INLINE void q6_k_block(const uint8_t *src, float *out) {
    const float scale = half_at(src + 208);
    UNROLL for (int group = 0; group < 16; group++) {
        const int half = group / 8, quarter = group % 8 / 2, place = group % 2 * 16;
        const Bytes low = field(load_bytes(src + 64 * half + quarter % 2 * 32 + place), quarter / 2 * 4, 15);
        const Bytes high = field(load_bytes(src + 128 + 32 * half + place), 2 * quarter, 3);
        write_values((low | raised_bytes(high, 4)) - 32, scale * (float)(int8_t)src[192 + group], 0.0f, out + 16 * group);
    }
}

INLINE void iq4_xs_block(const uint8_t *src, float *out) {
    const float scale = half_at(src);
    UNROLL for (int group = 0; group < 8; group++) {
        const int low = src[4 + group / 2] >> (group % 2 * 4) & 15, high = src[2 + group / 4] >> (group % 4 * 2) & 3;
        table_block(src + 8 + 16 * group, NONLINEAR_VALUES, scale * (float)((low | high << 4) - 32), out + 32 * group);
    }
}

/* The values of a row of k codes in whole blocks: a loop of its own for every kind. */
static void block_values(int64_t kind, const uint8_t *src, int64_t k, float *out) {
#define ROW_OF(code, ...)                                                          \
    case code:                                                                     \
        for (; k > 0; k -= BLOCK_SIZES[code - CODE_BLOCKS].codes) {                \
            __VA_ARGS__;                                                           \
            src += BLOCK_SIZES[code - CODE_BLOCKS].bytes;                          \
            out += BLOCK_SIZES[code - CODE_BLOCKS].codes;                          \
        }                                                                          \
        break
    switch (kind) {
        ROW_OF(CODE_Q4_0, nibble_block(src + 2, NULL, 8, half_at(src), 0.0f, out));
        ROW_OF(CODE_Q4_1, nibble_block(src + 4, NULL, 0, half_at(src), -half_at(src + 2), out));
        ROW_OF(CODE_Q5_0, nibble_block(src + 6, src + 2, 16, half_at(src), 0.0f, out));
        ROW_OF(CODE_Q5_1, nibble_block(src + 8, src + 4, 0, half_at(src), -half_at(src + 2), out));
        ROW_OF(CODE_Q8_0, q8_0_block(src, out));
        ROW_OF(CODE_Q2_K, q2_k_block(src, out));
        ROW_OF(CODE_Q3_K, q3_k_block(src, out));
        ROW_OF(CODE_Q4_K, q45_k_block(0, src, out));
        ROW_OF(CODE_Q5_K, q45_k_block(1, src, out));
        ROW_OF(CODE_Q6_K, q6_k_block(src, out));
        ROW_OF(CODE_IQ4_NL, table_block(src + 2, NONLINEAR_VALUES, half_at(src), out));
        ROW_OF(CODE_IQ4_XS, iq4_xs_block(src, out));
        ROW_OF(CODE_MXFP4_BLOCK, table_block(src + 1, DOUBLED_E2M1, half_of_e8m0(src[0]), out));
        ROW_OF(CODE_F16_BLOCK, *out = half_at(src));
        ROW_OF(CODE_F32_BLOCK, *out = load_f32((const char *)src));
        default: break;
    }
#undef ROW_OF
}
