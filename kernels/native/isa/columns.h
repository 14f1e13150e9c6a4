/* Products of a transposed matrix: w[k] holds weight k of every output, so one value of x multiplies whole lines of memory.
 * COLUMN_DEPTH lines of K_STEP columns are reordered at a time, for all rows of x; sums of a block of columns wait in the
 * cache for the next lines. */
#pragma once

#include "isa/tiles.h"

/* Lines at a time, and the number of rows from which that beats half as many, whose sums wait in less of the cache. Even
 * numbers keep pairs of bf16 together. */
enum { COLUMN_DEPTH = 128, ROWS_FOR_DEPTH = 32 };

/* Two vectors of weights for every step: of two lines as pairs of bf16, of one line otherwise. */
typedef struct {
    char vectors[COLUMN_DEPTH][2 * LANES * 4];
} Lines;

INLINE int lines_of_step(int kind) { return kind == KIND_BF16_DOT ? 2 : 1; }

INLINE void order_step(int kind, const char *first, const char *second, char *out) {
#if HAS_BF16_DOT
    if (kind == KIND_BF16_DOT) {
        vec_pair_rows(first, second, out, out + LANES * 4);
        return;
    }
#endif
    (void)second;
    vec_store_f32((float *)out, load_weight(kind, 0, first));
    vec_store_f32((float *)out + LANES, load_weight(kind, 1, first));
}

INLINE Vec add_product(int kind, Vec sum, const char *weights, const char *x) {
#if HAS_BF16_DOT
    if (kind == KIND_BF16_DOT) return dot_bf16(sum, vec_load_bf16_pairs(weights), vec_bf16_pair(x));
#endif
    (void)kind;
    return vec_fma(sum, vec_load_f32((const float *)weights), vec_all(load_f32(x)));
}

/* sums[m] += x[m] times these lines, for `rows` rows. The sums of all rows lie side by side: a power of two apart they would
 * share few sets of the cache. */
INLINE void add_lines(int kind, int rows, const Lines *lines, int64_t steps, const char *x, int64_t row, int64_t step,
                      float *sums) {
    Vec acc[PANEL_ROWS][2];
    UNROLL for (int i = 0; i < 2 * rows; i++) acc[i / 2][i % 2] = vec_load_f32(sums + i * LANES);
    for (int64_t s = 0; s < steps; s++, x += step)
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int half = 0; half < 2; half++)
                acc[m][half] = add_product(kind, acc[m][half], lines->vectors[s] + half * LANES * 4, x + m * row);
    UNROLL for (int i = 0; i < 2 * rows; i++) vec_store_f32(sums + i * LANES, acc[i / 2][i % 2]);
}

INLINE void add_lines_to_rows(int kind, const Lines *lines, int64_t steps, Rows x, int64_t num_rows, float *sums) {
    for (int64_t m = 0; m < num_rows; m += PANEL_ROWS, x.data += x.panel, sums += PANEL_ROWS * K_STEP) {
#define ADD_CASE(kind, rows) \
    case rows: add_lines(kind, rows, lines, steps, x.data, x.row, x.step, sums); break;
        switch (num_rows - m) {
            FOR_PANEL_ROWS(ADD_CASE, kind)
            default: add_lines(kind, PANEL_ROWS, lines, steps, x.data, x.row, x.step, sums);
        }
    }
}

/* The sums of row m in order. add_lines leaves pairs of bf16 interleaved within 16 bytes, and other bf16 by even and odd
 * columns. */
INLINE void put_columns_in_order(int kind, const float *sums, int64_t num_rows, int64_t m, int64_t num_columns, float *out) {
    const int part = kind == KIND_BF16_DOT ? 4 : kind == KIND_BF16 ? 1 : LANES;
    for (int64_t column = 0; column < num_columns; column += K_STEP) {
        const float *found = sums + column * num_rows + m * K_STEP;
        UNROLL for (int i = 0; i < LANES; i += part)
            UNROLL for (int half = 0; half < 2; half++)
                memcpy(out + column + 2 * i + half * part, found + half * LANES + i, part * sizeof *out);
    }
}

/* Lines of K_STEP columns, or of the last few, which are copied: nothing after them may be read. A line after the last is
 * zeros, in x as well. Fetches the next lines. */
INLINE void order_lines(int kind, const char *w, int64_t stride, int64_t num_lines, int64_t depth, int64_t bytes,
                        Lines *lines) {
    const int width = kind == KIND_F32 ? 4 : 2, together = lines_of_step(kind);
    const int is_whole = bytes >= K_STEP * width;
    for (int64_t d = 0; d < num_lines; d += together) {
        char padded[2][K_STEP * 4];
        const char *found[2];
        UNROLL for (int i = 0; i < together; i++) {
            found[i] = w + (d + i) * stride;
            if (is_whole && d + i < num_lines) {
                UNROLL for (int b = 0; b < K_STEP * width; b += CACHE_LINE)
                    __builtin_prefetch(found[i] + depth * stride + b, 0, 2);
            } else {
                memset(padded[i], 0, sizeof padded[i]);
                if (d + i < num_lines) memcpy(padded[i], found[i], (size_t)(is_whole ? K_STEP * width : bytes));
                found[i] = padded[i];
            }
        }
        order_step(kind, found[0], found[together - 1], lines->vectors[d / together]);
    }
}

/* A step of narrow vectors takes less than a cache line of each line, so with few rows of x every step would wait for a line
 * of another page. Here it goes along LINES_IN_PLACE lines instead; sums stay in the first-level cache and run over k as
 * elsewhere. */
enum { FEW_ROWS = LANES < 16 ? 4 : 0, LINES_IN_PLACE = 8 };

INLINE void add_lines_in_place(int kind, int rows, int num_lines, const char *w, int64_t stride, int64_t ahead,
                               int64_t num_columns, const char *x, int64_t row, int64_t step, float *sums) {
    const int width = kind == KIND_F32 ? 4 : 2;
    for (int64_t column = 0; column < num_columns; column += K_STEP, w += K_STEP * width, sums += rows * K_STEP) {
        Vec acc[PANEL_ROWS][2];
        UNROLL for (int i = 0; i < 2 * rows; i++) acc[i / 2][i % 2] = vec_load_f32(sums + i * LANES);
        UNROLL for (int d = 0; d < num_lines; d++) {
            __builtin_prefetch(w + d * stride + ahead, 0, 2);
            UNROLL for (int half = 0; half < 2; half++) {
                const Vec weights = load_weight(kind, half, w + d * stride);
                UNROLL for (int m = 0; m < rows; m++)
                    acc[m][half] = vec_fma(acc[m][half], weights, vec_all(load_f32(x + m * row + d * step)));
            }
        }
        UNROLL for (int i = 0; i < 2 * rows; i++) vec_store_f32(sums + i * LANES, acc[i / 2][i % 2]);
    }
}

INLINE void lines_of_few_rows(int kind, int rows, Matrix weight, int64_t k, int64_t num_columns, Rows x, float *sums) {
    const int64_t ahead = LINES_IN_PLACE * weight.stride;
    const char *w = weight.data;
    int64_t d = 0;
    for (; d + LINES_IN_PLACE <= k; d += LINES_IN_PLACE, w += ahead)
        add_lines_in_place(kind, rows, LINES_IN_PLACE, w, weight.stride, ahead, num_columns, x.data + d * x.step, x.row, x.step, sums);
    for (; d < k; d++, w += weight.stride)
        add_lines_in_place(kind, rows, 1, w, weight.stride, weight.stride, num_columns, x.data + d * x.step, x.row, x.step, sums);
}

/* The columns in whole steps, for few rows; returns how many it did, or 0 where the other way is faster. */
INLINE int64_t columns_of_few_rows(int kind, Matrix weight, int64_t k, int64_t num_columns, Rows x, int64_t num_rows,
                                   float *sums) {
    const int64_t whole = num_columns / K_STEP * K_STEP;
    if (lines_of_step(kind) > 1 || num_rows > FEW_ROWS) return 0;
    switch (num_rows) {
        case 1: lines_of_few_rows(kind, 1, weight, k, whole, x, sums); break;
        case 2: lines_of_few_rows(kind, 2, weight, k, whole, x, sums); break;
        case 3: lines_of_few_rows(kind, 3, weight, k, whole, x, sums); break;
        default: lines_of_few_rows(kind, 4, weight, k, whole, x, sums);
    }
    return whole;
}

INLINE void columns(int kind, Matrix weight, int64_t k, int64_t num_columns, Rows x, int64_t num_rows, float *sums, float *out,
                    int64_t ldo) {
    const int width = kind == KIND_F32 ? 4 : 2, together = lines_of_step(kind);
    const int64_t depth = num_rows < ROWS_FOR_DEPTH ? COLUMN_DEPTH / 2 : COLUMN_DEPTH;
    Lines lines __attribute__((aligned(64)));
    memset(sums, 0, (size_t)(ldo * num_rows) * sizeof *sums);
    const int64_t done = columns_of_few_rows(kind, weight, k, num_columns, x, num_rows, sums);
    for (int64_t first = 0; first < k && done < num_columns; first += depth, x.data += depth / together * x.step) {
        const int64_t num_lines = k - first < depth ? k - first : depth;
        const char *w = weight.data + first * weight.stride;
        for (int64_t column = done; column < num_columns; column += K_STEP) {
            order_lines(kind, w + column * width, weight.stride, num_lines, depth, (num_columns - column) * width,
                        &lines);
            add_lines_to_rows(kind, &lines, (num_lines + together - 1) / together, x, num_rows, sums + column * num_rows);
        }
    }
    for (int64_t m = 0; m < num_rows; m++) put_columns_in_order(kind, sums, num_rows, m, num_columns, out + m * ldo);
}

static void multiply_columns(int kind, Matrix weight, int64_t k, int64_t num_columns, Rows x, int64_t num_rows, float *sums,
                             float *out, int64_t ldo) {
#define COLUMNS_CASE(kind) \
    case kind: columns(kind, weight, k, num_columns, x, num_rows, sums, out, ldo); break;
    switch (kind) { FOR_KINDS(COLUMNS_CASE) }
}
