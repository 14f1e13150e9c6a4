/* Values of rows in the type that they are written in, decoded in registers, for vectors of sixteen; a part of
 * quantized_template.h.
 *
 * They have the bits of row_values, rounded to fp32 and then to the type, but for those of a NaN. 32 codes are decoded at a
 * time. Codes of four bits that share a scale have sixteen values at most: these are rounded once, and codes choose from them.
 */
enum { STEP_CODES = 32 };

/* ---- rounding ---- */

/* bf16 in the lower halves: of any numbers, as f32_to_bf16. */
INLINE __m512i bf16_words(Vec values) {
    const __m512i bits = _mm512_castps_si512(values), lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lowest);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000)), 16);
}

/* 32 values in a type of 16 bits. The instruction that rounds to bf16 takes subnormal numbers for zeros. */
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

/* Whether products of a scale with any codes but zeros are normal, also with codes that are 2^-8 as large: those are 2^-17 at
 * least, and the scale is then 2^8 as large. */
INLINE int is_moderate(float scale) {
    const uint32_t least = 10u << 23, end = 246u << 23; /* 2^-117, 2^119 */
    return (bits_of(scale) & 0x7fffffffu) - least < end - least;
}

/* ---- codes whose scales lie outside ---- */

/* The values of codes of four bits, one half for the first 16 of 32 codes and one for the last. */
typedef struct {
    Vec halves[2];
    __m512i words; /* both, in a type of 16 bits */
} Choices;

INLINE Choices choices_of(int dtype, int kind, const RowGroups *row, const int64_t groups[2]) {
    Choices choices;
    UNROLL for (int half = 0; half < 2; half++) {
        if (half && groups[0] == groups[1]) {
            choices.halves[1] = choices.halves[0];
            break;
        }
        const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i integers = _mm512_sub_epi32(iota, _mm512_set1_epi32(row->zeros[groups[half]]));
        const Vec numbers = kind == CODE_E2M1 ? vec_load_f32(E2M1_VALUES) : _mm512_cvtepi32_ps(integers);
        choices.halves[half] = _mm512_mul_ps(numbers, vec_all(row->scales[groups[half]]));
    }
    if (dtype != DTYPE_F32) {
        const int is_normal = is_moderate(row->scales[groups[0]]) && is_moderate(row->scales[groups[1]]);
        choices.words = narrowed(dtype, is_normal, choices.halves[0], choices.halves[1]);
    }
    return choices;
}

/* 32 codes, of two in a byte the low one first. */
INLINE void choose(int dtype, const Choices *choices, const char *codes, char *out) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    /* byte | byte << 12: a code in the lowest bits of each half; and where the values of the last 16 lie */
    const __m512i both = _mm512_madd_epi16(bytes, _mm512_set1_epi32(1 << 12 | 1));
    const __m512i last = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i index = _mm512_ternarylogic_epi32(both, _mm512_set1_epi16(15), last, 0xea); /* both & 15 | last */
    if (dtype != DTYPE_F32) {
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, choices->words));
        return;
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512i wide = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(index, 1) : _mm512_castsi512_si256(index));
        _mm512_storeu_ps(out + 64 * half, _mm512_permutexvar_ps(wide, choices->halves[half]));
    }
}

/* 32 codes of a byte. Fp8 is 2^-8 as large where scales are moderate and no code is NaN, which is called ordinary. */
INLINE void byte_numbers(int kind, int is_ordinary, const char *codes, Vec out[2]) {
    if (kind == CODE_E4M3) {
        /* fp16 of a smaller exponent has its bits, also where it is subnormal, but for NaN */
        const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes)), 7);
        __m512i halves = _mm512_and_si512(wide, _mm512_set1_epi16((short)0xbf80));
        if (!is_ordinary) {
            const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_slli_epi16(halves, 1), _mm512_set1_epi16(0x7f00));
            halves = _mm512_mask_mov_epi16(halves, is_nan, _mm512_or_si512(halves, _mm512_set1_epi16(0x7e00)));
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

static int has_nan(const char *codes, int64_t count) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    uint64_t found = 0;
    for (int64_t i = 0; i < count; i += 64)
        found |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(load_codes(codes + i, count - i), sign), _mm512_set1_epi8(-1));
    return found != 0;
}

INLINE void write_bytes(int dtype, int kind, int is_ordinary, const RowGroups *row, const int64_t groups[2], const char *codes,
                        int64_t count, char *out) {
    Vec scales[2], zeros[2];
    UNROLL for (int half = 0; half < 2; half++) {
        scales[half] = vec_all(row->scales[groups[half]] * (kind == CODE_E4M3 && is_ordinary ? 256.0f : 1.0f));
        zeros[half] = _mm512_cvtepi32_ps(_mm512_set1_epi32(row->zeros[groups[half]]));
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

/* Whole steps of a row from the column `first` to `end`. */
INLINE void write_codes(int dtype, int kind, const RowGroups *row, int64_t first, int64_t end, const char *codes, char *out) {
    const int is_byte = kind != CODE_UINT4 && kind != CODE_E2M1, shift = group_shift(row->format);
    const int64_t last = ((1ll << shift) - 1) | (STEP_CODES - 1); /* of the columns of a group, or of two */
    for (int64_t at = first, count; at < end; at += count) {
        const int64_t groups[2] = {at >> shift, (at + STEP_CODES / 2) >> shift};
        count = (at | last) < end ? (at | last) + 1 - at : end - at;
        if (!is_byte) {
            const Choices choices = choices_of(dtype, kind, row, groups);
            for (int64_t i = 0; i < count; i += STEP_CODES) choose(dtype, &choices, codes + i / 2, out + i * dtype_bytes(dtype));
        } else if (!is_moderate(row->scales[groups[0]]) || !is_moderate(row->scales[groups[1]]) ||
                   (kind == CODE_E4M3 && has_nan(codes, count))) {
            write_bytes(dtype, kind, 0, row, groups, codes, count, out);
        } else {
            write_bytes(dtype, kind, 1, row, groups, codes, count, out);
        }
        codes += is_byte ? count : count / 2;
        out += count * dtype_bytes(dtype);
    }
}

typedef void (*WriteCodes)(const RowGroups *row, int64_t first, int64_t end, const char *codes, char *out);

#define DEFINE_WRITE_CODES(dtype, kind)                                                                                           \
    static void write_codes_##dtype##_##kind(const RowGroups *row, int64_t first, int64_t end, const char *codes, char *out) {   \
        write_codes(dtype, kind, row, first, end, codes, out);                                                                    \
    }
#define FOR_CODES(macro, dtype, separator)                                                                      \
    macro(dtype, CODE_E2M1) separator() macro(dtype, CODE_E4M3) separator() macro(dtype, CODE_UINT4) separator() \
        macro(dtype, CODE_UINT8) separator() macro(dtype, CODE_INT8)
#define NAME_WRITE_CODES(dtype, kind) [kind] = write_codes_##dtype##_##kind
#define NAME_WRITERS(dtype) [dtype] = {FOR_CODES(NAME_WRITE_CODES, dtype, COMMA)}

FOR_CODES(DEFINE_WRITE_CODES, DTYPE_F32, NO_SEPARATOR)
FOR_CODES(DEFINE_WRITE_CODES, DTYPE_BF16, NO_SEPARATOR)
FOR_CODES(DEFINE_WRITE_CODES, DTYPE_F16, NO_SEPARATOR)

static const WriteCodes WRITE_CODES[][CODE_PLANES] = {NAME_WRITERS(DTYPE_F32), NAME_WRITERS(DTYPE_BF16), NAME_WRITERS(DTYPE_F16)};

/* The last codes are as many as lie in a step, whatever lies behind the row. */
static void write_codes_of_row(WriteCodes write, const RowGroups *row, const char *codes, int dtype, char *out) {
    const int64_t whole = row->k / STEP_CODES * STEP_CODES, rest = row->k - whole, skipped = code_row_bytes(row->format, whole);
    write(row, 0, whole, codes, out);
    if (!rest) return;
    char padded[STEP_CODES] = {0}, values[STEP_CODES * 4];
    memcpy(padded, codes + skipped, (size_t)(code_row_bytes(row->format, row->k) - skipped));
    write(row, whole, whole + STEP_CODES, padded, values);
    memcpy(out + whole * dtype_bytes(dtype), values, (size_t)(rest * dtype_bytes(dtype)));
}

/* ---- blocks that hold their scales ---- */

/* 32 codes of four bits in halves of as many words. What lies above them chooses nothing: values are there twice. */
INLINE __m512i nibble_words(int code, const uint8_t *src, int group) {
    const uint8_t *nibbles = nibbles_of(code, src, group);
    if (code == CODE_Q4_K) {
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)nibbles));
        return group % 2 ? _mm512_srli_epi16(bytes, 4) : bytes;
    }
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)nibbles)));
    return _mm512_srlv_epi16(bytes, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1));
}

/* Numbers of fp16 times integers are multiples of 2^-24: none is subnormal in fp32. */
INLINE void write_blocks(int dtype, int code, const CodeTable *table, const char *weight, int64_t k, char *out) {
    const int codes = BLOCK_SIZES[code - CODE_BLOCKS].codes, bytes = BLOCK_SIZES[code - CODE_BLOCKS].bytes;
    for (; k > 0; k -= codes, weight += bytes) {
        const uint8_t *src = (const uint8_t *)weight;
        GroupNumbers numbers;
        block_numbers(code, src, &numbers);
        IN_MEMORY(numbers);
        const int is_normal = code != CODE_MXFP4_BLOCK || is_moderate(numbers.scales[0]);
        UNROLL for (int group = 0; group < codes / STEP_CODES; group++, out += 2 * STEP_CODES) {
            if (has_table(code)) {
                const Vec values = scaled(code, *table, &numbers, group);
                const __m512i choices = narrowed(dtype, is_normal, values, values);
                _mm512_storeu_si512(out, _mm512_permutexvar_epi16(nibble_words(code, src, group), choices));
            } else {
                Vec values[2];
                group_values(code, table, src, group, &numbers, values);
                write_values_as(dtype, is_normal, values[0], values[1], out);
            }
        }
    }
}

typedef void (*WriteBlocks)(const CodeTable *table, const char *weight, int64_t k, char *out);

#define DEFINE_WRITE_BLOCKS(code)                                                                             \
    static void bf16_of_##code(const CodeTable *table, const char *weight, int64_t k, char *out) {          \
        write_blocks(DTYPE_BF16, code, table, weight, k, out);                                               \
    }                                                                                                         \
    static void f16_of_##code(const CodeTable *table, const char *weight, int64_t k, char *out) {           \
        write_blocks(DTYPE_F16, code, table, weight, k, out);                                                \
    }                                                                                                         \
    static void f32_of_##code(const CodeTable *table, const char *weight, int64_t k, char *out) {           \
        block_rows(code, 0, 1, table, weight, 0, k, NULL, (float *)out);                                      \
    }
#define NAME_WRITE_BLOCKS(code) {[DTYPE_F32] = f32_of_##code, [DTYPE_BF16] = bf16_of_##code, [DTYPE_F16] = f16_of_##code}

FOR_BLOCKS(DEFINE_WRITE_BLOCKS, NO_SEPARATOR)

static const WriteBlocks WRITE_BLOCKS[END_OF_CODES - CODE_BLOCKS][DTYPE_F16 + 1] = {FOR_BLOCKS(NAME_WRITE_BLOCKS, COMMA)};

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
    if (is_in_blocks(format)) {
        const WriteBlocks write = WRITE_BLOCKS[format->codes - CODE_BLOCKS][dtype];
        CodeTable table;
        prepare_table(format->codes, &table);
        for (int64_t n = 0; n < num_rows; n++, codes += weight.stride, out += out_stride) write(&table, codes, row->k, out);
        return;
    }
    const WriteCodes write = WRITE_CODES[dtype][format->codes];
    for (int64_t n = 0; n < num_rows; n++, codes += weight.stride, out += out_stride) {
        read_groups(row, weight.first_row + n);
        write_codes_of_row(write, row, codes, dtype, out);
    }
}
