/* Rows of x rounded to int8 with a scale for every 32 elements, and products of them; a part of quantized_template.h.
 *
 * For KIND_QUANT_INT8X4 and _INT8X8 a packed row has INT8_RECORD bytes for every QUANT_BLOCK elements: their codes in the
 * order in which weights are decoded, sums of them, and scales. The instruction multiplies unsigned weight codes by
 * signed ones of x, four at a time; what a zero point takes away is its product with the sum of the codes of x. Sums are
 * exact until they are multiplied by the scales of weight and x.
 */
#include <math.h>

enum { ROUNDED_GROUP = 32, INT8_RECORD = 2 * QUANT_BLOCK, INT8_SUMS = QUANT_BLOCK, INT8_SCALES = QUANT_BLOCK + 64 };

INLINE int rounds_x(int kind) {
    return kind == KIND_QUANT_ROUNDED || kind == KIND_QUANT_INT8X4 || kind == KIND_QUANT_INT8X8;
}

/* Codes of a group and its scale, the largest magnitude over 127; NaN for a group that is not finite. A group whose
 * numbers are so small that 127 over the largest is no number is zero. */
static float round_group(const float values[ROUNDED_GROUP], int8_t codes[ROUNDED_GROUP]) {
    uint32_t most = 0; /* bits of numbers above zero are in their order, and NaN is above all */
    for (int i = 0; i < ROUNDED_GROUP; i++) {
        const uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    const float largest = from_bits(most), inverse = 127.0f / largest;
    memset(codes, 0, ROUNDED_GROUP);
    if (most >= 0x7f800000u) return from_bits(0x7fc00000u);
    if (bits_of(inverse) >= 0x7f800000u) return 0.0f;
    for (int i = 0; i < ROUNDED_GROUP; i++) codes[i] = (int8_t)rintf(values[i] * inverse);
    return largest / 127.0f;
}

/* Of the sums of each four codes of a group: those of 4-bit weights lie by pairs of even and odd elements of eight, those
 * of 8-bit weights by pairs of the first and the second half of a block. */
static void write_int8_group(int kind, const int8_t codes[ROUNDED_GROUP], float scale, char *record, int64_t within) {
    int16_t *sums = (int16_t *)(record + INT8_SUMS);
    ((float *)(record + INT8_SCALES))[within / ROUNDED_GROUP] = scale;
    if (kind == KIND_QUANT_INT8X8) memcpy(record + within, codes, ROUNDED_GROUP);
    for (int four = 0; four < ROUNDED_GROUP / 4; four++) {
        const int is_odd = four % 2, place = (int)within / 8 + four / 2;
        int sum = 0;
        for (int i = 0; i < 4; i++) {
            const int8_t code = kind == KIND_QUANT_INT8X8 ? codes[4 * four + i] : codes[four / 2 * 8 + 2 * i + is_odd];
            if (kind == KIND_QUANT_INT8X4) record[64 * is_odd + 4 * place + i] = (char)code;
            sum += code;
        }
        if (kind == KIND_QUANT_INT8X4)
            sums[2 * place + is_odd] = (int16_t)sum;
        else
            sums[2 * ((int)within % 64 / 4 + four) + (int)within / 64] = (int16_t)sum;
    }
}

static void pack_rounded(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row,
                         int panel_rows, int64_t k) {
    const int64_t last_k = first_k + count;
    const int64_t end = last_k == k ? (k + QUANT_BLOCK - 1) / QUANT_BLOCK * QUANT_BLOCK : last_k;
    for (int64_t at = first_k; at < end; at += ROUNDED_GROUP) {
        float values[ROUNDED_GROUP] = {0};
        int8_t codes[ROUNDED_GROUP];
        const int64_t filled = last_k - at < ROUNDED_GROUP ? last_k - at : ROUNDED_GROUP;
        for (int64_t j = 0; j < filled; j++) values[j] = load_element(src, dtype, at - first_k + j);
        const float scale = round_group(values, codes);
        const int64_t block = at / QUANT_BLOCK * panel_rows + row, within = at % QUANT_BLOCK;
        if (kind != KIND_QUANT_ROUNDED) {
            write_int8_group(kind, codes, scale, panel + block * INT8_RECORD, within);
            continue;
        }
        float *out = (float *)panel + block * QUANT_BLOCK + within;
        for (int j = 0; j < ROUNDED_GROUP; j++) out[j] = (float)codes[j] * scale;
    }
}
