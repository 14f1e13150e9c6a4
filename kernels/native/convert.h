/* Scalar conversions between fp32, bf16 and fp16, and an exponential: branch-free, so loops over them vectorise.
 * Addresses may be unaligned: tensors in a file begin where the file says. */
#ifndef MOE_RUNTIME_CONVERT_H
#define MOE_RUNTIME_CONVERT_H

#include <stdint.h>
#include <string.h>

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

static inline void store_f32(char *dst, float value) { memcpy(dst, &value, 4); }
static inline void store_bf16(char *dst, float value) { store_u16(dst, f32_to_bf16(value)); }
static inline void store_f16(char *dst, float value) { store_u16(dst, f32_to_f16(value)); }

static inline float round_f32(float value) { return value; }
static inline float round_bf16(float value) { return bf16_to_f32(f32_to_bf16(value)); }
static inline float round_f16(float value) { return f16_to_f32(f32_to_f16(value)); }

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

#endif
