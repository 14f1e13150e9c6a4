/* Products of quantised matrices, once for every instruction set; a part of isa_template.h.
 *
 * Rows of x are packed in blocks of QUANT_BLOCK elements, [k / QUANT_BLOCK][row][QUANT_BLOCK], in an order that the
 * kind of product prescribes. A weight row is decoded and multiplied with all rows of x before the next one is: every
 * sum runs over the blocks of one row from the first to the last, whatever the other rows are.
 *
 * Here are the parts that every instruction set has: the values of rows, and the product that first writes the
 * values of some rows to memory (KIND_F32, whose rows of x are packed as for a matrix of fp32). A file that defines
 * HAS_QUANT_LANES has decoded codes in registers.
 */

/* Numbers of groups are read as a whole vector at a time. */
enum { GROUP_PADDING = 16, WIDENED = 16 };

/* One row's scales and zero points, zeros behind the last. */
typedef struct {
    const Quantized *format;
    int64_t k, groups;
    float *scales;
    int32_t *zeros;
    const char *stored; /* its scales as they lie */
    int64_t widened;    /* the group of rows whose scales are in `scales`; -1: nobody noted it */
} RowGroups;

/* Some scales as fp32; a constant number of them are vectors. */
INLINE void widen_scales(int type, const char *restrict src, int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t code = (uint8_t)src[i], is_end = code - 1 >= 254; /* 0 or 255 */
        switch (type) {
            case SCALE_E8M0: out[i] = from_bits(code << 23 | is_end << 22); break; /* as e8m0_to_f32, without branches */
            case SCALE_E4M3: out[i] = e4m3_to_f32((uint8_t)code); break;
            case SCALE_BF16: out[i] = load_bf16(src + 2 * i); break;
            default: out[i] = load_f16(src + 2 * i);
        }
    }
}

/* WIDENED scales. */
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

/* The last ones are widened once more, as of so many: a rest of any number would be widened one after the other. */
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

/* A zero point for all groups is there from the start. */
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

/* Groups of one row in room for as many and GROUP_PADDING more. Vectors take signed codes of 8 bits for unsigned ones. */
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

enum { CHUNK = 512 };

/* Codes of 4 bits, one to a byte. */
static void split_nibbles(const uint8_t *src, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count / 2; i++) {
        out[2 * i] = src[i] & 15;
        out[2 * i + 1] = src[i] >> 4;
    }
    if (count % 2) out[count - 1] = src[count / 2] & 15;
}

/* Twice the magnitude of an e2m1 code; comparisons are faster than a table, as many codes are compared at once. */
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
#include "formats/code_values_avx2.h"
#endif

/* What the codes stand for without zero point and scale; exact. */
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

#include "formats/block_values.h"
#include "formats/block_codes.h"

/* All values of a row, rounded to fp32 once. */
static void row_values(const RowGroups *row, const char *codes, float *out) {
    if (is_in_blocks(row->format)) {
        block_values(row->format->codes, (const uint8_t *)codes, row->k, out);
        return;
    }
    const int64_t group = row->format->group_cols ? row->format->group_cols : row->k;
    code_values(row->format->codes, codes, row->k, out);
    for (int64_t g = 0; g < row->groups; g++) {
        const int64_t first = g * group, end = first + group < row->k ? first + group : row->k;
        const float zero = (float)row->zeros[g], scale = row->scales[g];
        if (row->format->codes == CODE_E2M1 || row->format->codes == CODE_E4M3 || row->format->codes == CODE_INT8)
            for (int64_t i = first; i < end; i++) out[i] *= scale;
        else
            for (int64_t i = first; i < end; i++) out[i] = (out[i] - zero) * scale;
    }
}

static void store(char *dst, int dtype, const float *src, int64_t count);

/* ---- the product through memory ---- */

/* Most bytes of values at a time: they stay in the second-level cache while all rows of x are multiplied with them. */
#define VALUE_BYTES (128 << 10)

/* Rows whose values are written at a time. With one panel it is those of a tile: they stay in the first-level cache. */
static int64_t rows_of_values(int64_t k, int64_t num_rows) {
    const int64_t tiles = num_rows > PANEL_ROWS ? VALUE_BYTES / (TILE_ROWS * 4 * (k + 1)) : 1;
    return TILE_ROWS * (tiles ? tiles : 1);
}

/* Values are multiplied as a matrix of fp32 is. */
static void multiply_values(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                            int64_t ldo) {
    const int64_t at_once = rows_of_values(k, num_rows);
    ROW_GROUPS(row, weight, k);
    float values[at_once * k];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++) {
            read_groups(&row, weight.first_row + first + n);
            row_values(&row, weight.data + (first + n) * weight.stride, values + n * k);
        }
        multiply_cached(KIND_F32, (Matrix){.data = (const char *)values, .stride = 4 * k}, count, k, packed, num_rows, out + first, ldo);
    }
}

/* ---- packing ---- */

/* How far ahead of its use a line is fetched, in bytes. */
enum { LANES_AHEAD = 12 << 10 };

#if HAS_QUANT_LANES
/* Groups of all columns count as the largest power of two. */
static int group_shift(const Quantized *format) { return format->group_cols ? __builtin_ctzll((uint64_t)format->group_cols) : 62; }

/* Of the scales of a row, where it has more than one. */
static int64_t fetched_scale_bytes(const Quantized *format, int64_t k) {
    return format->group_cols ? groups_of_row(format, k) * SCALE_BYTES[format->scale_type] : 0;
}

/* Fetches the scales of `count` rows from `row` on, of the matrix or, behind its rows in hand, of the one that is next. */
static void fetch_scales(const Stream *stream, int64_t row, int64_t count, int64_t bytes) {
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

#if LANES == 8
#include "formats/quantized_avx2.h"
#else
#include "formats/quantized_avx512.h"
#endif
#include "formats/block_rows.h"
#if LANES == 16
#include "formats/row_values_avx512.h"
#endif
#else
static int quantized_kind(const Quantized *format, int x_dtype) {
    (void)format, (void)x_dtype;
    return KIND_F32;
}
#endif

/* The values of rows of a matrix, rounded to fp32 and then to `dtype`. */
static void dequantize(Matrix weight, int64_t num_rows, int64_t k, char *out, int64_t out_stride, int dtype) {
    ROW_GROUPS(row, weight, k);
#if LANES == 16
    if (is_written_in_steps(weight.quantized)) {
        write_rows(&row, weight, num_rows, out, out_stride, dtype);
        return;
    }
#endif
    float values[k];
    for (int64_t n = 0; n < num_rows; n++) {
        read_groups(&row, weight.first_row + n);
        row_values(&row, weight.data + n * weight.stride, values);
        store(out + n * out_stride, dtype, values, k);
    }
}

/* Lane l of every vector of a block belongs to its elements 8 l to 8 l + 7, and so to one group; but for DOT8, where
 * elements lie as interleaved bytes do: of every 16 the first eight in one vector, the last eight in the next; and but for
 * vectors of eight lanes, see quantized_avx2.h. */
static void pack_quantized(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row,
                           int panel_rows, int64_t k) {
#if HAS_QUANT_LANES
    if (kind == KIND_QUANT_BLOCKS) {
        pack_blocks(src, dtype, count, (float *)panel, first_k, row, panel_rows);
        return;
    }
#endif
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + QUANT_BLOCK - 1) / QUANT_BLOCK * QUANT_BLOCK : last_k;
    for (int64_t at = first_k; at < end; at += 8) {
        float values[8] = {0};
        const int64_t filled = last_k - at < 8 ? last_k - at : 8;
        for (int64_t j = 0; j < filled; j++) values[j] = load_as(dtype, src, at - first_k + j);
        const int64_t block = (at / QUANT_BLOCK * panel_rows + row) * QUANT_BLOCK, lane = at % QUANT_BLOCK / 8;
        if (kind == KIND_QUANT_F32 && LANES == 8) {
            float *place = (float *)panel + block + lane / 8 * 64 + lane / 2 % 2 * 32 + lane / 4 % 2 * 4 + lane % 2 * 2;
            for (int j = 0; j < 8; j++) place[j % 4 * 8 + j / 4] = values[j];
        } else if (kind == KIND_QUANT_F32) {
            for (int j = 0; j < 8; j++) ((float *)panel)[block + 16 * j + lane] = values[j];
        } else if (kind == KIND_QUANT_DOT4) {
            for (int plane = 0; plane < 4; plane++)
                for (int half = 0; half < 2; half++)
                    ((uint16_t *)panel)[block + 32 * plane + 2 * lane + half] = f32_to_bf16(values[plane + 4 * half]);
        } else {
            uint16_t *place = (uint16_t *)panel + block + lane / 8 * 64 + lane % 2 * 32 + lane % 8 / 2 * 8;
            for (int j = 0; j < 8; j++) place[j] = f32_to_bf16(values[j]);
        }
    }
}

#include "formats/quantized_int8.h"
#include "formats/int8_blocks.h"

static void multiply_quantized(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                               float *out, int64_t ldo, Matrix next) {
    if (kind == KIND_INT8_BLOCKS) {
        multiply_int8_blocks(weight, num_weight_rows, k, packed, num_rows, out, ldo);
        return;
    }
    if (kind >= KIND_QUANT_INT4) {
        multiply_int8(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, next);
        return;
    }
    if (kind == KIND_F32) {
        multiply_values(weight, num_weight_rows, k, packed, num_rows, out, ldo);
        return;
    }
#if HAS_QUANT_LANES
    if (kind == KIND_QUANT_BLOCKS) {
        multiply_blocks(weight, num_weight_rows, k, packed, num_rows, out, ldo);
        return;
    }
    multiply_lanes(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, next);
#endif
}
