/* Products of quantised matrices whose codes are decoded in registers; a part of quantized_template.h.
 *
 * KIND_QUANT_F32 takes codes as fp32, KIND_QUANT_DOT4 and _DOT8 as pairs of bf16, which is exact. Every
 * 32-bit lane of the decoded vectors belongs to one group. The lane's sum is taken from zero and multiplied by the group's
 * scale; no weight is rounded.
 *
 * F32 and DOT4: a block of 128 codes fills the lanes of a vector, eight to a lane: lane l belongs to elements 8 l to
 * 8 l + 7, for groups of a multiple of 8. DOT8: of 64 codes the two vectors of pairs have elements 16 q to 16 q + 15 in
 * lanes 4 q to 4 q + 3, where bytes that are interleaved lie, for groups of a multiple of 16.
 */

/* How codes are decoded: 4 bits by a table; 4 bits and a zero point for each group; fp8; 8-bit integers and a zero point
 * for each group; 4 bits and a zero point beyond the table. */
enum { DECODE_TABLE4, DECODE_ZEROS4, DECODE_E4M3, DECODE_BYTES, DECODE_ANY4, NUM_DECODERS };
enum { LARGEST_TABLE_ZERO = 16 };
enum { WIDE, PAIRS, NUM_MODES }; /* of products: as fp32, of pairs of bf16 */
enum { WEIGHT_ROWS = 4 }; /* that one row of x is multiplied with at a time */

#include "formats/scales_avx512.h"

typedef struct {
    LaneGroups groups;
    __m512i table, flip;     /* bf16 values of codes; what makes codes unsigned */
    __m512i low[2], high[2]; /* bytes of bf16 by the magnitudes of fp8 codes */
    __m512 wide_table;       /* fp32 values of codes */
    __m512i upper_bits;      /* first bytes of fp32 by the upper four bits of normal fp8 codes */
} Lanes;

#include "formats/decode_avx512.h"

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
            if (part && bytes <= 64) break; /* there are no groups any more */
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
    __builtin_prefetch(ahead + rest_bytes - 1, 0, 3); /* where rows begin within a line they end in one more */
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

/* WEIGHT_ROWS rows by one row of x, with the bits of `lanes_row`. They take turns, which is the one forward stream that memory
 * serves fastest, and share the last sums (measured on Zen 5 with 768 and 2,048 columns of 4 bits: a tenth faster; of 8 bits
 * it gains nothing). */
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
    static void lanes_##mode##_##decoder##_##panel(const Lanes *lanes, const RowGroups *row, const char *codes,          \
                                                    const char *ahead, const char *x, float *out, int64_t ldo) {       \
        lanes_row(mode, decoder, panel, lanes, row, codes, ahead, x, out, ldo);                                        \
    }
#define DEFINE_FOUR(mode, decoder, scales)                                                                                \
    static void four_##mode##_##decoder##_##scales(const Lanes *lanes, const RowGroups *rows, Matrix weight,             \
                                                   const char *ahead, const char *x, float *out) {                      \
        lanes_rows(mode, decoder, scales, lanes, rows, weight, ahead, x, out);                                          \
    }
#define DEFINE_FOURS(mode, decoder)                                                                                       \
    DEFINE_FOUR(mode, decoder, SCALES_WIDENED) DEFINE_FOUR(mode, decoder, SCALES_UPPER) DEFINE_FOUR(mode, decoder, SCALES_HALVES)
#define NAME_FOURS(mode, decoder)                                                                                         \
    {four_##mode##_##decoder##_SCALES_WIDENED, four_##mode##_##decoder##_SCALES_UPPER, four_##mode##_##decoder##_SCALES_HALVES}
#define FOR_PANELS(macro, pairs, decoder, separator)                                                          \
    macro(pairs, decoder, 1) separator() macro(pairs, decoder, 2) separator() macro(pairs, decoder, 3) separator() \
        macro(pairs, decoder, 4) separator() macro(pairs, decoder, 5) separator() macro(pairs, decoder, 6)
#define NAME_LANES_ROW(pairs, decoder, panel) lanes_##pairs##_##decoder##_##panel
#define DEFINE_DECODER(pairs, decoder) FOR_PANELS(DEFINE_LANES_ROW, pairs, decoder, NO_SEPARATOR)
#define NAME_DECODER(pairs, decoder) {FOR_PANELS(NAME_LANES_ROW, pairs, decoder, COMMA)}

DEFINE_DECODER(0, DECODE_TABLE4)
DEFINE_DECODER(0, DECODE_ZEROS4)
DEFINE_DECODER(0, DECODE_E4M3)
DEFINE_DECODER(0, DECODE_BYTES)
#if HAS_BF16_DOT
DEFINE_DECODER(1, DECODE_TABLE4)
DEFINE_DECODER(1, DECODE_ZEROS4)
DEFINE_DECODER(1, DECODE_E4M3)
DEFINE_DECODER(1, DECODE_BYTES)
DEFINE_DECODER(1, DECODE_ANY4)
#endif

DEFINE_FOURS(0, DECODE_TABLE4)
DEFINE_FOURS(0, DECODE_ZEROS4)
DEFINE_FOURS(0, DECODE_E4M3)
DEFINE_FOURS(0, DECODE_BYTES)
#if HAS_BF16_DOT
DEFINE_FOURS(1, DECODE_TABLE4)
DEFINE_FOURS(1, DECODE_ZEROS4)
DEFINE_FOURS(1, DECODE_E4M3)
DEFINE_FOURS(1, DECODE_BYTES)
DEFINE_FOURS(1, DECODE_ANY4)
#endif

static const LanesRow LANES_ROWS[NUM_MODES][NUM_DECODERS][PANEL_ROWS] = {
    {NAME_DECODER(0, DECODE_TABLE4), NAME_DECODER(0, DECODE_ZEROS4), NAME_DECODER(0, DECODE_E4M3), NAME_DECODER(0, DECODE_BYTES)},
#if HAS_BF16_DOT
    {NAME_DECODER(1, DECODE_TABLE4), NAME_DECODER(1, DECODE_ZEROS4), NAME_DECODER(1, DECODE_E4M3), NAME_DECODER(1, DECODE_BYTES),
     NAME_DECODER(1, DECODE_ANY4)},
#endif
};

static const LanesRows LANES_OF_FOUR[NUM_MODES][NUM_DECODERS][NUM_SCALE_READERS] = {
    {NAME_FOURS(0, DECODE_TABLE4), NAME_FOURS(0, DECODE_ZEROS4), NAME_FOURS(0, DECODE_E4M3), NAME_FOURS(0, DECODE_BYTES)},
#if HAS_BF16_DOT
    {NAME_FOURS(1, DECODE_TABLE4), NAME_FOURS(1, DECODE_ZEROS4), NAME_FOURS(1, DECODE_E4M3), NAME_FOURS(1, DECODE_BYTES),
     NAME_FOURS(1, DECODE_ANY4)},
#endif
};

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
    __m512 values[2]; /* of codes of 4 bits, or of their differences to a zero point, which are 32 */
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
    uint8_t low[128], high[128]; /* of fp8: normal codes, then those below and NaN */
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
