/* Products with rows rounded to int8, blocks of Q8_0, for attention to cached keys and values: each row is decoded once for
 * a few rows of x. A code times its scale is exact in fp32, so values are not rounded, and a row of x has the same bits
 * whatever the others are, if they are as many. For a single row, or one left over, codes are multiplied as they are, then
 * by the scale of the block: other bits, but always the same, as a group always has the same number of heads. */
#pragma once

#include "formats/blocks.h"

/* Rows of x at once, whose sums fit in registers; tokens that stay in the first-level cache for all groups of columns; and
 * how far ahead rows are fetched. */
enum { ROUNDED_X_ROWS = LANES == 16 ? 8 : 4, ROUNDED_TOKENS = 64, ROUNDED_AHEAD = 2048 };

INLINE void fetch_rounded(const char *row, int64_t k) {
    for (int64_t b = 0; b < k / ROUNDED_VALUES * ROUNDED_BYTES; b += CACHE_LINE) __builtin_prefetch(row + ROUNDED_AHEAD + b, 0, 3);
}

INLINE Vec rounded_codes(const char *block, int i) { return vec_load_i8(block + 2 + i * LANES); }
INLINE float scale_of(const char *block) { return half_at((const uint8_t *)block); }

INLINE Vec rounded_values(const char *block, int i) { return vec_mul(rounded_codes(block, i), vec_all(scale_of(block))); }

/* `tokens` weight rows, shared by `rows` rows of x. */
INLINE void dot_rounded_tile(int rows, int tokens, Matrix w, int64_t k, const float *x, float *out, int64_t ldo) {
    Vec acc[ROUNDED_X_ROWS * 4];
    UNROLL for (int i = 0; i < rows * tokens; i++) acc[i] = vec_zero();
    UNROLL for (int n = 0; n < tokens; n++) fetch_rounded(w.data + n * w.stride, k);
    for (int64_t first = 0; first < k; first += ROUNDED_VALUES, w.data += ROUNDED_BYTES) {
        if (rows == 1) {
            Vec sums[4];
            UNROLL for (int n = 0; n < tokens; n++) sums[n] = vec_mul(rounded_codes(w.data + n * w.stride, 0), vec_load_f32(x + first));
            UNROLL for (int i = 1; i < ROUNDED_VALUES / LANES; i++)
                UNROLL for (int n = 0; n < tokens; n++)
                    sums[n] = vec_fma(sums[n], rounded_codes(w.data + n * w.stride, i), vec_load_f32(x + first + i * LANES));
            UNROLL for (int n = 0; n < tokens; n++) acc[n] = vec_fma(acc[n], sums[n], vec_all(scale_of(w.data + n * w.stride)));
            continue;
        }
        UNROLL for (int i = 0; i < ROUNDED_VALUES / LANES; i++) {
            Vec values[4];
            UNROLL for (int n = 0; n < tokens; n++) values[n] = rounded_values(w.data + n * w.stride, i);
            UNROLL for (int m = 0; m < rows; m++) {
                const Vec of_x = vec_load_f32(x + m * k + first + i * LANES);
                UNROLL for (int n = 0; n < tokens; n++) acc[m * tokens + n] = vec_fma(acc[m * tokens + n], values[n], of_x);
            }
        }
    }
    for (int i = rows * tokens; i % 4; i++) acc[i] = vec_zero();
    UNROLL for (int i = 0; i < rows * tokens; i += 4) {
        float sums[4];
        vec_four_sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sums);
        UNROLL for (int j = i; j < i + 4; j++)
            if (j < rows * tokens) out[j / tokens * ldo + j % tokens] = sums[j - i];
    }
}

INLINE void dot_rounded_rows(int rows, Matrix w, int64_t num_weight_rows, int64_t k, const float *x, float *out, int64_t ldo) {
    const int tokens = 2 * rows > ROUNDED_X_ROWS ? 2 : 4;
    int64_t n = 0;
    for (; n + tokens <= num_weight_rows; n += tokens, w.data += tokens * w.stride) dot_rounded_tile(rows, tokens, w, k, x, out + n, ldo);
    for (; n < num_weight_rows; n++, w.data += w.stride) dot_rounded_tile(rows, 1, w, k, x, out + n, ldo);
}

INLINE void mix_rounded_rows(int rows, Matrix w, int64_t num_weight_rows, int64_t num_columns, const float *x, int64_t ldx, float *out) {
    for (int64_t begin = 0; begin < num_weight_rows; begin += ROUNDED_TOKENS, w.data += ROUNDED_TOKENS * w.stride) {
        const int64_t count = min64(ROUNDED_TOKENS, num_weight_rows - begin);
        for (int64_t first = 0; first < num_columns; first += ROUNDED_VALUES) {
            const char *block = w.data + first / ROUNDED_VALUES * ROUNDED_BYTES;
            float *sums = out + first;
            Vec acc[ROUNDED_X_ROWS][ROUNDED_VALUES / LANES];
            UNROLL for (int m = 0; m < rows; m++)
                UNROLL for (int i = 0; i < ROUNDED_VALUES / LANES; i++)
                    acc[m][i] = begin ? vec_load_f32(sums + m * num_columns + i * LANES) : vec_zero();
            for (int64_t n = 0; n < count; n++, block += w.stride) {
                if (!first) fetch_rounded(block, num_columns);
                if (rows == 1) {
                    const Vec weight = vec_all(x[begin + n] * scale_of(block));
                    UNROLL for (int i = 0; i < ROUNDED_VALUES / LANES; i++)
                        acc[0][i] = vec_fma(acc[0][i], rounded_codes(block, i), weight);
                    continue;
                }
                UNROLL for (int i = 0; i < ROUNDED_VALUES / LANES; i++) {
                    const Vec values = rounded_values(block, i);
                    UNROLL for (int m = 0; m < rows; m++)
                        acc[m][i] = vec_fma(acc[m][i], values, vec_all(x[m * ldx + begin + n]));
                }
            }
            UNROLL for (int m = 0; m < rows; m++)
                UNROLL for (int i = 0; i < ROUNDED_VALUES / LANES; i++) vec_store_f32(sums + m * num_columns + i * LANES, acc[m][i]);
        }
    }
}

#define FOR_ROUNDED_X_ROWS(num_rows, call)      \
    switch (num_rows) {                         \
        case 1: call(1); break;                 \
        case 2: call(2); break;                 \
        case 3: call(3); break;                 \
        case 4: call(4); break;                 \
        case 5: call(5); break;                 \
        case 6: call(6); break;                 \
        case 7: call(7); break;                 \
        default: call(ROUNDED_X_ROWS);          \
    }

static void dot_rounded(Matrix weight, int64_t num_weight_rows, int64_t k, const float *x, int64_t num_rows, float *out) {
#define AT_ONCE(rows) ((rows) < ROUNDED_X_ROWS ? (rows) : ROUNDED_X_ROWS)
#define DOT_ROUNDED(rows) dot_rounded_rows(AT_ONCE(rows), weight, num_weight_rows, k, x, out, num_weight_rows)
    for (; num_rows > 0; num_rows -= ROUNDED_X_ROWS, x += ROUNDED_X_ROWS * k, out += ROUNDED_X_ROWS * num_weight_rows)
        FOR_ROUNDED_X_ROWS(num_rows, DOT_ROUNDED)
}

static void mix_rounded(Matrix weight, int64_t num_weight_rows, int64_t num_columns, const float *x, int64_t num_rows, float *out) {
#define MIX_ROUNDED(rows) mix_rounded_rows(AT_ONCE(rows), weight, num_weight_rows, num_columns, x, num_weight_rows, out)
    for (; num_rows > 0; num_rows -= ROUNDED_X_ROWS, x += ROUNDED_X_ROWS * num_weight_rows, out += ROUNDED_X_ROWS * num_columns)
        FOR_ROUNDED_X_ROWS(num_rows, MIX_ROUNDED)
}
