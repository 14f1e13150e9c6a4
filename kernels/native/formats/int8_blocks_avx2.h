/* Steps of products of blocks with rows rounded to int8, for vectors of eight; a part of int8_blocks.h.
 *
 * A lane has the sums of four columns. Groups at even and at odd places have sums of their own.
 */
#include "formats/int8_eight_groups.h"

/* Codes of two groups. */
typedef struct {
    Codes codes[2];
} CodePair;

INLINE CodePair pair_of(int code, const char *step, int pair, int groups) {
    const Codes first = int8_codes_of(code, step, 2 * pair);
    return (CodePair){{first, 2 * pair + 1 < groups ? int8_codes_of(code, step, 2 * pair + 1) : first}};
}

INLINE CodePair load_pair(const Codes *src) { return (CodePair){{src[0], src[1]}}; }
INLINE void store_pair(CodePair pair, Codes *dst) { dst[0] = pair.codes[0], dst[1] = pair.codes[1]; }

/* Of groups only the first of each two is used. */
typedef struct {
    __m256 scales[2], minima[2];
} StepNumbers;

INLINE void numbers_of(int code, const char *step, int groups, StepNumbers *out) {
    if (is_one_group(code)) {
        out->scales[0] = out->scales[1] = eight_scales(code, step, groups);
        out->minima[0] = out->minima[1] = eight_minima(code, step, groups, out->scales[0]);
        return;
    }
    GroupNumbers numbers;
    block_numbers(code, (const uint8_t *)step, &numbers);
    UNROLL for (int i = 0; i < 1 + has_groups_of_16(code); i++) {
        out->scales[i] = _mm256_loadu_ps(numbers.scales + 8 * i);
        out->minima[i] = has_minimum(code) ? _mm256_loadu_ps(numbers.minima + 8 * i) : out->scales[i];
    }
}

INLINE void load_numbers(int has_halves, const float *src, StepNumbers *out) {
    UNROLL for (int i = 0; i < 1 + has_halves; i++) {
        out->scales[i] = _mm256_loadu_ps(src + 8 * i);
        out->minima[i] = _mm256_loadu_ps(src + 8 * (1 + has_halves + i));
    }
}

INLINE void store_numbers(int has_halves, const StepNumbers *numbers, float *dst) {
    UNROLL for (int i = 0; i < 1 + has_halves; i++) {
        _mm256_storeu_ps(dst + 8 * i, numbers->scales[i]);
        _mm256_storeu_ps(dst + 8 * (1 + has_halves + i), numbers->minima[i]);
    }
}

/* Of a row of x: sums over groups at even and at odd places, and what minima take. */
typedef struct {
    __m256 sums[2], minima;
} Int8Row;

INLINE void clear_rows(int count, Int8Row *rows) {
    UNROLL for (int m = 0; m < count; m++) rows[m] = (Int8Row){{_mm256_setzero_ps(), _mm256_setzero_ps()}, _mm256_setzero_ps()};
}

INLINE float whole_sum(int has_halves, const Int8Row *row, float factor) {
    (void)has_halves;
    const __m256 all = _mm256_fnmadd_ps(row->minima, _mm256_set1_ps(factor), _mm256_add_ps(row->sums[0], row->sums[1]));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* Scales of groups, or of their halves, times those of x. */
typedef struct {
    float scales[16];
} StepScales;

INLINE void step_scales(int has_halves, const StepNumbers *numbers, const Int8Step *x, Int8Row *row, StepScales *out) {
    const __m256 of_x = _mm256_loadu_ps(x->scales);
    const __m256 low = _mm256_unpacklo_ps(of_x, of_x), high = _mm256_unpackhi_ps(of_x, of_x);
    const __m256 twice[2] = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    UNROLL for (int i = 0; i < 1 + has_halves; i++) {
        _mm256_storeu_ps(out->scales + 8 * i, _mm256_mul_ps(numbers->scales[i], has_halves ? twice[i] : of_x));
        row->minima = _mm256_fmadd_ps(numbers->minima[i], _mm256_loadu_ps((has_halves ? x->half_sums : x->sums) + 8 * i), row->minima);
    }
}

INLINE __m256 scale_of_group(int has_halves, const StepScales *scales, int group) {
    if (!has_halves) return _mm256_broadcast_ss(scales->scales + group);
    const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(scales->scales + 2 * group)));
    return _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

INLINE void add_pair(int has_halves, int is_signed, CodePair pair, const Int8Step *x, const StepScales *scales, int place, Int8Row *row) {
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i w = (__m256i)pair.codes[i], of_x = _mm256_loadu_si256((const __m256i *)x->codes + 2 * place + i);
        const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(of_x, w)) : _mm256_maddubs_epi16(w, of_x);
        const __m256 sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        row->sums[i] = _mm256_fmadd_ps(sums, scale_of_group(has_halves, scales, 2 * place + i), row->sums[i]);
    }
}
