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
enum { NUM_LANES = 16, LARGEST_TABLE_ZERO = 16 };
enum { WIDE, PAIRS, NUM_MODES }; /* of products: as fp32, of pairs of bf16 */

typedef struct {
    const RowGroups *row;
    int shift;             /* binary logarithm of a group's columns */
    __m512i expand;        /* group of each lane, counted from the first of the block, or of the 64 codes of a DOT8 */
    __m512i table, flip;   /* bf16 values of codes; what makes codes unsigned */
    __m512i bytes;         /* high bytes of bf16 by the upper four bits of fp8 codes */
    __m512 wide_table;     /* fp32 values of codes */
} Lanes;

/* Of the codes that begin with an element. */
INLINE __m512 scales_at(const Lanes *lanes, int64_t element) {
    return _mm512_permutexvar_ps(lanes->expand, _mm512_loadu_ps(lanes->row->scales + (element >> lanes->shift)));
}

INLINE __m512i zeros_at(const Lanes *lanes, int64_t element) {
    return _mm512_permutexvar_epi32(lanes->expand, _mm512_loadu_si512(lanes->row->zeros + (element >> lanes->shift)));
}

/* A vector of codes, of a block of which `bytes` are there: the row may end at the end of the mapped memory, and what a
 * mask leaves out is not read. */
INLINE __m512i load_codes(const char *codes, int64_t bytes) {
    if (bytes >= 64) return _mm512_loadu_si512(codes);
    return _mm512_maskz_loadu_epi8(bytes > 0 ? ~0ull >> (64 - bytes) : 0, codes);
}

/* Of the eight bytes of each lane the first four, or the last. */
INLINE __m512i bytes_of_lanes(const char *codes, int64_t bytes, int half, __m512i flip) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i index = half ? _mm512_add_epi32(even, _mm512_set1_epi32(1)) : even;
    const __m512i low = load_codes(codes, bytes), high = load_codes(codes + 64, bytes - 64);
    return _mm512_xor_si512(_mm512_permutex2var_epi32(low, index, high), flip);
}

/* ---- decoding to fp32 ---- */

/* fp8 in the highest byte of each lane. */
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

/* Vector j has element 8 l + j of a block in lane l. */
INLINE void decode_wide(int decoder, const Lanes *lanes, const char *codes, int64_t bytes, int64_t block, __m512 out[8]) {
    if (decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4) {
        const __m512i words = load_codes(codes, bytes);
        const __m512i zeros = decoder == DECODE_ZEROS4 ? zeros_at(lanes, block * QUANT_BLOCK) : _mm512_setzero_si512();
        UNROLL for (int j = 0; j < 8; j++) {
            const __m512i code = _mm512_srli_epi32(words, 4 * j);
            if (decoder == DECODE_TABLE4)
                out[j] = _mm512_permutexvar_ps(code, lanes->wide_table);
            else
                out[j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(code, _mm512_set1_epi32(15)), zeros));
        }
        return;
    }
    const __m512i zeros = decoder == DECODE_BYTES ? zeros_at(lanes, block * QUANT_BLOCK) : _mm512_setzero_si512();
    const __m512i flip = decoder == DECODE_BYTES ? lanes->flip : _mm512_setzero_si512();
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512i four = bytes_of_lanes(codes, bytes, half, flip);
        UNROLL for (int j = 0; j < 4; j++) {
            if (decoder == DECODE_E4M3) {
                out[4 * half + j] = wide_e4m3(_mm512_slli_epi32(four, 24 - 8 * j));
            } else {
                const __m512i code = _mm512_and_si512(_mm512_srli_epi32(four, 8 * j), _mm512_set1_epi32(255));
                out[4 * half + j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, zeros));
            }
        }
    }
}

#if HAS_BF16_DOT
/* ---- decoding to bf16; element_of says which element lies where ---- */

/* fp8 in both bytes of each word. */
INLINE __m512i any_e4m3(__m512i code, __m512i subnormals) {
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi16(0x07f0));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x7800));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x07f0));
    __m512i value = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    value = _mm512_mask_permutexvar_epi16(value, is_subnormal, code, subnormals);
    value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
    /* value | (code & sign) */
    return _mm512_ternarylogic_epi32(value, code, _mm512_set1_epi16((short)0x8000), 0xf8);
}

/* fp8: bytes of bf16 whose high one is a table of sign and upper exponent bits, wherever no code is subnormal or NaN.
 * Those are rare among weights that fill the range of their scale. */
INLINE void decode_e4m3(const Lanes *lanes, __m512i codes, __m512i out[2]) {
    const __m512i doubled = _mm512_add_epi8(codes, codes); /* without the sign: 0x10 to 0xfc are normal */
    const __m512i from_normal = _mm512_sub_epi8(doubled, _mm512_set1_epi8(0x10));
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(from_normal, _mm512_set1_epi8((char)0xec)) != 0, 0)) {
        out[0] = any_e4m3(_mm512_unpacklo_epi8(codes, codes), lanes->table);
        out[1] = any_e4m3(_mm512_unpackhi_epi8(codes, codes), lanes->table);
        return;
    }
    const __m512i tops = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
    const __m512i high = _mm512_shuffle_epi8(lanes->bytes, tops);
    const __m512i low = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8((char)0xf0));
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* Bytes above zero in words, less zero points: integers of up to 8 bits are exact in the upper halves of fp32. */
INLINE __m512i narrow_words(__m512i words, __m512i zeros) {
    const __m512i low = _mm512_sub_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), zeros);
    const __m512i high = _mm512_sub_epi32(_mm512_srli_epi32(words, 16), zeros);
    const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    /* high & mask | low */
    return _mm512_ternarylogic_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(high)), _mm512_set1_epi32((int)0xffff0000u), low_bits, 0xea);
}

/* Two vectors of pairs of 64 codes of 8 bits. */
INLINE void decode_bytes(int decoder, const Lanes *lanes, __m512i codes, int64_t element, __m512i out[2]) {
    if (decoder == DECODE_E4M3) {
        decode_e4m3(lanes, codes, out);
        return;
    }
    const __m512i zeros = zeros_at(lanes, element), bytes = _mm512_xor_si512(codes, lanes->flip);
    out[0] = narrow_words(_mm512_unpacklo_epi8(bytes, _mm512_setzero_si512()), zeros);
    out[1] = narrow_words(_mm512_unpackhi_epi8(bytes, _mm512_setzero_si512()), zeros);
}

INLINE void decode_any4(const Lanes *lanes, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    float values[QUANT_BLOCK];
    char padded[QUANT_BLOCK / 2];
    int32_t zeros[NUM_LANES];
    uint16_t narrow[QUANT_BLOCK];
    _mm512_storeu_si512(padded, load_codes(codes, bytes));
    code_values(CODE_UINT4, padded, QUANT_BLOCK, values);
    _mm512_storeu_si512(zeros, zeros_at(lanes, block * QUANT_BLOCK));
    for (int i = 0; i < QUANT_BLOCK; i++) {
        const int plane = i / 32, lane = i % 32 / 2, half = i % 2;
        narrow[i] = f32_to_bf16(values[8 * lane + plane + 4 * half] - (float)zeros[lane]);
    }
    for (int plane = 0; plane < 4; plane++) out[plane] = _mm512_loadu_si512(narrow + 32 * plane);
}

/* Four vectors of pairs of a block of codes of 4 bits. */
INLINE void decode_nibbles(int decoder, const Lanes *lanes, const char *codes, int64_t bytes, int64_t block, __m512i out[4]) {
    if (decoder == DECODE_ANY4) {
        decode_any4(lanes, codes, bytes, block, out);
        return;
    }
    const __m512i words = load_codes(codes, bytes);
    /* Code minus zero point, from -16 on: an index of the table, which takes the low five bits of a word. */
    __m512i first = _mm512_setzero_si512();
    if (decoder == DECODE_ZEROS4) {
        first = _mm512_sub_epi32(_mm512_set1_epi32(LARGEST_TABLE_ZERO), zeros_at(lanes, block * QUANT_BLOCK));
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

INLINE void lanes_block(int mode, int decoder, int panel_rows, const Lanes *lanes, const char *codes, int64_t bytes,
                        const char *x, int64_t block, Vec acc[PANEL_ROWS]) {
#if HAS_BF16_DOT
    if (mode == PAIRS) {
        const int is_byte = decoder == DECODE_E4M3 || decoder == DECODE_BYTES, parts = is_byte ? 2 : 1, planes = 4 / parts;
        UNROLL for (int part = 0; part < parts; part++) {
            const int64_t element = block * QUANT_BLOCK + part * 64;
            if (part && bytes <= 64) break; /* there are no groups any more */
            __m512i decoded[4];
            if (is_byte)
                decode_bytes(decoder, lanes, load_codes(codes + part * 64, bytes - part * 64), element, decoded);
            else
                decode_nibbles(decoder, lanes, codes, bytes, block, decoded);
            const Vec scales = scales_at(lanes, element);
            UNROLL for (int m = 0; m < panel_rows; m++) {
                const char *row = x + (m * QUANT_BLOCK + part * 64) * 2;
                Vec sum = vec_zero();
                UNROLL for (int i = 0; i < planes; i++) sum = dot_bf16(sum, (BfVec)decoded[i], vec_load_bf16_pairs(row + i * 64));
                acc[m] = vec_fma(acc[m], sum, scales);
            }
        }
        return;
    }
#endif
    const Vec scales = scales_at(lanes, block * QUANT_BLOCK);
    Vec planes[8];
    decode_wide(decoder, lanes, codes, bytes, block, planes);
    UNROLL for (int m = 0; m < panel_rows; m++) {
        Vec sum = vec_zero();
        UNROLL for (int i = 0; i < 8; i++)
            sum = vec_fma(sum, planes[i], vec_load_f32((const float *)x + m * QUANT_BLOCK + i * NUM_LANES));
        acc[m] = vec_fma(acc[m], sum, scales);
    }
    (void)mode;
}

INLINE void lanes_row(int mode, int decoder, int panel_rows, const Lanes *lanes, const char *codes, const char *ahead,
                      const char *x, float *out, int64_t ldo) {
    const int is_half = decoder != DECODE_E4M3 && decoder != DECODE_BYTES, code_bytes = is_half ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    const int64_t x_bytes = (int64_t)panel_rows * QUANT_BLOCK * (mode == WIDE ? 4 : 2), blocks = lanes->row->k / QUANT_BLOCK;
    const int64_t rest = lanes->row->k % QUANT_BLOCK;
    Vec acc[PANEL_ROWS];
    UNROLL for (int m = 0; m < panel_rows; m++) acc[m] = vec_zero();
    for (int64_t block = 0; block < blocks; block++, codes += code_bytes, ahead += code_bytes, x += x_bytes) {
        UNROLL for (int i = 0; i < code_bytes; i += CACHE_LINE) __builtin_prefetch(ahead + i, 0, 3);
        lanes_block(mode, decoder, panel_rows, lanes, codes, code_bytes, x, block, acc);
    }
    if (rest) lanes_block(mode, decoder, panel_rows, lanes, codes, is_half ? (rest + 1) / 2 : rest, x, blocks, acc);
    UNROLL for (int first = 0; first < panel_rows; first += 4) {
        Vec four[4];
        float sums[4];
        UNROLL for (int i = 0; i < 4; i++) four[i] = first + i < panel_rows ? acc[first + i] : vec_zero();
        vec_four_sums(four[0], four[1], four[2], four[3], sums);
        UNROLL for (int i = 0; i < 4; i++)
            if (first + i < panel_rows) out[(first + i) * ldo] = sums[i];
    }
}

typedef void (*LanesRow)(const Lanes *lanes, const char *codes, const char *ahead, const char *x, float *out, int64_t ldo);

#define DEFINE_LANES_ROW(mode, decoder, panel)                                                                         \
    static void lanes_##mode##_##decoder##_##panel(const Lanes *lanes, const char *codes, const char *ahead, const char *x, \
                                                    float *out, int64_t ldo) {                                        \
        lanes_row(mode, decoder, panel, lanes, codes, ahead, x, out, ldo);                                             \
    }
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

static const LanesRow LANES_ROWS[NUM_MODES][NUM_DECODERS][PANEL_ROWS] = {
    {NAME_DECODER(0, DECODE_TABLE4), NAME_DECODER(0, DECODE_ZEROS4), NAME_DECODER(0, DECODE_E4M3), NAME_DECODER(0, DECODE_BYTES)},
#if HAS_BF16_DOT
    {NAME_DECODER(1, DECODE_TABLE4), NAME_DECODER(1, DECODE_ZEROS4), NAME_DECODER(1, DECODE_E4M3), NAME_DECODER(1, DECODE_BYTES),
     NAME_DECODER(1, DECODE_ANY4)},
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

static void prepare_lanes(int kind, Lanes *lanes, RowGroups *row) {
    const Quantized *format = row->format;
    float wide[32];
    uint16_t narrow[32];
    uint8_t bytes[16];
    int32_t expand[NUM_LANES];
    lanes->row = row;
    if (format->codes == CODE_INT8)
        for (int64_t i = 0; i < row->groups; i++) row->zeros[i] = 128;
    lanes->shift = group_shift(format);
    for (int lane = 0; lane < NUM_LANES; lane++) {
        const int element = kind == KIND_QUANT_DOT8 ? lane / 4 * 16 : 8 * lane;
        expand[lane] = (int32_t)((int64_t)element >> lanes->shift);
    }
    for (int i = 0; i < 32; i++) {
        switch (decoder_of(format)) {
            case DECODE_E4M3: wide[i] = e4m3_to_f32(i & 7); break;
            case DECODE_ZEROS4: wide[i] = (float)(i - LARGEST_TABLE_ZERO); break;
            default: wide[i] = format->codes == CODE_E2M1 ? E2M1_VALUES[i & 15] : (float)((i & 15) - format->zero);
        }
        narrow[i] = f32_to_bf16(wide[i]);
    }
    lanes->expand = _mm512_loadu_si512(expand);
    lanes->table = _mm512_loadu_si512(narrow);
    lanes->wide_table = _mm512_loadu_ps(wide);
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)((i & 8) << 4 | (0x3c + (i & 7)));
    lanes->bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)bytes));
    lanes->flip = _mm512_set1_epi8(format->codes == CODE_INT8 ? (char)0x80 : 0);
}

/* Reads one row's groups, and returns the decoder for them. */
static int prepare_row(RowGroups *row, int64_t index, int decoder, int mode) {
    read_groups(row, index);
    int is_large = 0;
    if (decoder == DECODE_ZEROS4 && mode == PAIRS)
        for (int64_t i = 0; i < row->groups; i++) is_large |= row->zeros[i] > LARGEST_TABLE_ZERO;
    return is_large ? DECODE_ANY4 : decoder;
}

static void multiply_lanes(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo, Matrix next) {
    const int mode = mode_of(kind), decoder = decoder_of(weight.quantized);
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t code_bytes = code_row_bytes(weight.quantized, k), rows_ahead = LANES_AHEAD / (code_bytes + 1) + 1;
    const int64_t scale_bytes = fetched_scale_bytes(weight.quantized, k);
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    Lanes lanes;
    ROW_GROUPS(row, weight, k);
    prepare_lanes(kind, &lanes, &row);
    for (int64_t n = 0; n < num_weight_rows; n++) {
        const char *codes = weight.data + n * weight.stride, *ahead = stream_row(&stream, n + rows_ahead);
        const int own_decoder = prepare_row(&row, weight.first_row + n, decoder, mode);
        fetch_scales(weight, n + rows_ahead < num_weight_rows ? n + rows_ahead : n, scale_bytes);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), last = panel_start(p + 1, panels, num_rows);
            LANES_ROWS[mode][own_decoder][last - first - 1](&lanes, codes, ahead && !p ? ahead : codes, packed + first * row_bytes,
                                                             out + first * ldo + n, ldo);
        }
    }
}
