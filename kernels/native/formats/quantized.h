/* Quantised matrices: value[n, k] = (code - zero) * scale * global scale, as kernels/quantized defines it.
 *
 * The codes of a row lie side by side, two 4-bit codes to a byte, the low one first. Scales and zero points belong to groups
 * of rows and columns; their rows may lie at any distance. */
#pragma once

#include "kernels.h"

enum { CODE_E2M1 = 0, CODE_E4M3 = 1, CODE_UINT4 = 2, CODE_UINT8 = 3, CODE_INT8 = 4, CODE_PLANES = 5 };
/* Blocks that hold their scales, in the order in which kernels/quantized/formats.py has them. */
enum {
    CODE_BLOCKS = 32, CODE_Q4_0 = CODE_BLOCKS, CODE_Q4_1, CODE_Q5_0, CODE_Q5_1, CODE_Q8_0, CODE_Q2_K, CODE_Q3_K, CODE_Q4_K, CODE_Q5_K,
    CODE_Q6_K, CODE_IQ4_NL, CODE_IQ4_XS, CODE_MXFP4_BLOCK, CODE_F16_BLOCK, CODE_F32_BLOCK, END_OF_CODES
};

/* How the formats differ. */
typedef struct {
    int codes, bytes;    /* codes of a block */
    int has_groups_of_16; /* else 32 codes share a scale */
    int has_minimum;     /* values are code * scale - minimum */
    int has_table;       /* codes of four bits stand for the numbers of a table */
    int zero, int8_zero; /* subtracted from codes without a table, and from codes multiplied as int8 */
    int nibbles, fifth;  /* where codes of four bits and their fifth bits begin, of blocks of 32 and of IQ4_XS */
} BlockTraits;
static const BlockTraits BLOCKS[END_OF_CODES - CODE_BLOCKS] = {
    [CODE_Q4_0 - CODE_BLOCKS] = {32, 18, 0, 0, 1, 0, 8, 2, 0},
    [CODE_Q4_1 - CODE_BLOCKS] = {32, 20, 0, 1, 1, 0, 0, 4, 0},
    [CODE_Q5_0 - CODE_BLOCKS] = {32, 22, 0, 0, 0, 16, 16, 6, 2},
    [CODE_Q5_1 - CODE_BLOCKS] = {32, 24, 0, 1, 0, 0, 0, 8, 4},
    [CODE_Q8_0 - CODE_BLOCKS] = {32, 34, 0, 0, 0, 0, 128, 0, 0},
    [CODE_Q2_K - CODE_BLOCKS] = {256, 84, 1, 1, 0, 0, 0, 0, 0},
    [CODE_Q3_K - CODE_BLOCKS] = {256, 110, 1, 0, 0, 4, 4, 0, 0},
    [CODE_Q4_K - CODE_BLOCKS] = {256, 144, 0, 1, 1, 0, 0, 0, 0},
    [CODE_Q5_K - CODE_BLOCKS] = {256, 176, 0, 1, 0, 0, 0, 0, 0},
    [CODE_Q6_K - CODE_BLOCKS] = {256, 210, 1, 0, 0, 32, 32, 0, 0},
    [CODE_IQ4_NL - CODE_BLOCKS] = {32, 18, 0, 0, 1, 0, 128, 2, 0},
    [CODE_IQ4_XS - CODE_BLOCKS] = {256, 136, 0, 0, 1, 0, 128, 8, 0},
    [CODE_MXFP4_BLOCK - CODE_BLOCKS] = {32, 17, 0, 0, 1, 0, 12, 1, 0},
    [CODE_F16_BLOCK - CODE_BLOCKS] = {1, 2, 0, 0, 0, 0, 0, 0, 0},
    [CODE_F32_BLOCK - CODE_BLOCKS] = {1, 4, 0, 0, 0, 0, 0, 0, 0},
};
#define TRAITS(code) BLOCKS[(code) - CODE_BLOCKS]
#define FOR_BLOCKS(macro)                                                                                             \
    macro(CODE_Q4_0) macro(CODE_Q4_1) macro(CODE_Q5_0) macro(CODE_Q5_1) macro(CODE_Q8_0) macro(CODE_Q2_K)             \
    macro(CODE_Q3_K) macro(CODE_Q4_K) macro(CODE_Q5_K) macro(CODE_Q6_K) macro(CODE_IQ4_NL) macro(CODE_IQ4_XS)         \
    macro(CODE_MXFP4_BLOCK)

enum { SCALE_E8M0 = 0, SCALE_E4M3 = 1, SCALE_BF16 = 2, SCALE_F16 = 3, SCALE_F32 = 4 };
enum { GLOBAL_NONE = 0, GLOBAL_MULTIPLY = 1, GLOBAL_DIVIDE = 2 };

/* As kernels/quantized writes it; with CODE_PLANES this is the start of a PlanesMatrix (planes.h). zeros and global_scale
 * may be NULL. A group of 0 rows or columns takes in all of them. */
struct Quantized {
    int64_t codes, scale_type, group_rows, group_cols, zero, global;
    const char *scales;
    int64_t scale_stride, scale_rows; /* bytes from one row of scales to the next, and how many rows there are */
    const char *zeros;
    int64_t zero_stride;
    const float *global_scale;
    int64_t rounds_rows; /* whether rows of x are rounded to int8, see int8.h */
};

static const float E2M1_VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* fp8 to fp32, exactly: the subtraction finds the exponent of subnormal codes. */
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

/* Blocks of plain numbers, multiplied like a plain matrix. */
static inline int is_plain(const Quantized *format) { return format->codes == CODE_F16_BLOCK || format->codes == CODE_F32_BLOCK; }

static inline int64_t code_row_bytes(const Quantized *format, int64_t k) {
    if (is_in_blocks(format)) return k / TRAITS(format->codes).codes * TRAITS(format->codes).bytes;
    return format->codes == CODE_E2M1 || format->codes == CODE_UINT4 ? (k + 1) / 2 : k;
}

/* Groups whose scales lie outside the codes. */
static inline int64_t groups_of_row(const Quantized *format, int64_t k) {
    if (is_in_blocks(format)) return 0;
    return format->group_cols ? parts_of(k, format->group_cols) : 1;
}

static const int SCALE_BYTES[] = {1, 1, 2, 2, 4};

/* most groups are of one row: no division */
static inline int64_t group_of(int64_t index, int64_t group) { return group == 1 ? index : group ? index / group : 0; }
