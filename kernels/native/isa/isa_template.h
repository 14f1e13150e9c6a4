/* The kernels of one instruction set, which the including file names: ISA_NAME, printable, and ISA_SYMBOL, the table. */
#include "formats/int8.h"
#include "formats/int8_blocks.h"
#include "formats/quantized_template.h"
#include "isa/columns.h"
#include "isa/rounded.h"
#if HAS_BF16_DOT
#include "formats/planes_vbmi2.h"
#define DOT_PLANES dot_planes
#else
#define DOT_PLANES NULL
#endif

/* ---- packing, activations, biases and conversions: plain loops that the compiler vectorises ---- */

static void pack(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row,
                 int panel_rows, int64_t k) {
    if (kind == KIND_INT8_BLOCKS) {
        pack_int8_blocks(src, dtype, count, panel, first_k, row, panel_rows, k);
        return;
    }
    if (kind >= KIND_QUANT_INT4) {
        pack_int8(kind, src, dtype, count, panel, first_k, row, panel_rows, k);
        return;
    }
    if (kind >= NUM_KINDS) {
        pack_quantized(kind, src, dtype, count, panel, first_k, row, panel_rows, k);
        return;
    }
    const int width = kind == KIND_BF16_DOT ? 2 : 4;
    char *group = panel + (first_k * panel_rows + row * K_STEP) * width;
    for (int64_t i = 0; i < count; i += K_STEP, group += panel_rows * K_STEP * width) {
        const int filled = count - i < K_STEP ? (int)(count - i) : K_STEP;
        if (kind == KIND_BF16_DOT && dtype == DTYPE_BF16 && filled == K_STEP) {
            memcpy(group, src + 2 * i, K_STEP * 2);
            continue;
        }
        float values[K_STEP] = {0};
        for (int j = 0; j < filled; j++) values[j] = load_as(dtype, src, i + j);
        if (kind == KIND_BF16_DOT) {
            uint16_t *out = (uint16_t *)group;
            for (int j = 0; j < K_STEP; j++) out[j] = f32_to_bf16(values[j]);
        } else if (kind == KIND_BF16) {
            float *out = (float *)group;
            for (int j = 0; j < LANES; j++) {
                out[j] = values[2 * j];
                out[LANES + j] = values[2 * j + 1];
            }
        } else {
            memcpy(group, values, sizeof values);
        }
    }
}

INLINE void activate_with(int activation, float *restrict values, const float *restrict factor, int64_t count) {
    if (factor)
        for (int64_t i = 0; i < count; i++) values[i] = activated(activation, values[i]) * factor[i];
    else
        for (int64_t i = 0; i < count; i++) values[i] = activated(activation, values[i]);
}

static void activate(int activation, float *values, const float *factor, int64_t count) {
#define ACTIVATE(activation) activate_with(activation, values, factor, count)
    BY_ACTIVATION(activation, ACTIVATE)
}

static void add_bias(float *values, Bias bias, int64_t first, int dtype, int64_t count) {
    const char *src = bias.data + first * bias.stride;
    if (bias.stride == dtype_bytes(dtype))
        for (int64_t i = 0; i < count; i++) values[i] += load_as(dtype, src, i);
    else
        for (int64_t i = 0; i < count; i++) values[i] += load_as(dtype, src + i * bias.stride, 0);
}

static void store(char *dst, int dtype, const float *src, int64_t count) {
    if (dtype == DTYPE_F32)
        memcpy(dst, src, (size_t)count * 4);
    else if (dtype == DTYPE_BF16)
        for (int64_t i = 0; i < count; i++) store_as(DTYPE_BF16, dst, i, src[i]);
    else
        for (int64_t i = 0; i < count; i++) store_as(DTYPE_F16, dst, i, src[i]);
}

/* ---- products ---- */

static void multiply(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                     float *out, int64_t ldo, Matrix next) {
    if (weight.quantized && !is_plain(weight.quantized)) {
        multiply_quantized(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, next);
        return;
    }
    const int64_t panels = num_panels(num_rows, PANEL_ROWS);
    if (panels > PART_PANELS && k * weight_bytes(kind) > PART_BYTES) {
        multiply_parts(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo);
        return;
    }
    const int shape = tile_shape(num_rows, panels);
    multiply_tiles(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, next, shape, ahead_distance(shape));
}

#include "isa/attend.h"

static float read_all(const char *data, int64_t bytes) {
    Vec sums[4] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    const int64_t block = 4 * LANES * 4;
    for (; bytes >= block; bytes -= block, data += block)
        for (int i = 0; i < 4; i++) sums[i] = vec_add(sums[i], vec_load_f32((const float *)(data + i * LANES * 4)));
    float out[4];
    vec_four_sums(sums[0], sums[1], sums[2], sums[3], out);
    return out[0] + out[1] + out[2] + out[3];
}

const Isa ISA_SYMBOL = {
    .name = ISA_NAME, .max_panel_rows = PANEL_ROWS, .tile_rows = TILE_ROWS, .k_step = K_STEP, .has_bf16_dot = HAS_BF16_DOT,
    .pack = pack, .multiply = multiply, .multiply_cached = multiply_cached,
    .dot_planes = DOT_PLANES, .multiply_columns = multiply_columns, .attend = attend, .activate = activate, .add_bias = add_bias, .store = store,
    .read_all = read_all, .quantized_kind = product_kind, .dequantize = dequantize,
    .dot_rounded = dot_rounded, .mix_rounded = mix_rounded,
};
