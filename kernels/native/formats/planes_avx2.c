/* The lossless code with AVX2: the one or two escapes of a block are moved one by one. */
#include <immintrin.h>

#include "formats/planes.h"

/* 0xff in every byte whose bit of `mask` is set. */
static inline __m256i spread_bits(uint32_t mask) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)mask), byte_of);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}

const uint8_t *planes_decode_avx2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                       char *out) {
    const char *signs = row + blocks * PLANES_INDEX_BYTES, *ahead = row + PLANES_AHEAD;
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)book));
    const __m256i top = _mm256_set1_epi8((char)0x80), rest = _mm256_set1_epi8(0x7f);
    for (int64_t block = 0; block < blocks; block++, row += PLANES_INDEX_BYTES, signs += PLANES_BLOCK, out += 2 * PLANES_BLOCK) {
        uint64_t words[3];
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
        ahead += PLANES_INDEX_BYTES + PLANES_BLOCK;
        uint8_t exponents[PLANES_BLOCK];
        memcpy(words, row, sizeof words);
        for (int half = 0; half < 2; half++) {
            const int shift = 32 * half;
            __m256i index = _mm256_and_si256(spread_bits((uint32_t)(words[0] >> shift)), _mm256_set1_epi8(1));
            index = _mm256_or_si256(index, _mm256_and_si256(spread_bits((uint32_t)(words[1] >> shift)), _mm256_set1_epi8(2)));
            index = _mm256_or_si256(index, _mm256_and_si256(spread_bits((uint32_t)(words[2] >> shift)), _mm256_set1_epi8(4)));
            _mm256_storeu_si256((__m256i *)(exponents + shift), _mm256_shuffle_epi8(table, index));
        }
        for (uint64_t escaped = words[0] & words[1] & words[2]; escaped; escaped &= escaped - 1) {
            if (escapes >= end) return NULL;
            exponents[__builtin_ctzll(escaped)] = *escapes++;
        }
        for (int half = 0; half < 2; half++) {
            const __m256i exponent = _mm256_loadu_si256((const __m256i *)(exponents + 32 * half));
            const __m256i sign = _mm256_loadu_si256((const __m256i *)(signs + 32 * half));
            const __m256i high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(exponent, 1), rest), _mm256_and_si256(sign, top));
            const __m256i low = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(exponent, 7), top), _mm256_and_si256(sign, rest));
            _mm256_storeu_si256((__m256i *)(out + 32 * half), _mm256_unpacklo_epi8(low, high));
            _mm256_storeu_si256((__m256i *)(out + PLANES_BLOCK + 32 * half), _mm256_unpackhi_epi8(low, high));
        }
    }
    return escapes;
}

int planes_encode_avx2(const uint16_t *values, const uint8_t *book, char *indices, char *signs, uint8_t *escapes) {
    const __m256i top = _mm256_set1_epi8((char)0x80), byte = _mm256_set1_epi16(0xff), one = _mm256_set1_epi8(1);
    uint8_t exponents[PLANES_BLOCK];
    uint64_t words[3] = {0, 0, 0}, escaped = 0;
    for (int half = 0; half < 2; half++) {
        const __m256i first = _mm256_loadu_si256((const __m256i *)(values + 16 * half));
        const __m256i second = _mm256_loadu_si256((const __m256i *)(values + 32 + 16 * half));
        const __m256i low = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
        const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
        const __m256i eighth = _mm256_and_si256(_mm256_srli_epi16(low, 7), one);
        const __m256i exponent = _mm256_or_si256(_mm256_add_epi8(high, high), eighth);
        const __m256i sign = _mm256_or_si256(_mm256_and_si256(high, top), _mm256_andnot_si256(top, low));
        _mm256_storeu_si256((__m256i *)(signs + 32 * half), sign);
        _mm256_storeu_si256((__m256i *)(exponents + 32 * half), exponent);
        uint32_t left = ~0u, bits[3] = {0, 0, 0};
        for (int i = 0; i < PLANES_BOOK; i++) {
            const __m256i same = _mm256_cmpeq_epi8(exponent, _mm256_set1_epi8((char)book[i]));
            const uint32_t found = (uint32_t)_mm256_movemask_epi8(same) & left;
            left &= ~found;
            for (int bit = 0; bit < 3; bit++) bits[bit] |= i >> bit & 1 ? found : 0;
        }
        escaped |= (uint64_t)left << 32 * half;
        for (int bit = 0; bit < 3; bit++) words[bit] |= (uint64_t)(bits[bit] | left) << 32 * half;
    }
    memcpy(indices, words, sizeof words);
    int count = 0;
    for (; escaped; escaped &= escaped - 1) escapes[count++] = exponents[__builtin_ctzll(escaped)];
    return count;
}
