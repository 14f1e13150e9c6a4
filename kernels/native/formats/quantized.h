/* Quantised matrices: value[n, k] = (code - zero) * scale * global scale, as kernels/quantized defines it.
 *
 * Codes of a row lie side by side, of two in a byte the low one first. Scales and zero points belong to groups of
 * rows and columns; rows of both may lie at any distance.
 */
#ifndef MOE_RUNTIME_QUANTIZED_H
#define MOE_RUNTIME_QUANTIZED_H

#include "convert.h"
#include "kernels.h"

enum { CODE_E2M1 = 0, CODE_E4M3 = 1, CODE_UINT4 = 2, CODE_UINT8 = 3, CODE_INT8 = 4, CODE_PLANES = 5 };
/* Blocks that hold their scales, in the order in which kernels/quantized/formats.py has them. */
enum {
    CODE_BLOCKS = 32,
    CODE_Q4_0 = CODE_BLOCKS,
    CODE_Q4_1,
    CODE_Q5_0,
    CODE_Q5_1,
    CODE_Q8_0,
    CODE_Q2_K,
    CODE_Q3_K,
    CODE_Q4_K,
    CODE_Q5_K,
    CODE_Q6_K,
    CODE_IQ4_NL,
    CODE_IQ4_XS,
    CODE_MXFP4_BLOCK,
    CODE_F16_BLOCK,
    CODE_F32_BLOCK,
    END_OF_CODES
};
static const struct {
    int codes, bytes;
} BLOCK_SIZES[END_OF_CODES - CODE_BLOCKS] = {{32, 18},   {32, 20},   {32, 22},   {32, 24},  {32, 34},   {256, 84}, {256, 110},
                                             {256, 144}, {256, 176}, {256, 210}, {32, 18}, {256, 136}, {32, 17},
                                             {1, 2},    {1, 4}};
enum { SCALE_E8M0 = 0, SCALE_E4M3 = 1, SCALE_BF16 = 2, SCALE_F16 = 3, SCALE_F32 = 4 };
enum { GLOBAL_NONE = 0, GLOBAL_MULTIPLY = 1, GLOBAL_DIVIDE = 2 };

/* As kernels/quantized writes it, but for CODE_PLANES, whose number begins a PlanesMatrix instead (planes.h). zeros and global_scale may be NULL. A group of 0 rows or columns is all of them. */
struct Quantized {
    int64_t codes, scale_type, group_rows, group_cols, zero, global;
    const char *scales;
    int64_t scale_stride, scale_rows; /* how far rows of scales lie apart in bytes, and how many there are */
    const char *zeros;
    int64_t zero_stride;
    const float *global_scale;
    int64_t rounds_rows; /* whether rows of x are rounded to int8, see quantized_int8.h */
};

static const float E2M1_VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* Exact: the exponent of subnormal codes comes from a subtraction, as no fp32 is subnormal then. */
static inline float e4m3_to_f32(uint8_t code) {
    const uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    const float normal = from_bits((magnitude << 20) + (120u << 23));
    const float subnormal = from_bits((magnitude << 20) + (121u << 23)) - 0.015625f; /* 2^-6 */
    const uint32_t finite = bits_of(magnitude < 8u ? subnormal : normal);
    return from_bits((magnitude == 0x7fu ? 0x7fc00000u : finite) | sign);
}

static inline float e8m0_to_f32(uint8_t code) {
    const uint32_t bits = code ? (uint32_t)code << 23 : 1u << 22; /* 2^-127 is subnormal */
    return from_bits(code == 255 ? 0x7fc00000u : bits);
}

static inline int is_in_blocks(const Quantized *format) { return format->codes >= CODE_BLOCKS; }

/* Plain numbers, which are multiplied as those of a plain matrix. */
static inline int is_plain(const Quantized *format) { return format->codes == CODE_F16_BLOCK || format->codes == CODE_F32_BLOCK; }

static inline int64_t code_row_bytes(const Quantized *format, int64_t k) {
    if (is_in_blocks(format))
        return k / BLOCK_SIZES[format->codes - CODE_BLOCKS].codes * BLOCK_SIZES[format->codes - CODE_BLOCKS].bytes;
    return format->codes == CODE_E2M1 || format->codes == CODE_UINT4 ? (k + 1) / 2 : k;
}

/* Groups whose scales lie outside the codes. */
static inline int64_t groups_of_row(const Quantized *format, int64_t k) {
    if (is_in_blocks(format)) return 0;
    return format->group_cols ? (k + format->group_cols - 1) / format->group_cols : 1;
}

static const int SCALE_BYTES[] = {1, 1, 2, 2, 4};

/* Most groups are of one row, which needs no division. */
static inline int64_t group_of(int64_t index, int64_t group) { return group == 1 ? index : group ? index / group : 0; }

#endif
