/* Numbers of quantised rows, for every instruction set: scales and zero points of groups, and what codes stand for. */
#pragma once

#include "formats/quantized.h"
#include "isa/tiles.h"

/* Groups' numbers are read a whole vector at a time. */
enum { GROUP_PADDING = 16, WIDENED = 16 };

/* One row's scales and zero points, zeros after the last. */
typedef struct {
    const Quantized *format;
    int64_t k, groups;
    float *scales;
    int32_t *zeros;
    const char *stored; /* its scales as stored */
    int64_t widened;    /* the group of rows whose scales are in `scales`; or -1 */
} RowGroups;

/* Widens scales to fp32; a constant count becomes vectors. */
INLINE void widen_scales(int type, const char *restrict src, int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t code = (uint8_t)src[i], is_end = code - 1 >= 254; /* 0 or 255 */
        switch (type) {
            case SCALE_E8M0: out[i] = from_bits(code << 23 | is_end << 22); break; /* of 0 subnormal, of 255 NaN */
            case SCALE_E4M3: out[i] = e4m3_to_f32((uint8_t)code); break;
            case SCALE_BF16: out[i] = load_bf16(src + 2 * i); break;
            default: out[i] = load_f16(src + 2 * i);
        }
    }
}

/* Widens WIDENED scales. */
INLINE void widen_block(int type, const char *src, float *out) {
#if defined(__F16C__)
    if (type == SCALE_F16) {
        UNROLL for (int i = 0; i < WIDENED; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * i))));
        return;
    }
#endif
    widen_scales(type, src, WIDENED, out);
}

/* The last scales are widened again, all at once: an odd rest would go one by one. */
INLINE void widen_all_scales(int type, const char *src, int64_t groups, float *out) {
    const int64_t whole = groups / WIDENED * WIDENED, last = groups - WIDENED;
    for (int64_t first = 0; first < whole; first += WIDENED)
        widen_block(type, src + first * SCALE_BYTES[type], out + first);
    if (last < 0)
        widen_scales(type, src, groups, out);
    else if (whole < groups)
        widen_block(type, src + last * SCALE_BYTES[type], out + last);
}

static void read_scales(const Quantized *format, int64_t row, int64_t groups, float *out) {
    const char *src = format->scales + group_of(row, format->group_rows) * format->scale_stride;
    switch (format->scale_type) {
        case SCALE_E8M0: widen_all_scales(SCALE_E8M0, src, groups, out); break;
        case SCALE_E4M3: widen_all_scales(SCALE_E4M3, src, groups, out); break;
        case SCALE_BF16: widen_all_scales(SCALE_BF16, src, groups, out); break;
        case SCALE_F16: widen_all_scales(SCALE_F16, src, groups, out); break;
        default: memcpy(out, src, (size_t)groups * 4);
    }
    if (format->global == GLOBAL_MULTIPLY)
        for (int64_t i = 0; i < groups; i++) out[i] *= *format->global_scale;
    if (format->global == GLOBAL_DIVIDE)
        for (int64_t i = 0; i < groups; i++) out[i] /= *format->global_scale;
}

/* Without zero points of groups, row_groups has written the one for all. */
static void read_zeros(RowGroups *row, int64_t index) {
    const Quantized *format = row->format;
    if (!format->zeros) return;
    const uint8_t *zeros = (const uint8_t *)format->zeros + group_of(index, format->group_rows) * format->zero_stride;
    for (int64_t i = 0; i < row->groups; i++) row->zeros[i] = zeros[i];
}

static void read_groups(RowGroups *row, int64_t index) {
    read_scales(row->format, index, row->groups, row->scales);
    read_zeros(row, index);
}

/* Memory for the groups of a row and GROUP_PADDING more. Vectors take signed 8-bit codes for unsigned ones. */
static RowGroups row_groups(Matrix matrix, int64_t k, float *scales, int32_t *zeros) {
    const int64_t groups = groups_of_row(matrix.quantized, k);
    memset(scales + groups, 0, GROUP_PADDING * 4);
    const int32_t zero = matrix.quantized->codes == CODE_INT8 ? 128 : (int32_t)matrix.quantized->zero;
    for (int64_t i = 0; i < groups + GROUP_PADDING; i++) zeros[i] = zero;
    return (RowGroups){.format = matrix.quantized, .k = k, .groups = groups, .scales = scales, .zeros = zeros, .widened = -1};
}

/* The groups of one row, in the caller's frame. */
#define ROW_GROUPS(name, matrix, columns)                                              \
    float name##_scales[groups_of_row((matrix).quantized, columns) + GROUP_PADDING];   \
    int32_t name##_zeros[groups_of_row((matrix).quantized, columns) + GROUP_PADDING];  \
    RowGroups name = row_groups(matrix, columns, name##_scales, name##_zeros)

/* ---- codes ---- */

enum { CHUNK = 512 };

/* Codes of 4 bits, one to a byte. */
static void split_nibbles(const uint8_t *src, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count / 2; i++) {
        out[2 * i] = src[i] & 15;
        out[2 * i + 1] = src[i] >> 4;
    }
    if (count % 2) out[count - 1] = src[count / 2] & 15;
}

/* Twice the magnitude of an e2m1 code. Comparisons beat a table: many codes are compared at once. */
static inline uint8_t twice_e2m1(uint8_t code) {
    const uint8_t magnitude = code & 7;
    return (uint8_t)(magnitude < 4 ? magnitude : magnitude < 6 ? 2 * magnitude - 4 : 4 * magnitude - 16);
}

static void nibble_values(int64_t kind, const uint8_t *src, int64_t count, float *out) {
    uint8_t nibbles[CHUNK], twice[CHUNK];
    for (; count > 0; count -= CHUNK, src += CHUNK / 2, out += CHUNK) {
        const int64_t part = count < CHUNK ? count : CHUNK;
        split_nibbles(src, part, nibbles);
        if (kind == CODE_UINT4) {
            for (int64_t i = 0; i < part; i++) out[i] = (float)nibbles[i];
            continue;
        }
        for (int64_t i = 0; i < part; i++) twice[i] = twice_e2m1(nibbles[i]);
        for (int64_t i = 0; i < part; i++)
            out[i] = from_bits(bits_of(0.5f * (float)twice[i]) | (uint32_t)(nibbles[i] & 8) << 28);
    }
}

#if defined(__AVX2__)
/* 32 codes of four bits, two to a byte, the low one first. */
INLINE void wide_nibbles(int64_t kind, const uint8_t *src, float *out) {
    const __m128i low_bytes = _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64);
    const __m128i high_bytes = _mm_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)src), mask = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i codes = half ? _mm_unpackhi_epi8(even, odd) : _mm_unpacklo_epi8(even, odd);
        const __m128i low = _mm_shuffle_epi8(low_bytes, codes), high = _mm_shuffle_epi8(high_bytes, codes);
        UNROLL for (int quarter = 0; quarter < 2; quarter++) {
            __m256 values;
            if (kind == CODE_E2M1) { /* by tables of the bytes of bf16 */
                const __m128i words = quarter ? _mm_unpackhi_epi8(low, high) : _mm_unpacklo_epi8(low, high);
                values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
            } else {
                values = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(quarter ? _mm_srli_si128(codes, 8) : codes));
            }
            _mm256_storeu_ps(out + 16 * half + 8 * quarter, values);
        }
    }
}

/* 16 codes of fp8: the bits of fp16 with a smaller exponent, also for subnormal codes, but not for NaN. */
INLINE void wide_fp8(const uint8_t *src, float *out) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)src)), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(halves, 1), _mm256_set1_epi16(0x7f00));
    const __m256i all = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    UNROLL for (int half = 0; half < 2; half++) {
        const __m128i eight = half ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all);
        _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(_mm256_cvtph_ps(eight), _mm256_set1_ps(256.0f)));
    }
}

/* Decodes as many codes as fill whole vectors and returns their number. The other formats are left to the compiler's own
 * vectors. */
static int64_t wide_code_values(int64_t kind, const uint8_t *src, int64_t count, float *out) {
    int64_t i = 0;
    if (kind == CODE_E2M1)
        for (; i + 32 <= count; i += 32) wide_nibbles(CODE_E2M1, src + i / 2, out + i);
    else if (kind == CODE_UINT4)
        for (; i + 32 <= count; i += 32) wide_nibbles(CODE_UINT4, src + i / 2, out + i);
    else if (kind == CODE_E4M3)
        for (; i + 16 <= count; i += 16) wide_fp8(src + i, out + i);
    return i;
}
#endif

/* Codes as numbers, without zero point and scale; exact. */
static void code_values(int64_t kind, const char *codes, int64_t count, float *out) {
    const uint8_t *src = (const uint8_t *)codes;
#if defined(__AVX2__)
    const int64_t written = wide_code_values(kind, src, count, out);
    src += kind == CODE_E2M1 || kind == CODE_UINT4 ? written / 2 : written;
    out += written, count -= written;
#endif
    switch (kind) {
        case CODE_E2M1:
        case CODE_UINT4: nibble_values(kind, src, count, out); break;
        case CODE_E4M3:
            for (int64_t i = 0; i < count; i++) out[i] = e4m3_to_f32(src[i]);
            break;
        case CODE_UINT8:
            for (int64_t i = 0; i < count; i++) out[i] = (float)src[i];
            break;
        default:
            for (int64_t i = 0; i < count; i++) out[i] = (float)(int8_t)src[i];
    }
}

/* ---- the order in which rows are read ---- */

/* How far ahead of its use a line is fetched, in bytes. */
enum { LANES_AHEAD = 12 << 10 };

/* Most bytes of decoded values at a time: they stay in the second-level cache while all rows of x are multiplied by them. */
#define VALUE_BYTES (128 << 10)

/* Rows decoded at a time. For a single panel a tile's: they stay in the first-level cache. */
static int64_t rows_of_values(int64_t k, int64_t num_rows) {
    const int64_t tiles = num_rows > PANEL_ROWS ? VALUE_BYTES / (TILE_ROWS * 4 * (k + 1)) : 1;
    return TILE_ROWS * max64(1, tiles);
}

/* A group of all columns counts as the largest power of two. */
static inline int group_shift(const Quantized *format) { return format->group_cols ? __builtin_ctzll((uint64_t)format->group_cols) : 62; }

/* Bytes of a row's scales that are worth fetching: none for a single scale. */
static inline int64_t fetched_scale_bytes(const Quantized *format, int64_t k) {
    return format->group_cols ? groups_of_row(format, k) * SCALE_BYTES[format->scale_type] : 0;
}

/* Fetches the scales of `count` rows from `row` on, past the last row those of the next matrix. */
static inline void fetch_scales(const Stream *stream, int64_t row, int64_t count, int64_t bytes) {
    const int is_next = row >= stream->num_rows;
    const Matrix *matrix = is_next ? &stream->next : &stream->weight;
    const Quantized *format = matrix->quantized;
    if (!matrix->data || !format || format->codes != stream->weight.quantized->codes) return;
    const int64_t first = matrix->first_row + row - (is_next ? stream->num_rows : 0), stride = format->scale_stride;
    const int is_dense = stride == bytes && format->group_rows == 1;
    for (int64_t i = 0; i < (is_dense ? 1 : count); i++) {
        const char *scales = format->scales + group_of(first + i, format->group_rows) * stride;
        for (int64_t b = 0; b < (is_dense ? count * bytes : bytes); b += CACHE_LINE) __builtin_prefetch(scales + b, 0, 2);
    }
}
