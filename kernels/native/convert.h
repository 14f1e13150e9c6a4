/* Scalar conversions between fp32, bf16 and fp16, and activations: branch-free, so loops over them vectorise.
 * Addresses may be unaligned: tensors in a file begin where the file says. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2 };
enum { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_RELU2 = 4, NUM_ACTIVATIONS };

static inline int64_t dtype_bytes(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
static inline int64_t round_up(int64_t count, int64_t size) { return parts_of(count, size) * size; }

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float load_f32(const char *src) {
    float value;
    memcpy(&value, src, 4);
    return value;
}

static inline uint16_t load_u16(const char *src) {
    uint16_t value;
    memcpy(&value, src, 2);
    return value;
}

static inline void store_u16(char *dst, uint16_t value) { memcpy(dst, &value, 2); }

static inline float bf16_to_f32(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* Round to nearest, ties to even; a NaN stays a NaN. */
static inline uint16_t f32_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? (bits >> 16) | 0x40u : rounded);
}

/* Moving the exponent by a multiplication also normalises subnormal halves. */
static inline float f16_to_f32(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    float finite = from_bits(magnitude << 13) * from_bits(0x77800000u); /* 2^112 */
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    return from_bits((magnitude >= 0x7c00u ? special : bits_of(finite)) | sign);
}

/* Round to nearest, ties to even. Subnormal results round in an addition whose unit in the last place is 2^-24. */
static inline uint16_t f32_to_f16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half; /* 65520 and above */
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | sign);
}

static inline float load_bf16(const char *src) { return bf16_to_f32(load_u16(src)); }
static inline float load_f16(const char *src) { return f16_to_f32(load_u16(src)); }

/* Number i of values of a type; loops over a constant type become vectors. */
INLINE float load_as(int dtype, const char *src, int64_t i) {
    if (dtype == DTYPE_F32) return load_f32(src + 4 * i);
    return dtype == DTYPE_BF16 ? load_bf16(src + 2 * i) : load_f16(src + 2 * i);
}

INLINE void store_as(int dtype, char *dst, int64_t i, float value) {
    if (dtype == DTYPE_F32)
        memcpy(dst + 4 * i, &value, 4);
    else
        store_u16(dst + 2 * i, dtype == DTYPE_BF16 ? f32_to_bf16(value) : f32_to_f16(value));
}

INLINE float round_as(int dtype, float value) {
    if (dtype == DTYPE_F32) return value;
    return dtype == DTYPE_BF16 ? bf16_to_f32(f32_to_bf16(value)) : f16_to_f32(f32_to_f16(value));
}

/* call(type), with the type as a constant. */
#define BY_DTYPE(dtype, call)                          \
    switch (dtype) {                                   \
        case DTYPE_F32: call(DTYPE_F32); break;        \
        case DTYPE_BF16: call(DTYPE_BF16); break;      \
        default: call(DTYPE_F16);                      \
    }

/* exp(x) to about 2 units in the last place: x = n ln 2 + r, polynomial in r, scaled by 2^n (the scheme of Cephes' expf).
 * Beyond the range of normal fp32 numbers the result saturates. */
static inline float exp_f32(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504088896341f + shifter;
    float n = shifted - shifter;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits((bits_of(shifted) - bits_of(shifter) + 127u) << 23);
}

INLINE float activated(int activation, float x) {
    switch (activation) {
        case ACT_SILU: return x / (1.0f + exp_f32(-x));
        case ACT_GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case ACT_GELU_TANH: return x - x / (exp_f32(1.59576912160573072f * (x + 0.044715f * x * x * x)) + 1.0f);
        case ACT_RELU: return x < 0.0f ? 0.0f : x;
        default: return x < 0.0f ? 0.0f : x * x;
    }
}

/* call(activation), with the activation as a constant. */
#define BY_ACTIVATION(activation, call)                     \
    switch (activation) {                                   \
        case ACT_SILU: call(ACT_SILU); break;               \
        case ACT_GELU: call(ACT_GELU); break;               \
        case ACT_GELU_TANH: call(ACT_GELU_TANH); break;     \
        case ACT_RELU: call(ACT_RELU); break;               \
        default: call(ACT_RELU2);                           \
    }
