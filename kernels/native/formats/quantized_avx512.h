/* Products of quantised matrices for vectors of sixteen; codes are decoded in registers.
 *
 * KIND_QUANT_F32 decodes to fp32, KIND_QUANT_DOT4 and _DOT8 to pairs of bf16; both are exact. Every 32-bit lane of the
 * decoded vectors belongs to one group: its sum starts at zero and is multiplied by the group's scale, so no weight is
 * rounded.
 *
 * F32 and DOT4: lane l of a block of 128 codes has elements 8 l to 8 l + 7; groups are multiples of 8. DOT8: the two vectors
 * of 64 codes have elements 16 q to 16 q + 15 in lanes 4 q to 4 q + 3, where interleaving puts them; groups are multiples of
 * 16. */
#pragma once

#include "formats/blocks.h"

/* How codes are decoded: 4 bits by a table; 4 bits with zero points of groups; fp8; 8-bit integers with zero points of
 * groups; 4 bits with zero points too large for the table. */
enum { DECODE_TABLE4, DECODE_ZEROS4, DECODE_E4M3, DECODE_BYTES, DECODE_ANY4, NUM_DECODERS };
enum { LARGEST_TABLE_ZERO = 16 };
enum { WIDE, PAIRS, NUM_MODES }; /* products in fp32, or of pairs of bf16 */
enum { WEIGHT_ROWS = 4 }; /* multiplied together by one row of x */

/* ---- the scale of each lane ----
 *
 * Scales are read where they lie, together with their codes: a pass over each row less. Rare ones (E8M0 of 0 and 255) and
 * slow ones (with a global scale) are widened to fp32 first. */
enum { NUM_LANES = 16, SPAN_BYTES = 16, BYTES_BEHIND = 64 };

/* How a row's scales are read: widened before; as they lie, E8M0 or bf16; as they lie, fp16. */
enum { SCALES_WIDENED, SCALES_UPPER, SCALES_HALVES, NUM_SCALE_READERS };

typedef struct {
    int shift;      /* binary logarithm of a group's columns */
    int reader;     /* of stored scales */
    int64_t bytes;  /* of a stored scale */
    __m512i expand; /* group of each lane, counted from the first of the block, or of the 64 codes of a DOT8 */
    __m512i pick;   /* picks each lane's scale from those of the block: into the upper bytes of fp32, or as fp16 */
    __m512i down;   /* shift to the right after that */
} LaneGroups;

static int reader_of(const Quantized *format, int64_t span) {
    if (format->global != GLOBAL_NONE || span > SPAN_BYTES) return SCALES_WIDENED;
    if (format->scale_type == SCALE_F16) return SCALES_HALVES;
    return format->scale_type == SCALE_E8M0 || format->scale_type == SCALE_BF16 ? SCALES_UPPER : SCALES_WIDENED;
}

/* For blocks of `block_codes` codes; `first_code` is the first code of each lane. */
static LaneGroups lane_groups(const Quantized *format, int64_t block_codes, const int32_t first_code[NUM_LANES]) {
    const int shift = group_shift(format), bytes = SCALE_BYTES[format->scale_type];
    const int64_t span = (shift < 62 && block_codes >> shift ? block_codes >> shift : 1) * bytes;
    LaneGroups groups = {.shift = shift, .reader = reader_of(format, span), .bytes = bytes,
                         .down = _mm512_set1_epi32(format->scale_type == SCALE_E8M0)};
    int32_t expand[NUM_LANES];
    uint8_t pick[4 * NUM_LANES];
    memset(pick, 0x80, sizeof pick); /* zeros */
    for (int lane = 0; lane < NUM_LANES; lane++) {
        expand[lane] = (int32_t)((int64_t)first_code[lane] >> shift);
        uint8_t *place = groups.reader == SCALES_HALVES ? pick + 2 * lane : pick + 4 * lane + 4 - bytes;
        for (int i = 0; i < bytes; i++) place[i] = (uint8_t)(expand[lane] * bytes + i);
    }
    groups.expand = _mm512_loadu_si512(expand);
    groups.pick = _mm512_loadu_si512(pick);
    return groups;
}

/* Scales of the codes from `element` on. In the last block of a row, what lies after its scales is left out: times a sum of
 * 0 it could be NaN. */
INLINE __m512 scales_at(int reader, const LaneGroups *groups, const RowGroups *row, int64_t element, int is_last) {
    const int64_t first = element >> groups->shift;
    if (reader == SCALES_WIDENED) return _mm512_permutexvar_ps(groups->expand, _mm512_loadu_ps(row->scales + first));
    const char *place = row->stored + first * groups->bytes;
    const int64_t left = (row->groups - first) * groups->bytes;
    const __m128i stored = is_last ? _mm_maskz_loadu_epi8((__mmask16)((1u << left) - 1), place)
                                   : _mm_loadu_si128((const __m128i *)place);
    if (reader == SCALES_HALVES) {
        const __m256i both = _mm256_broadcastsi128_si256(stored);
        return _mm512_cvtph_ps(_mm256_shuffle_epi8(both, _mm512_castsi512_si256(groups->pick)));
    }
    const __m512i upper = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(stored), groups->pick);
    return _mm512_castsi512_ps(_mm512_srlv_epi32(upper, groups->down));
}

INLINE __m512i zeros_at(const LaneGroups *groups, const RowGroups *row, int64_t element) {
    return _mm512_permutexvar_epi32(groups->expand, _mm512_loadu_si512(row->zeros + (element >> groups->shift)));
}

/* Whether some E8M0 is 0 or 255, which are not exponents of normal numbers. Also looks at what follows, up to a whole
 * vector. */
static int has_ends(const char *scales, int64_t count) {
    for (int64_t i = 0; i < count; i += BYTES_BEHIND) {
        const __m512i less_one = _mm512_sub_epi8(_mm512_loadu_si512(scales + i), _mm512_set1_epi8(1));
        if (_mm512_cmpge_epu8_mask(less_one, _mm512_set1_epi8((char)254))) return 1;
    }
    return 0;
}

/* Whether these rows' scales cannot be read as they lie: some E8M0 is 0 or 255, or too few bytes follow the last. */
static int must_be_widened(const RowGroups *rows, int64_t count, int64_t behind) {
    const int64_t apart = rows[count - 1].stored - rows->stored, groups = rows->groups;
    if (behind < BYTES_BEHIND) return 1;
    if (rows->format->scale_type != SCALE_E8M0) return 0;
    if (apart <= 2 * count * groups) return has_ends(rows->stored, apart + groups); /* also those between the rows */
    for (int64_t i = 0; i < count; i++)
        if (has_ends(rows[i].stored, groups)) return 1;
    return 0;
}

/* Reads the groups of some rows and returns how to read their scales. Stored scales are read as whole vectors, so the scales
 * of other rows must follow. */
static int read_lane_groups(int reader, RowGroups *rows, int64_t count, int64_t index) {
    const Quantized *format = rows->format;
    const int64_t stride = format->scale_stride;
    int64_t group = 0;
    for (int64_t i = 0; i < count; i++) {
        group = group_of(index + i, format->group_rows);
        rows[i].stored = format->scales + group * stride;
        if (reader == SCALES_WIDENED && rows[i].widened != group) {
            read_scales(format, index + i, rows[i].groups, rows[i].scales);
            rows[i].widened = group;
        }
        read_zeros(&rows[i], index + i);
    }
    if (reader == SCALES_WIDENED) return reader;
    const int64_t behind = (format->scale_rows - 1 - group) * stride;
    return must_be_widened(rows, count, behind) ? read_lane_groups(SCALES_WIDENED, rows, count, index) : reader;
}

typedef struct {
    LaneGroups groups;
    __m512i table, flip;     /* bf16 values of codes; what makes codes unsigned */
    __m512i low[2], high[2]; /* bytes of bf16 by the magnitudes of fp8 codes */
    __m512 wide_table;       /* fp32 values of codes */
    __m512i upper_bits;      /* first bytes of fp32 by the upper four bits of normal fp8 codes */
} Lanes;

/* ---- decoding ---- */

/* The first `bytes` bytes of half a vector. */
INLINE __m256i load_some(const char *codes, int64_t bytes) {
    return bytes > 0 ? _mm256_maskz_loadu_epi8(~0u >> (bytes < 32 ? 32 - bytes : 0), (const __m256i *)codes) : _mm256_setzero_si256();
}

/* A vector of codes, of which only `bytes` may be read: the mapped memory may end there. A masked load still waits for the
 * cache line it leaves out, so the last codes are loaded by halves. The compiler must not load a whole vector twice: that is
 * a fifth slower from memory where rows begin within a line (measured on Zen 5, these products alone). */
INLINE __m512i load_codes(const char *codes, int64_t bytes) {
    if (bytes < 64) return _mm512_inserti64x4(_mm512_zextsi256_si512(load_some(codes, bytes)), load_some(codes + 32, bytes - 32), 1);
    __m512i loaded = _mm512_loadu_si512(codes);
    __asm__("" : "+v"(loaded));
    return loaded;
}

/* Four of the eight bytes of each lane: the first, or the last. */
INLINE __m512i bytes_of_lanes(const char *codes, int64_t bytes, int half, __m512i flip) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i index = half ? _mm512_add_epi32(even, _mm512_set1_epi32(1)) : even;
    const __m512i low = load_codes(codes, bytes), high = load_codes(codes + 64, bytes - 64);
    return _mm512_xor_si512(_mm512_permutex2var_epi32(low, index, high), flip);
}

/* fp8 in the highest byte of each lane, to fp32. */
INLINE __m512 wide_e4m3(__m512i code) {
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi32(code, 4), _mm512_set1_epi32(0x07f00000));
    const __m512i normal = _mm512_add_epi32(magnitude, _mm512_set1_epi32(120 << 23));
    const __m512 above = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(121 << 23)));
    const __mmask16 is_subnormal = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(8 << 20));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x07f00000));
    __m512 value = _mm512_mask_sub_ps(_mm512_castsi512_ps(normal), is_subnormal, above, _mm512_set1_ps(0.015625f));
    value = _mm512_mask_mov_ps(value, is_nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi32((int)0x80000000u));
    return _mm512_or_ps(value, _mm512_castsi512_ps(sign));
}

/* The four fp8 codes of each lane, to four vectors. Normal codes: the upper half of fp32 is a table of the sign and the
 * upper exponent bits, then the code's other bits. */
INLINE void decode_wide_e4m3(const Lanes *lanes, __m512i four, __m512 out[4]) {
    const __m512i above_normal = _mm512_sub_epi8(_mm512_add_epi8(four, four), _mm512_set1_epi8(0x10));
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(above_normal, _mm512_set1_epi8((char)0xec)) != 0, 0)) {
        UNROLL for (int j = 0; j < 4; j++) out[j] = wide_e4m3(_mm512_slli_epi32(four, 24 - 8 * j));
        return;
    }
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i codes = _mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(order)), upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i high = _mm512_shuffle_epi8(lanes->upper_bits, _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15)));
    const __m512i low = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8((char)0xf0));
    const __m512i halves[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    UNROLL for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(halves[i], 16));
        out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(halves[i], upper));
    }
}

/* Vector j has element 8 l + j of a block in lane l. */
INLINE void decode_wide(int decoder, const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512 out[8]) {
    if (decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4) {
        const __m512i words = load_codes(codes, bytes);
        const __m512i zeros = decoder == DECODE_ZEROS4 ? zeros_at(&lanes->groups, row, block * QUANT_BLOCK) : _mm512_setzero_si512();
        UNROLL for (int j = 0; j < 8; j++) {
            const __m512i code = _mm512_srli_epi32(words, 4 * j);
            if (decoder == DECODE_TABLE4)
                out[j] = _mm512_permutexvar_ps(code, lanes->wide_table);
            else
                out[j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(code, _mm512_set1_epi32(15)), zeros));
        }
        return;
    }
    const __m512i zeros = decoder == DECODE_BYTES ? zeros_at(&lanes->groups, row, block * QUANT_BLOCK) : _mm512_setzero_si512();
    const __m512i flip = decoder == DECODE_BYTES ? lanes->flip : _mm512_setzero_si512();
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512i four = bytes_of_lanes(codes, bytes, half, flip);
        if (decoder == DECODE_E4M3) {
            decode_wide_e4m3(lanes, four, out + 4 * half);
            continue;
        }
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512i code = _mm512_and_si512(_mm512_srli_epi32(four, 8 * j), _mm512_set1_epi32(255));
            out[4 * half + j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, zeros));
        }
    }
}

#if HAS_BF16_DOT
/* To bf16; pack_quantized says which element lies where. */

/* fp8 by tables of both bytes of bf16. */
INLINE void decode_e4m3(const Lanes *lanes, __m512i codes, __m512i out[2]) {
    const __m512i low = _mm512_permutex2var_epi8(lanes->low[0], codes, lanes->low[1]);
    const __m512i magnitudes = _mm512_permutex2var_epi8(lanes->high[0], codes, lanes->high[1]);
    /* magnitudes | (codes & sign) */
    const __m512i high = _mm512_ternarylogic_epi32(magnitudes, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* Unsigned bytes in words, less zero points, to bf16: exact for integers of 8 bits. */
INLINE __m512i narrow_words(__m512i words, __m512i zeros) {
    const __m512i low = _mm512_sub_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), zeros);
    const __m512i high = _mm512_sub_epi32(_mm512_srli_epi32(words, 16), zeros);
    const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    /* high & mask | low */
    return _mm512_ternarylogic_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(high)), _mm512_set1_epi32((int)0xffff0000u), low_bits, 0xea);
}

/* 64 codes of 8 bits, to two vectors of pairs. */
INLINE void decode_bytes(int decoder, const Lanes *lanes, const RowGroups *row, __m512i codes, int64_t element, __m512i out[2]) {
    if (decoder == DECODE_E4M3) {
        decode_e4m3(lanes, codes, out);
        return;
    }
    const __m512i zeros = zeros_at(&lanes->groups, row, element), bytes = _mm512_xor_si512(codes, lanes->flip);
    out[0] = narrow_words(_mm512_unpacklo_epi8(bytes, _mm512_setzero_si512()), zeros);
    out[1] = narrow_words(_mm512_unpackhi_epi8(bytes, _mm512_setzero_si512()), zeros);
}

INLINE void decode_any4(const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    float values[QUANT_BLOCK];
    char padded[QUANT_BLOCK / 2];
    int32_t zeros[NUM_LANES];
    uint16_t narrow[QUANT_BLOCK];
    _mm512_storeu_si512(padded, load_codes(codes, bytes));
    code_values(CODE_UINT4, padded, QUANT_BLOCK, values);
    _mm512_storeu_si512(zeros, zeros_at(&lanes->groups, row, block * QUANT_BLOCK));
    for (int i = 0; i < QUANT_BLOCK; i++) {
        const int plane = i / 32, lane = i % 32 / 2, half = i % 2;
        narrow[i] = f32_to_bf16(values[8 * lane + plane + 4 * half] - (float)zeros[lane]);
    }
    for (int plane = 0; plane < 4; plane++) out[plane] = _mm512_loadu_si512(narrow + 32 * plane);
}

/* A block of 4-bit codes, to four vectors of pairs. */
INLINE void decode_nibbles(int decoder, const Lanes *lanes, const RowGroups *row, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    if (decoder == DECODE_ANY4) {
        decode_any4(lanes, row, codes, bytes, block, out);
        return;
    }
    const __m512i words = load_codes(codes, bytes);
    /* Code minus zero point, from -16 on, as an index: the table takes the low five bits of a word. */
    __m512i first = _mm512_setzero_si512();
    if (decoder == DECODE_ZEROS4) {
        first = _mm512_sub_epi32(_mm512_set1_epi32(LARGEST_TABLE_ZERO), zeros_at(&lanes->groups, row, block * QUANT_BLOCK));
        first = _mm512_or_si512(first, _mm512_slli_epi32(first, 16));
    }
    UNROLL for (int plane = 0; plane < 4; plane++) {
        __m512i index = _mm512_srli_epi16(words, 4 * plane);
        if (decoder == DECODE_ZEROS4) index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), first);
        out[plane] = _mm512_permutexvar_epi16(index, lanes->table);
    }
}
#endif

/* ---- one weight row by one panel ---- */

INLINE int is_half_byte(int decoder) { return decoder != DECODE_E4M3 && decoder != DECODE_BYTES; }

INLINE void lanes_block(int mode, int decoder, int scales, int panel_rows, const Lanes *lanes, const RowGroups *row, const char *codes,
                        int64_t bytes, const char *x, int64_t block, Vec *acc) {
    const int code_bytes = is_half_byte(decoder) ? QUANT_BLOCK / 2 : QUANT_BLOCK;
#if HAS_BF16_DOT
    if (mode == PAIRS) {
        const int is_byte = decoder == DECODE_E4M3 || decoder == DECODE_BYTES, parts = is_byte ? 2 : 1, planes = 4 / parts;
        UNROLL for (int part = 0; part < parts; part++) {
            const int64_t element = block * QUANT_BLOCK + part * 64;
            if (part && bytes <= 64) break; /* no more groups */
            __m512i decoded[4];
            if (is_byte)
                decode_bytes(decoder, lanes, row, load_codes(codes + part * 64, bytes - part * 64), element, decoded);
            else
                decode_nibbles(decoder, lanes, row, codes, bytes, block, decoded);
            const Vec factors = scales_at(scales, &lanes->groups, row, element, bytes < code_bytes);
            UNROLL for (int m = 0; m < panel_rows; m++) {
                const char *pairs = x + (m * QUANT_BLOCK + part * 64) * 2;
                Vec sum = vec_zero();
                UNROLL for (int i = 0; i < planes; i++) sum = dot_bf16(sum, (BfVec)decoded[i], vec_load_bf16_pairs(pairs + i * 64));
                acc[m] = vec_fma(acc[m], sum, factors);
            }
        }
        return;
    }
#endif
    const Vec factors = scales_at(scales, &lanes->groups, row, block * QUANT_BLOCK, bytes < code_bytes);
    Vec planes[8];
    decode_wide(decoder, lanes, row, codes, bytes, block, planes);
    UNROLL for (int m = 0; m < panel_rows; m++) {
        Vec sum = vec_zero();
        UNROLL for (int i = 0; i < 8; i++)
            sum = vec_fma(sum, planes[i], vec_load_f32((const float *)x + m * QUANT_BLOCK + i * NUM_LANES));
        acc[m] = vec_fma(acc[m], sum, factors);
    }
    (void)mode;
}

INLINE void lanes_sums(int mode, int decoder, int scales, int panel_rows, const Lanes *lanes, const RowGroups *row, const char *codes,
                       const char *ahead, const char *x, Vec *acc) {
    const int code_bytes = is_half_byte(decoder) ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    const int64_t x_bytes = (int64_t)panel_rows * QUANT_BLOCK * (mode == WIDE ? 4 : 2), blocks = row->k / QUANT_BLOCK;
    const int64_t rest = row->k % QUANT_BLOCK, rest_bytes = is_half_byte(decoder) ? (rest + 1) / 2 : rest;
    UNROLL for (int m = 0; m < panel_rows; m++) acc[m] = vec_zero();
    for (int64_t block = 0; block < blocks; block++, codes += code_bytes, ahead += code_bytes, x += x_bytes) {
        UNROLL for (int i = 0; i < code_bytes; i += CACHE_LINE) __builtin_prefetch(ahead + i, 0, 3);
        lanes_block(mode, decoder, scales, panel_rows, lanes, row, codes, code_bytes, x, block, acc);
    }
    __builtin_prefetch(ahead, 0, 3);
    __builtin_prefetch(ahead + rest_bytes - 1, 0, 3); /* a row that begins within a line ends in one more */
    if (rest) lanes_block(mode, decoder, scales, panel_rows, lanes, row, codes, rest_bytes, x, blocks, acc);
}

INLINE void lanes_row(int mode, int decoder, int panel_rows, const Lanes *lanes, const RowGroups *row, const char *codes,
                      const char *ahead, const char *x, float *out, int64_t ldo) {
    Vec acc[PANEL_ROWS];
    lanes_sums(mode, decoder, SCALES_WIDENED, panel_rows, lanes, row, codes, ahead, x, acc);
    UNROLL for (int first = 0; first < panel_rows; first += 4) {
        Vec four[4];
        float sums[4];
        UNROLL for (int i = 0; i < 4; i++) four[i] = first + i < panel_rows ? acc[first + i] : vec_zero();
        vec_four_sums(four[0], four[1], four[2], four[3], sums);
        UNROLL for (int i = 0; i < 4; i++)
            if (first + i < panel_rows) out[(first + i) * ldo] = sums[i];
    }
}

/* WEIGHT_ROWS rows by one row of x, with the bits of `lanes_row`. One row after the other, the order that memory serves
 * fastest; the last sums are shared (measured on Zen 5: 4-bit codes in 768 and 2,048 columns a tenth faster, 8-bit codes the
 * same). */
INLINE void lanes_rows(int mode, int decoder, int scales, const Lanes *lanes, const RowGroups *rows, Matrix weight,
                       const char *ahead, const char *x, float *out) {
    Vec acc[WEIGHT_ROWS];
    UNROLL for (int n = 0; n < WEIGHT_ROWS; n++) {
        const int64_t offset = n * weight.stride;
        lanes_sums(mode, decoder, scales, 1, lanes, &rows[n], weight.data + offset, ahead + offset, x, &acc[n]);
    }
    vec_four_sums(acc[0], acc[1], acc[2], acc[3], out);
}

typedef void (*LanesRow)(const Lanes *lanes, const RowGroups *row, const char *codes, const char *ahead, const char *x,
                         float *out, int64_t ldo);
typedef void (*LanesRows)(const Lanes *lanes, const RowGroups *rows, Matrix weight, const char *ahead, const char *x, float *out);

#define DEFINE_LANES_ROW(mode, decoder, panel)                                                                         \
    static void lanes_##mode##_##decoder##_##panel(const Lanes *lanes, const RowGroups *row, const char *codes,        \
                                                   const char *ahead, const char *x, float *out, int64_t ldo) {        \
        lanes_row(mode, decoder, panel, lanes, row, codes, ahead, x, out, ldo);                                        \
    }
#define DEFINE_FOUR(mode, decoder, scales)                                                                             \
    static void four_##mode##_##decoder##_##scales(const Lanes *lanes, const RowGroups *rows, Matrix weight,           \
                                                   const char *ahead, const char *x, float *out) {                     \
        lanes_rows(mode, decoder, scales, lanes, rows, weight, ahead, x, out);                                         \
    }
#define FOR_PANELS(macro, mode, decoder)                                                                               \
    macro(mode, decoder, 1) macro(mode, decoder, 2) macro(mode, decoder, 3) macro(mode, decoder, 4) macro(mode, decoder, 5) \
    macro(mode, decoder, 6)
#define FOR_SCALES(macro, mode, decoder) \
    macro(mode, decoder, SCALES_WIDENED) macro(mode, decoder, SCALES_UPPER) macro(mode, decoder, SCALES_HALVES)
#define NAME_LANES_ROW(mode, decoder, panel) lanes_##mode##_##decoder##_##panel,
#define NAME_FOUR(mode, decoder, scales) four_##mode##_##decoder##_##scales,
#define DEFINE_DECODER(mode, decoder) FOR_PANELS(DEFINE_LANES_ROW, mode, decoder) FOR_SCALES(DEFINE_FOUR, mode, decoder)
#define NAME_ROWS(mode, decoder) {FOR_PANELS(NAME_LANES_ROW, mode, decoder)},
#define NAME_FOURS(mode, decoder) {FOR_SCALES(NAME_FOUR, mode, decoder)},
#define FOR_DECODERS(macro, mode) \
    macro(mode, DECODE_TABLE4) macro(mode, DECODE_ZEROS4) macro(mode, DECODE_E4M3) macro(mode, DECODE_BYTES)
#if HAS_BF16_DOT
#define FOR_MODES(macro, begin, end) begin FOR_DECODERS(macro, 0) end begin FOR_DECODERS(macro, 1) macro(1, DECODE_ANY4) end
#else
#define FOR_MODES(macro, begin, end) begin FOR_DECODERS(macro, 0) end
#endif
#define NOTHING
#define BEGIN {
#define END },

FOR_MODES(DEFINE_DECODER, NOTHING, NOTHING)
static const LanesRow LANES_ROWS[NUM_MODES][NUM_DECODERS][PANEL_ROWS] = {FOR_MODES(NAME_ROWS, BEGIN, END)};
static const LanesRows LANES_OF_FOUR[NUM_MODES][NUM_DECODERS][NUM_SCALE_READERS] = {FOR_MODES(NAME_FOURS, BEGIN, END)};

/* ---- whole matrices ---- */

static int quantized_kind(const Quantized *format, int x_dtype) {
    const int64_t group = format->group_cols;
    const int is_half = format->codes == CODE_E2M1 || format->codes == CODE_UINT4;
    if (is_in_blocks(format)) return KIND_QUANT_BLOCKS;
    if (group && (group < 8 || group & (group - 1))) return KIND_F32;
    if (!HAS_BF16_DOT || x_dtype != DTYPE_BF16 || (group == 8 && !is_half)) return KIND_QUANT_F32;
    return is_half ? KIND_QUANT_DOT4 : KIND_QUANT_DOT8;
}

static int mode_of(int kind) { return kind == KIND_QUANT_F32 ? WIDE : PAIRS; }

static int decoder_of(const Quantized *format) {
    switch (format->codes) {
        case CODE_E2M1: return DECODE_TABLE4;
        case CODE_E4M3: return DECODE_E4M3;
        case CODE_UINT4: return format->zeros ? DECODE_ZEROS4 : DECODE_TABLE4;
        default: return DECODE_BYTES;
    }
}

static Lanes lanes_of(int kind, const Quantized *format) {
    const int decoder = decoder_of(format);
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int is_dot8 = kind == KIND_QUANT_DOT8;
    int32_t first_code[NUM_LANES];
    for (int lane = 0; lane < NUM_LANES; lane++) first_code[lane] = is_dot8 ? lane / 4 * 16 : 8 * lane;
    Lanes lanes = {.groups = lane_groups(format, is_dot8 ? 64 : QUANT_BLOCK, first_code),
                   .flip = _mm512_set1_epi8(format->codes == CODE_INT8 ? (char)0x80 : 0)};
    __m512 values[2]; /* of 4-bit codes, or of the 32 differences of codes and zero points */
    __m256i narrow[2];
    for (int half = 0; half < 2; half++) {
        const int first = decoder == DECODE_ZEROS4 ? 16 * half - LARGEST_TABLE_ZERO : -(int)format->zero;
        values[half] = format->codes == CODE_E2M1 ? _mm512_loadu_ps(E2M1_VALUES)
                                                  : _mm512_cvtepi32_ps(_mm512_add_epi32(iota, _mm512_set1_epi32(first)));
        narrow[half] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values[half]), 16));
    }
    lanes.wide_table = values[0];
    lanes.table = _mm512_inserti64x4(_mm512_castsi256_si512(narrow[0]), narrow[1], 1);
    uint8_t upper_bits[16];
    for (int i = 0; i < 16; i++) upper_bits[i] = (uint8_t)((i & 8) << 4 | (0x3c + (i & 7)));
    lanes.upper_bits = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)upper_bits));
    uint8_t low[128], high[128]; /* fp8: normal codes, then subnormal ones and NaN */
    for (int i = 0; i < 128; i++) {
        low[i] = (uint8_t)(i << 4);
        high[i] = (uint8_t)(0x3c + (i >> 4));
    }
    memcpy(low, "\0\0\x80\xc0\0\x20\x40\x60", 8);
    memcpy(high, "\0\x3b\x3b\x3b\x3c\x3c\x3c\x3c", 8);
    low[127] = 0xc0;
    high[127] = 0x7f;
    for (int half = 0; half < 2; half++) {
        lanes.low[half] = _mm512_loadu_si512(low + 64 * half);
        lanes.high[half] = _mm512_loadu_si512(high + 64 * half);
    }
    return lanes;
}

/* The decoder for the groups of some rows. */
static int decoder_of_rows(const RowGroups *rows, int64_t count, int decoder, int mode) {
    if (decoder != DECODE_ZEROS4 || mode != PAIRS) return decoder;
    int is_large = 0;
    for (int64_t n = 0; n < count; n++)
        for (int64_t i = 0; i < rows[n].groups; i++) is_large |= rows[n].zeros[i] > LARGEST_TABLE_ZERO;
    return is_large ? DECODE_ANY4 : decoder;
}

static void multiply_lanes(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo, Matrix next) {
    const int mode = mode_of(kind), decoder = decoder_of(weight.quantized);
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t at_once = num_rows == 1 ? WEIGHT_ROWS : 1;
    const int64_t rows_ahead = LANES_AHEAD / (code_row_bytes(weight.quantized, k) + 1) + 1;
    const int64_t scale_bytes = fetched_scale_bytes(weight.quantized, k);
    const int64_t room = groups_of_row(weight.quantized, k) + GROUP_PADDING;
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    const Lanes lanes = lanes_of(kind, weight.quantized);
    float widened[at_once * room];
    int32_t zeros[at_once * room];
    RowGroups rows[WEIGHT_ROWS];
    for (int64_t i = 0; i < at_once; i++) rows[i] = row_groups(weight, k, widened + i * room, zeros + i * room);
    for (int64_t n = 0, count; n < num_weight_rows; n += count) {
        count = n + at_once <= num_weight_rows ? at_once : 1;
        const int64_t index = weight.first_row + n;
        const int scales = read_lane_groups(count > 1 ? lanes.groups.reader : SCALES_WIDENED, rows, count, index);
        const int own_decoder = decoder_of_rows(rows, count, decoder, mode);
        const Matrix here = {.data = weight.data + n * weight.stride, .stride = weight.stride};
        const char *ahead = stream_row(&stream, n + rows_ahead);
        if (!ahead) ahead = here.data;
        fetch_scales(&stream, n + rows_ahead, count, scale_bytes);
        if (count > 1) {
            LANES_OF_FOUR[mode][own_decoder][scales](&lanes, rows, here, ahead, packed, out + n);
            continue;
        }
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), last = panel_start(p + 1, panels, num_rows);
            LANES_ROWS[mode][own_decoder][last - first - 1](&lanes, rows, here.data, p ? here.data : ahead,
                                                             packed + first * row_bytes, out + first * ldo + n, ldo);
        }
    }
}
