/* Steps of products of blocks with rows rounded to int8, for vectors of sixteen; a part of int8_blocks.h.
 *
 * A lane has the sums of four columns; the lower half of a vector those of a group at an even place. Every other two groups
 * have sums of their own.
 */
#include "formats/int8_eight_groups.h"

typedef __m512i CodePair;

INLINE __m512i joined(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
INLINE __m512 joined_ps(__m256 low, __m256 high) { return _mm512_castsi512_ps(joined(_mm256_castps_si256(low), _mm256_castps_si256(high))); }

/* 64 codes of Q6_K: four bits from 64 bytes, two from 32, of which the first half has the lower ones. */
INLINE CodePair q6_k_pair(const char *src, int pair) {
    const __m512i four = _mm512_loadu_si512(src + pair / 2 * 64);
    const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(src + 128 + pair / 2 * 32)));
    const __m512i low = _mm512_and_si512(pair % 2 ? _mm512_srli_epi16(four, 4) : four, _mm512_set1_epi8(15));
    const __m512i shifts = pair % 2 ? _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2) : _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2);
    const __m512i high = pair % 2 ? _mm512_srlv_epi64(two, shifts) : _mm512_sllv_epi64(two, shifts);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
}

INLINE CodePair pair_of(int code, const char *step, int pair, int groups) {
    if (code == CODE_Q6_K) return q6_k_pair(step, pair);
    if (code == CODE_Q4_K) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(step + 16 + 32 * pair));
        return _mm512_and_si512(joined(bytes, _mm256_srli_epi16(bytes, 4)), _mm512_set1_epi8(15));
    }
    const __m256i first = (__m256i)int8_codes_of(code, step, 2 * pair);
    return joined(first, 2 * pair + 1 < groups ? (__m256i)int8_codes_of(code, step, 2 * pair + 1) : first);
}

INLINE CodePair load_pair(const Codes *src) { return _mm512_loadu_si512(src); }
INLINE void store_pair(CodePair pair, Codes *dst) { _mm512_storeu_si512(dst, pair); }

/* Scales of groups and their minima in the first, or scales of halves and their minima. */
typedef struct {
    __m512 numbers[2];
} StepNumbers;

INLINE void numbers_of(int code, const char *step, int groups, StepNumbers *out) {
    if (is_one_group(code)) {
        const __m256 scales = eight_scales(code, step, groups);
        out->numbers[0] = joined_ps(scales, eight_minima(code, step, groups, scales));
        return;
    }
    if (code == CODE_Q4_K || code == CODE_Q5_K) {
        const __m512 factors = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)six_bit_factors((const uint8_t *)step + 4)));
        const __m512 shared = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_loadu_si32(step)));
        const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        out->numbers[0] = _mm512_mul_ps(factors, _mm512_permutexvar_ps(places, shared));
        return;
    }
    GroupNumbers numbers;
    block_numbers(code, (const uint8_t *)step, &numbers);
    if (has_groups_of_16(code)) {
        out->numbers[0] = _mm512_loadu_ps(numbers.scales);
        out->numbers[1] = has_minimum(code) ? _mm512_loadu_ps(numbers.minima) : out->numbers[0];
    } else {
        out->numbers[0] = joined_ps(_mm256_loadu_ps(numbers.scales), _mm256_loadu_ps(numbers.scales));
    }
}

INLINE void load_numbers(int has_halves, const float *src, StepNumbers *out) {
    UNROLL for (int i = 0; i < 1 + has_halves; i++) out->numbers[i] = _mm512_loadu_ps(src + 16 * i);
}

INLINE void store_numbers(int has_halves, const StepNumbers *numbers, float *dst) {
    UNROLL for (int i = 0; i < 1 + has_halves; i++) _mm512_storeu_ps(dst + 16 * i, numbers->numbers[i]);
}

/* Of a row of x: sums over pairs of groups at even and at odd places, and what minima take, of groups in the upper half. */
typedef struct {
    __m512 sums[2], minima;
} Int8Row;

INLINE void clear_rows(int count, Int8Row *rows) {
    UNROLL for (int m = 0; m < count; m++) rows[m] = (Int8Row){{vec_zero(), vec_zero()}, vec_zero()};
}

INLINE float whole_sum(int has_halves, const Int8Row *row, float factor) {
    const __m512 minima = has_halves ? row->minima : _mm512_maskz_mov_ps(0xff00, row->minima);
    return _mm512_reduce_add_ps(_mm512_fnmadd_ps(minima, _mm512_set1_ps(factor), _mm512_add_ps(row->sums[0], row->sums[1])));
}

/* Scales of groups, or of their halves, times those of x. */
typedef struct {
    __m512 scales;
} StepScales;

INLINE void step_scales(int has_halves, const StepNumbers *numbers, const Int8Step *x, Int8Row *row, StepScales *out) {
    if (!has_halves) {
        const __m512 both = _mm512_mul_ps(numbers->numbers[0], _mm512_loadu_ps(x->scales)); /* and the sums behind them */
        row->minima = _mm512_add_ps(row->minima, both);
        out->scales = both;
        return;
    }
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    row->minima = _mm512_fmadd_ps(numbers->numbers[1], _mm512_loadu_ps(x->half_sums), row->minima);
    out->scales = _mm512_mul_ps(numbers->numbers[0], _mm512_permutexvar_ps(twice, _mm512_loadu_ps(x->scales)));
}

/* Exact products of 64 codes, four to a lane. */
INLINE __m512i code_products(int is_signed, __m512i w, __m512i x) {
#if HAS_BYTE_DOT
    (void)is_signed;
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
#else
    if (is_signed) x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x), w = _mm512_abs_epi8(w);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#endif
}

INLINE void add_pair(int has_halves, int is_signed, CodePair codes, const Int8Step *x, const StepScales *scales, int place, Int8Row *row) {
    const __m512i groups = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i places = _mm512_add_epi32(has_halves ? halves : groups, _mm512_set1_epi32((has_halves ? 4 : 2) * place));
    const __m512 sums = _mm512_cvtepi32_ps(code_products(is_signed, codes, _mm512_loadu_si512(x->codes + 64 * place)));
    row->sums[place % 2] = _mm512_fmadd_ps(sums, _mm512_permutexvar_ps(places, scales->scales), row->sums[place % 2]);
}
