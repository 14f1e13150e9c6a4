/* Packing, activations, biases and conversions, once for every instruction set: plain loops that the compiler vectorises.
 * A part of isa_template.h. */

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
#define STORE(type) for (int64_t i = 0; i < count; i++) store_as(type, dst, i, src[i])
    BY_DTYPE(dtype, STORE)
}
