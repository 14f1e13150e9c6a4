/* Products of quantised matrices, for every instruction set.
 *
 * Rows of x are packed in blocks of QUANT_BLOCK elements, [k / QUANT_BLOCK][row][QUANT_BLOCK], in an order that depends on
 * the kind of product. A weight row is decoded and multiplied by all rows of x before the next: every sum runs over the
 * blocks of a row from first to last, whatever the other rows are. */
#pragma once

#include "formats/int8_blocks.h"
#if LANES == 16
#include "formats/row_values_avx512.h"
#elif LANES == 8
#include "formats/quantized_avx2.h"
#else
static int quantized_kind(const Quantized *format, int x_dtype) {
    (void)format, (void)x_dtype;
    return KIND_F32;
}
#endif

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

/* The product through memory: the values of some rows are written there and multiplied as an fp32 matrix. */
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

static void store(char *dst, int dtype, const float *src, int64_t count);

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

/* Lane l of every vector of a block has its elements 8 l to 8 l + 7, and so belongs to one group. Exceptions: in DOT8
 * elements lie as interleaved bytes do, of every 16 the first eight in one vector and the last eight in the next; for
 * vectors of eight lanes see quantized_avx2.h. */
static void pack_quantized(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row,
                           int panel_rows, int64_t k) {
#if HAS_QUANT_LANES
    if (kind == KIND_QUANT_BLOCKS) {
        pack_blocks(src, dtype, count, (float *)panel, first_k, row, panel_rows);
        return;
    }
#endif
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? round_up(k, QUANT_BLOCK) : last_k;
    for (int64_t at = first_k; at < end; at += 8) {
        float values[8] = {0};
        const int64_t filled = min64(8, last_k - at);
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

static int product_kind(const Quantized *format, int x_dtype) {
    if (is_plain(format)) return format->codes == CODE_F16_BLOCK ? KIND_F16 : KIND_F32;
    if (!format->rounds_rows) return quantized_kind(format, x_dtype);
    if (is_in_blocks(format)) return KIND_INT8_BLOCKS;
    return format->codes == CODE_E2M1 || format->codes == CODE_UINT4 ? KIND_QUANT_INT4 : KIND_QUANT_INT8;
}
