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
        for (int j = 0; j < filled; j++) values[j] = load_element(src, dtype, i + j);
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

INLINE float apply(int activation, float x) {
    switch (activation) {
        case ACT_SILU: return x / (1.0f + exp_f32(-x));
        case ACT_GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case ACT_GELU_TANH: {
            float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
            return x - x / (exp_f32(2.0f * inner) + 1.0f);
        }
        case ACT_RELU: return x < 0.0f ? 0.0f : x;
        default: return x < 0.0f ? 0.0f : x * x;
    }
}

INLINE void activate_with(int activation, float *restrict values, const float *restrict factor, int64_t count) {
    if (factor)
        for (int64_t i = 0; i < count; i++) values[i] = apply(activation, values[i]) * factor[i];
    else
        for (int64_t i = 0; i < count; i++) values[i] = apply(activation, values[i]);
}

static void activate(int activation, float *values, const float *factor, int64_t count) {
    switch (activation) {
        case ACT_SILU: activate_with(ACT_SILU, values, factor, count); break;
        case ACT_GELU: activate_with(ACT_GELU, values, factor, count); break;
        case ACT_GELU_TANH: activate_with(ACT_GELU_TANH, values, factor, count); break;
        case ACT_RELU: activate_with(ACT_RELU, values, factor, count); break;
        default: activate_with(ACT_RELU2, values, factor, count); break;
    }
}

static void add_bias(float *values, Bias bias, int64_t first, int dtype, int64_t count) {
    const char *src = bias.data + first * bias.stride;
    if (bias.stride == dtype_bytes(dtype))
        for (int64_t i = 0; i < count; i++) values[i] += load_element(src, dtype, i);
    else
        for (int64_t i = 0; i < count; i++) values[i] += load_element(src + i * bias.stride, dtype, 0);
}

static void store(char *dst, int dtype, const float *src, int64_t count) {
    if (dtype == DTYPE_F32) {
        memcpy(dst, src, (size_t)count * 4);
    } else if (dtype == DTYPE_BF16) {
        for (int64_t i = 0; i < count; i++) store_u16(dst + 2 * i, f32_to_bf16(src[i]));
    } else {
        for (int64_t i = 0; i < count; i++) store_u16(dst + 2 * i, f32_to_f16(src[i]));
    }
}
