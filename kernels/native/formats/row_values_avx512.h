/* Decodes rows to fp32, bf16 or fp16 in registers, for vectors of sixteen.
 *
 * The bits are those of row_values, rounded to fp32 and then to the type, except for NaN. 32 codes are decoded at a time.
 * 4-bit codes under one scale have at most sixteen values: these are rounded once, and the codes choose among them. */
#pragma once

#include "formats/quantized_avx512.h"

enum { STEP_CODES = 32, SPAN_CODES = 128 };

/* Bytes read at one place; as many are fetched ahead. Fetching past the last row is harmless. */
INLINE void fetch_ahead(const char *place, int64_t ahead, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(place + ahead + i, 0, 2);
}

/* ---- rounding ---- */

/* bf16 in the lower halves, of any numbers, as f32_to_bf16. */
INLINE __m512i bf16_words(Vec values) {
    const __m512i bits = _mm512_castps_si512(values), lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lowest);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000)), 16);
}

/* 32 values to a 16-bit type. The instruction that rounds to bf16 would turn subnormal numbers into zeros. */
INLINE __m512i narrowed(int dtype, int is_normal, Vec low, Vec high) {
    if (dtype == DTYPE_F16) {
        const __m256i first = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT), second = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
        return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    }
#if HAS_BF16_DOT
    if (is_normal) return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#endif
    (void)is_normal;
    const __m512i fours = _mm512_packus_epi32(bf16_words(low), bf16_words(high));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), fours);
}

INLINE void write_values_as(int dtype, int is_normal, Vec low, Vec high, char *out) {
    if (dtype == DTYPE_F32) {
        _mm512_storeu_ps(out, low);
        _mm512_storeu_ps(out + 64, high);
    } else {
        _mm512_storeu_si512(out, narrowed(dtype, is_normal, low, high));
    }
}

/* ---- codes whose scales lie outside ---- */

/* The values of 4-bit codes under two scales, sixteen for each. */
typedef struct {
    Vec wide[2];
    __m512i words; /* both, in a type of 16 bits */
} Choices;

INLINE Choices choices_of(int dtype, int is_normal, const RowGroups *row, Vec numbers, int64_t first, int64_t second) {
    const int64_t groups[2] = {first, second};
    Choices choices;
    UNROLL for (int i = 0; i < 2; i++) {
        Vec values = numbers;
        if (row->format->zeros) values = _mm512_sub_ps(values, _mm512_cvtepi32_ps(_mm512_set1_epi32(row->zeros[groups[i]])));
        choices.wide[i] = _mm512_mul_ps(values, vec_all(row->scales[groups[i]]));
    }
    if (dtype != DTYPE_F32) choices.words = narrowed(dtype, is_normal, choices.wide[0], choices.wide[1]);
    return choices;
}

/* 32 codes, two to a byte, the low one first; `under` is 16 for those under the second scale, else 0. */
INLINE void choose(int dtype, const Choices *choices, __m512i under, const char *codes, char *out) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    /* byte | byte << 12: a code in the lowest bits of each half */
    const __m512i both = _mm512_madd_epi16(bytes, _mm512_set1_epi32(1 << 12 | 1));
    const __m512i index = _mm512_ternarylogic_epi32(both, _mm512_set1_epi16(15), under, 0xea); /* both & 15 | under */
    if (dtype != DTYPE_F32) {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, choices->words));
        return;
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512i wide = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(index, 1) : _mm512_castsi512_si256(index));
        _mm512_storeu_ps(out + 64 * half, _mm512_permutex2var_ps(choices->wide[0], wide, choices->wide[1]));
    }
}

/* The columns are whole steps. */
INLINE void write_nibbles(int dtype, int is_normal, const RowGroups *row, int64_t first, int64_t end, const char *codes, int64_t ahead,
                          char *out) {
    const int shift = group_shift(row->format), has_halves = shift < 5; /* groups are halves of a step */
    const int64_t span = shift < 7 ? 2 * STEP_CODES : SPAN_CODES;
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), sixteens = _mm512_set1_epi16(16);
    const __m512i integers = _mm512_sub_epi32(iota, _mm512_set1_epi32(row->format->zeros ? 0 : (int)row->format->zero));
    const Vec numbers = row->format->codes == CODE_E2M1 ? vec_load_f32(E2M1_VALUES) : _mm512_cvtepi32_ps(integers);
    for (int64_t at = first; at < end; at += span, codes += span / 2, out += span * dtype_bytes(dtype)) {
        const int64_t count = end - at < span ? end - at : span;
        fetch_ahead(codes, ahead, count / 2);
        if (has_halves) {
            UNROLL for (int64_t i = 0; i < 2 * STEP_CODES; i += STEP_CODES) {
                if (i >= count) break;
                const Choices choices = choices_of(dtype, is_normal, row, numbers, (at + i) >> shift, ((at + i) >> shift) + 1);
                choose(dtype, &choices, _mm512_maskz_mov_epi16(0xffff0000, sixteens), codes + i / 2, out + i * dtype_bytes(dtype));
            }
            continue;
        }
        const Choices choices = choices_of(dtype, is_normal, row, numbers, at >> shift, (at + STEP_CODES) >> shift);
        for (int64_t i = 0; i < count; i += 2 * STEP_CODES) {
            choose(dtype, &choices, _mm512_setzero_si512(), codes + i / 2, out + i * dtype_bytes(dtype));
            const int64_t next = i + STEP_CODES;
            if (next < count) choose(dtype, &choices, sixteens, codes + next / 2, out + next * dtype_bytes(dtype));
        }
    }
}

/* 32 codes of a byte; normal fp8 codes come out 2^-8 times as large. */
INLINE void byte_numbers(int kind, int is_ordinary, const char *codes, Vec out[2]) {
    if (kind == CODE_E4M3) {
        /* the bits of fp16 with a smaller exponent, also for subnormal codes, but not for NaN */
        const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes)), 7);
        __m512i halves = _mm512_and_si512(wide, _mm512_set1_epi16((short)0xbf80));
        if (!is_ordinary) {
            const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_slli_epi16(halves, 1), _mm512_set1_epi16(0x7f00));
            halves = _mm512_xor_si512(halves, _mm512_maskz_set1_epi16(is_nan, 0x3f80 ^ 0x7e00));
        }
        out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
        if (!is_ordinary)
            UNROLL for (int half = 0; half < 2; half++) out[half] = _mm512_mul_ps(out[half], vec_all(256.0f));
        return;
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + 16 * half));
        out[half] = _mm512_cvtepi32_ps(kind == CODE_INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
    }
}

INLINE void write_bytes(int dtype, int kind, int is_ordinary, const RowGroups *row, int64_t first, int64_t end, const char *codes,
                        int64_t ahead, char *out) {
    const int shift = group_shift(row->format);
    const int64_t span = shift < 5 ? STEP_CODES : shift < 7 ? 1 << shift : SPAN_CODES;
    for (int64_t at = first; at < end; at += span, codes += span, out += span * dtype_bytes(dtype)) {
        const int64_t count = end - at < span ? end - at : span;
        Vec scales[2], zeros[2];
        fetch_ahead(codes, ahead, count);
        UNROLL for (int half = 0; half < 2; half++) {
            const int64_t group = (at + half * STEP_CODES / 2) >> shift;
            scales[half] = vec_all(row->scales[group]);
            if (kind == CODE_E4M3 && is_ordinary) scales[half] = _mm512_mul_ps(scales[half], vec_all(256.0f));
            zeros[half] = _mm512_cvtepi32_ps(_mm512_set1_epi32(row->zeros[group]));
        }
        for (int64_t i = 0; i < count; i += STEP_CODES) {
            Vec values[2];
            byte_numbers(kind, is_ordinary, codes + i, values);
            UNROLL for (int half = 0; half < 2; half++) {
                if (kind == CODE_UINT8) values[half] = _mm512_sub_ps(values[half], zeros[half]);
                values[half] = _mm512_mul_ps(values[half], scales[half]);
            }
            write_values_as(dtype, is_ordinary, values[0], values[1], out + i * dtype_bytes(dtype));
        }
    }
}

/* Whether no product of a code and its scale is subnormal, where fp8 codes are 2^-8 times as large (2^-17 at least) and
 * scales 2^8 times; and no code is NaN. */
static int is_ordinary_row(const RowGroups *row, const char *codes) {
    const uint32_t least = 10u << 23, end = 246u << 23; /* 2^-117, 2^119 */
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    uint32_t others = 0;
    for (int64_t g = 0; g < row->groups; g++) others |= (bits_of(row->scales[g]) & 0x7fffffffu) - least >= end - least;
    if (row->format->codes != CODE_E4M3) return !others;
    uint64_t found = 0;
    for (int64_t i = 0; i < row->k; i += 64)
        found |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(load_codes(codes + i, row->k - i), sign), _mm512_set1_epi8(-1));
    return !others && !found;
}

INLINE void write_codes(int dtype, int kind, int is_ordinary, const RowGroups *row, int64_t first, int64_t end, const char *codes,
                        int64_t ahead, char *out) {
    if (kind == CODE_UINT4)
        write_nibbles(dtype, is_ordinary, row, first, end, codes, ahead, out);
    else
        write_bytes(dtype, kind, is_ordinary, row, first, end, codes, ahead, out);
}

typedef void (*WriteCodes)(const RowGroups *row, int64_t first, int64_t end, const char *codes, int64_t ahead, char *out);

#define DEFINE_WRITE_CODES(dtype, kind)                                                                                 \
    static void any_##kind##_as_##dtype(const RowGroups *row, int64_t first, int64_t end, const char *codes, int64_t ahead, \
                                        char *out) {                                                                    \
        write_codes(dtype, kind, 0, row, first, end, codes, ahead, out);                                                \
    }                                                                                                                   \
    static void ordinary_##kind##_as_##dtype(const RowGroups *row, int64_t first, int64_t end, const char *codes,       \
                                             int64_t ahead, char *out) {                                                \
        write_codes(dtype, kind, 1, row, first, end, codes, ahead, out);                                                \
    }
#define FOR_CODES(macro, dtype) \
    macro(dtype, CODE_E4M3) macro(dtype, CODE_UINT4) macro(dtype, CODE_UINT8) macro(dtype, CODE_INT8)
#define NAME_WRITE_CODES(dtype, kind) [kind] = {any_##kind##_as_##dtype, ordinary_##kind##_as_##dtype},
#define NAME_WRITERS(dtype) [dtype] = {FOR_CODES(NAME_WRITE_CODES, dtype)},

FOR_CODES(DEFINE_WRITE_CODES, DTYPE_F32)
FOR_CODES(DEFINE_WRITE_CODES, DTYPE_BF16)
FOR_CODES(DEFINE_WRITE_CODES, DTYPE_F16)

static const WriteCodes WRITE_CODES[][CODE_PLANES][2] = {NAME_WRITERS(DTYPE_F32) NAME_WRITERS(DTYPE_BF16) NAME_WRITERS(DTYPE_F16)};

/* In the last step only the row's own codes are read. */
static void write_row_of_codes(const RowGroups *row, const char *codes, int64_t ahead, int dtype, char *out) {
    const int kind = row->format->codes == CODE_E2M1 ? CODE_UINT4 : (int)row->format->codes;
    const WriteCodes write = WRITE_CODES[dtype][kind][is_ordinary_row(row, codes)];
    const int64_t whole = row->k / STEP_CODES * STEP_CODES, rest = row->k - whole, skipped = code_row_bytes(row->format, whole);
    write(row, 0, whole, codes, ahead, out);
    if (!rest) return;
    char padded[STEP_CODES] = {0}, values[STEP_CODES * 4];
    memcpy(padded, codes + skipped, (size_t)(code_row_bytes(row->format, row->k) - skipped));
    write(row, whole, whole + STEP_CODES, padded, 0, values);
    memcpy(out + whole * dtype_bytes(dtype), values, (size_t)(rest * dtype_bytes(dtype)));
}

/* ---- blocks that hold their scales ---- */

/* 32 codes of four bits, in the lowest bits of words. */
INLINE __m512i nibble_words(int code, const uint8_t *src, int group) {
    const uint8_t *nibbles = nibbles_of(code, src, group);
    if (code == CODE_Q4_K) {
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)nibbles));
        return group % 2 ? _mm512_srli_epi16(bytes, 4) : bytes;
    }
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)nibbles)));
    return _mm512_srlv_epi16(bytes, _mm512_maskz_set1_epi16(0xffff0000, 4));
}

/* fp16 times integers is a multiple of 2^-24: never subnormal in fp32. Of MXFP4 the two least scales are. Where codes
 * choose, two groups have their values side by side, a single group twice. */
INLINE void write_blocks(int dtype, int code, const CodeTable *table, const char *weight, int64_t ahead, int64_t k, char *out) {
    const int codes = TRAITS(code).codes, bytes = TRAITS(code).bytes;
    const int in_pairs = codes > STEP_CODES;
    for (; k > 0; k -= codes, weight += bytes) {
        const uint8_t *src = (const uint8_t *)weight;
        const int is_normal = code != CODE_MXFP4_BLOCK || src[0] > 1;
        __m512i choices = _mm512_setzero_si512();
        GroupNumbers numbers;
        fetch_ahead(weight, ahead, bytes);
        block_numbers(code, src, &numbers);
        IN_MEMORY(numbers);
        UNROLL for (int group = 0; group < codes / STEP_CODES; group++, out += 2 * STEP_CODES) {
            if (TRAITS(code).has_table) {
                if (group % 2 == 0) {
                    const Vec first = scaled(code, *table, &numbers, group), second = scaled(code, *table, &numbers, group + in_pairs);
                    choices = narrowed(dtype, is_normal, first, second);
                }
                __m512i index = nibble_words(code, src, group);
                if (in_pairs) /* index & 15 | 16 under the second scale */
                    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), _mm512_set1_epi16(group % 2 * 16), 0xea);
                _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, choices));
            } else {
                Vec values[2];
                group_values(code, table, src, group, &numbers, values);
                write_values_as(dtype, is_normal, values[0], values[1], out);
            }
        }
    }
}

typedef void (*WriteBlocks)(const CodeTable *table, const char *weight, int64_t ahead, int64_t k, char *out);

#define DEFINE_WRITE_BLOCKS(code)                                                                             \
    static void bf16_of_##code(const CodeTable *table, const char *weight, int64_t ahead, int64_t k, char *out) {          \
        write_blocks(DTYPE_BF16, code, table, weight, ahead, k, out);                                        \
    }                                                                                                         \
    static void f16_of_##code(const CodeTable *table, const char *weight, int64_t ahead, int64_t k, char *out) {           \
        write_blocks(DTYPE_F16, code, table, weight, ahead, k, out);                                         \
    }                                                                                                         \
    static void f32_of_##code(const CodeTable *table, const char *weight, int64_t ahead, int64_t k, char *out) {           \
        block_rows(code, 0, 1, table, weight, ahead, k, NULL, (float *)out);                                  \
    }
#define NAME_WRITE_BLOCKS(code) {[DTYPE_F32] = f32_of_##code, [DTYPE_BF16] = bf16_of_##code, [DTYPE_F16] = f16_of_##code},

FOR_BLOCKS(DEFINE_WRITE_BLOCKS)

static const WriteBlocks WRITE_BLOCKS[END_OF_CODES - CODE_BLOCKS][DTYPE_F16 + 1] = {FOR_BLOCKS(NAME_WRITE_BLOCKS)};

/* ---- rows of any format ---- */

/* Groups are of whole steps, or of halves. */
static int is_written_in_steps(const Quantized *format) {
    const int64_t group = format->group_cols;
    if (is_in_blocks(format)) return !is_plain(format);
    return !group || (group >= STEP_CODES / 2 && !(group & (group - 1)));
}

static void write_rows(RowGroups *row, Matrix weight, int64_t num_rows, char *out, int64_t out_stride, int dtype) {
    const Quantized *format = weight.quantized;
    const char *codes = weight.data;
    const int64_t ahead = (LANES_AHEAD / (code_row_bytes(format, row->k) + 1) + 1) * weight.stride;
    if (is_in_blocks(format)) {
        const WriteBlocks write = WRITE_BLOCKS[format->codes - CODE_BLOCKS][dtype];
        CodeTable table;
        prepare_table(format->codes, &table);
        for (int64_t n = 0; n < num_rows; n++, codes += weight.stride, out += out_stride) write(&table, codes, ahead, row->k, out);
        return;
    }
    for (int64_t n = 0; n < num_rows; n++, codes += weight.stride, out += out_stride) {
        read_groups(row, weight.first_row + n);
        write_row_of_codes(row, codes, ahead, dtype, out);
    }
}