/* Products of integer codes with rows of x that are rounded to int8; a part of quantized_template.h.
 *
 * Only where the caller asks for it: everything else rounds neither weights nor x. INT8_GROUP columns of a row of x share a
 * scale, the largest magnitude among them over 127, as in ggml's q8_0. Products of a group are summed as integers, which is
 * exact, and multiplied by both scales in fp32; groups at even places add up to one sum and those at odd places to another.
 * So what a row of x gives does not depend on how many others there are. Codes of 4 bits become twice their value for e2m1,
 * which half a scale mends.
 *
 * A packed block has 128 codes of x, then four scales, then for each group two 16-bit sums: of the codes in the first and in
 * the second halves of all its fours. Codes of KIND_QUANT_INT4 lie 64 at a time, those of even columns first, as the nibbles
 * of bytes come apart.
 */
enum { INT8_STEP = 64, INT8_SCALES_AT = QUANT_BLOCK, INT8_SUMS_AT = QUANT_BLOCK + 4 * QUANT_BLOCK / INT8_GROUP };

/* Weight rows that are multiplied together. */
enum { INT8_ROWS = 16 };

#define LARGEST_F32 0x1.fffffep127f

/* What the values of a group are multiplied by, and what their codes are then. Less than 2^-100 is nothing: its reciprocal
 * could be infinite. */
INLINE float int8_inverse(int is_finite, float largest) { return is_finite && largest >= 0x1p-100f ? 127.0f / largest : 0.0f; }
INLINE float int8_scale(int is_finite, float largest) { return !is_finite ? NAN : largest >= 0x1p-100f ? largest / 127.0f : 0.0f; }

/* What codes stand for: 4 bits by a table, 8 bits with the highest bit turned where they are unsigned. Of 4 bits the table
 * is of unsigned numbers, from which `zero` is subtracted unless each group has a zero point of its own. */
typedef struct {
    uint8_t table[16];
    uint8_t flip;
    int zero, has_zeros;
    float factor;
} Int8Codes;

static Int8Codes int8_codes(const Quantized *format) {
    Int8Codes codes = {.flip = format->codes == CODE_UINT8 ? 0x80 : 0, .factor = format->codes == CODE_E2M1 ? 0.5f : 1.0f};
    codes.has_zeros = format->zeros != NULL;
    codes.zero = format->codes == CODE_E2M1 ? 12 : (int)format->zero;
    for (int i = 0; i < 16; i++)
        codes.table[i] = (uint8_t)(format->codes == CODE_E2M1 ? (int)(2.0f * E2M1_VALUES[i]) + 12 : i);
    return codes;
}

/* Some weight rows: their codes, and scales and zero points of every INT8_GROUP columns, `groups` apart. */
typedef struct {
    const char *codes[INT8_ROWS], *ahead[INT8_ROWS];
    const float *scales;
    const int32_t *zeros;
    int64_t groups;
} Int8Rows;

/* The codes of a block, whole also at the end of a row, behind which nothing may be read. */
INLINE const char *int8_block_codes(int kind, const char *row, int64_t element, int64_t k, char padded[QUANT_BLOCK]) {
    const int block_bytes = kind == KIND_QUANT_INT4 ? QUANT_BLOCK / 2 : QUANT_BLOCK;
    const char *codes = row + element / QUANT_BLOCK * block_bytes;
    if (element + QUANT_BLOCK <= k) return codes;
    memset(padded, 0, QUANT_BLOCK);
    memcpy(padded, codes, (size_t)((k - element) * block_bytes + QUANT_BLOCK - 1) / QUANT_BLOCK);
    return padded;
}

/* Where the group at a place within a block lies: its even columns, or its first half, and how far from there the others. */
INLINE int int8_group_at(int kind, int group) { return kind == KIND_QUANT_INT8 ? group * INT8_GROUP : group / 2 * INT8_STEP + group % 2 * 16; }
INLINE int int8_halves_apart(int kind) { return kind == KIND_QUANT_INT8 ? 16 : 32; }

#if HAS_QUANT_LANES
#include "formats/int8_lanes.h"
#else
/* 32 values as int8, and the sums of what they become. */
INLINE void store_int8_group(int kind, const float values[INT8_GROUP], char *block, int group) {
    float largest = 0;
    int16_t sums[2] = {0};
    int is_finite = 1;
    for (int i = 0; i < INT8_GROUP; i++) {
        const float magnitude = fabsf(values[i]);
        is_finite &= magnitude <= LARGEST_F32;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float inverse = int8_inverse(is_finite, largest), scale = int8_scale(is_finite, largest);
    memcpy(block + INT8_SCALES_AT + 4 * group, &scale, 4);
    for (int i = 0; i < INT8_GROUP; i++) {
        const int8_t code = is_finite ? (int8_t)lrintf(values[i] * inverse) : 0;
        const int half = kind == KIND_QUANT_INT8 ? i / 16 : i % 2, within = kind == KIND_QUANT_INT8 ? i % 16 : i / 2;
        ((int8_t *)block)[int8_group_at(kind, group) + half * int8_halves_apart(kind) + within] = code;
        sums[within % 4 / 2] = (int16_t)(sums[within % 4 / 2] + code);
    }
    memcpy(block + INT8_SUMS_AT + 4 * group, sums, sizeof sums);
}

/* Weight rows by those of a panel, one after another. */
static void int8_rows(int kind, const Int8Codes *how, const Int8Rows *rows, int num_weight_rows, int64_t k, const char *packed,
                      int64_t num_rows, float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    for (int n = 0; n < num_weight_rows; n++) {
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = panel_start(p, panels, num_rows), panel_rows = panel_start(p + 1, panels, num_rows) - first;
            float acc[PANEL_ROWS][2] = {0};
            char padded[QUANT_BLOCK];
            for (int64_t element = 0; element < k; element += QUANT_BLOCK) {
                const uint8_t *codes = (const uint8_t *)int8_block_codes(kind, rows->codes[n], element, k, padded);
                const char *blocks = packed + first * row_bytes + element / QUANT_BLOCK * panel_rows * INT8_BLOCK_BYTES;
                int weights[QUANT_BLOCK]; /* as x lies */
                for (int i = 0; i < QUANT_BLOCK; i++) {
                    const int nibbles = codes[i / INT8_STEP * 32 + i % 32];
                    const int group = i / INT8_STEP * 2 + i % 32 / 16;
                    const int zero = how->has_zeros ? rows->zeros[n * rows->groups + element / INT8_GROUP + group] : how->zero;
                    weights[i] = kind == KIND_QUANT_INT8 ? (int8_t)(codes[i] ^ how->flip)
                                                         : how->table[i % INT8_STEP < 32 ? nibbles & 15 : nibbles >> 4] - zero;
                }
                for (int64_t m = 0; m < panel_rows; m++) {
                    const int8_t *x = (const int8_t *)blocks + m * INT8_BLOCK_BYTES;
                    for (int group = 0; group < QUANT_BLOCK / INT8_GROUP; group++) {
                        const int first_of = int8_group_at(kind, group), apart = int8_halves_apart(kind);
                        float scale;
                        int32_t sum = 0;
                        memcpy(&scale, x + INT8_SCALES_AT + 4 * group, 4);
                        for (int i = 0; i < INT8_GROUP; i++) {
                            const int at = first_of + i / 16 * apart + i % 16;
                            sum += weights[at] * x[at];
                        }
                        acc[m][group % 2] += (float)sum * (rows->scales[n * rows->groups + element / INT8_GROUP + group] * scale);
                    }
                }
            }
            for (int64_t m = 0; m < panel_rows; m++) out[(first + m) * ldo + n] = (acc[m][0] + acc[m][1]) * how->factor;
        }
    }
}
#endif

/* A group of a row, of which `filled` values are there; whole ones in a loop of vectors. */
INLINE void load_group(const char *src, int dtype, int64_t first, int64_t filled, float values[INT8_GROUP]) {
    if (filled >= INT8_GROUP) {
        for (int i = 0; i < INT8_GROUP; i++) values[i] = load_as(dtype, src, first + i);
        return;
    }
    for (int i = 0; i < INT8_GROUP; i++) values[i] = i < filled ? load_as(dtype, src, first + i) : 0.0f;
}

static void pack_int8(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows,
                      int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + QUANT_BLOCK - 1) / QUANT_BLOCK * QUANT_BLOCK : last_k;
    for (int64_t at = first_k; at < end; at += INT8_GROUP) {
        float values[INT8_GROUP];
        char *block = panel + (at / QUANT_BLOCK * panel_rows + row) * INT8_BLOCK_BYTES;
        const int group = (int)(at % QUANT_BLOCK / INT8_GROUP);
        load_group(src, dtype, at - first_k, last_k - at, values);
        if (kind == KIND_QUANT_INT4)
            store_int8_group(KIND_QUANT_INT4, values, block, group);
        else
            store_int8_group(KIND_QUANT_INT8, values, block, group);
    }
}

/* Numbers of 32 bits, each `times` times, up to so many. */
static void spread_groups(const void *groups, int64_t count, int64_t times, void *out) {
    const char *src = groups;
    char *to = out;
    if (times == 1) {
        memcpy(to, src, (size_t)count * 4);
        return;
    }
    for (; count > 0; count -= times, src += 4, to += 4 * times)
        for (int64_t i = 0; i < times && i < count; i++) memcpy(to + 4 * i, src, 4);
}

static void multiply_int8(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                          float *out, int64_t ldo, Matrix next) {
    const Stream stream = {.weight = weight, .next = next, .num_rows = num_weight_rows};
    const Int8Codes how = int8_codes(weight.quantized);
    const int64_t padded_groups = (k + QUANT_BLOCK - 1) / QUANT_BLOCK * (QUANT_BLOCK / INT8_GROUP);
    const int64_t num_groups = (k + INT8_GROUP - 1) / INT8_GROUP;
    /* a scale serves some INT8_GROUP columns, or all */
    const int64_t times = weight.quantized->group_cols ? weight.quantized->group_cols / INT8_GROUP : num_groups + 1;
    float scales[INT8_ROWS * padded_groups];
    int32_t zeros[how.has_zeros ? INT8_ROWS * padded_groups : 1];
    ROW_GROUPS(groups, weight, k);
    memset(scales, 0, sizeof scales);
    memset(zeros, 0, sizeof zeros);
    Int8Rows rows = {.scales = scales, .zeros = zeros, .groups = padded_groups};
    for (int64_t first = 0; first < num_weight_rows; first += INT8_ROWS) {
        const int count = num_weight_rows - first < INT8_ROWS ? (int)(num_weight_rows - first) : INT8_ROWS;
        for (int n = 0; n < INT8_ROWS; n++) {
            const int64_t row = first + (n < count ? n : count - 1);
            const char *ahead = stream_row(&stream, row + INT8_ROWS);
            rows.codes[n] = weight.data + row * weight.stride;
            rows.ahead[n] = ahead ? ahead : rows.codes[n];
            read_groups(&groups, weight.first_row + row);
            spread_groups(groups.scales, num_groups, times, scales + n * padded_groups);
            if (how.has_zeros) spread_groups(groups.zeros, num_groups, times, zeros + n * padded_groups);
        }
        int8_rows(kind, &how, &rows, count, k, packed, num_rows, out + first, ldo);
    }
}

static int product_kind(const Quantized *format, int x_dtype) {
    if (is_plain(format)) return format->codes == CODE_F16_BLOCK ? KIND_F16 : KIND_F32;
    if (!format->rounds_rows) return quantized_kind(format, x_dtype);
    if (is_in_blocks(format)) return KIND_INT8_BLOCKS;
    return format->codes == CODE_E2M1 || format->codes == CODE_UINT4 ? KIND_QUANT_INT4 : KIND_QUANT_INT8;
}
