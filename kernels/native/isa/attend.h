/* Attention of a block of queries to one block of keys after another; their scores stay in the cache (FlashAttention-2).
 *
 * A step is four bytes of a row of queries or weights: a pair of bf16, or one fp32. Keys are transposed, and values of two
 * tokens brought together, so that one value of a row multiplies whole vectors. All rows take a slice of them, which stays
 * in the first-level cache, before the next slice. A row's sums run over the keys in order, in blocks that begin at
 * multiples of KEYS_AT_ONCE: they depend neither on the other rows nor on where the block of queries begins. */
#pragma once

#include <float.h>

#include "isa/columns.h"

enum { ATTEND_VECS = LANES == 16 ? 4 : 2, ATTEND_COLUMNS = ATTEND_VECS * LANES, SLICE_BYTES = 16 << 10 };
#define LN_2 0.693147180559945309f

/* sums = sums * factors + x . w, or x . w without factors; one step of x after another. */
INLINE void attend_tile(int pairs, int rows, int vecs, int64_t steps, const char *x, int64_t x_row, const char *w, int64_t w_step,
                        const float *factors, float *sums, int64_t ld) {
    const int kind = pairs ? KIND_BF16_DOT : KIND_F32;
    Vec acc[PANEL_ROWS][ATTEND_VECS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++)
            acc[m][n] = factors ? vec_mul(vec_load_f32(sums + m * ld + n * LANES), vec_all(factors[m])) : vec_zero();
    for (int64_t s = 0; s < steps; s++, x += 4, w += w_step)
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int n = 0; n < vecs; n++) acc[m][n] = add_product(kind, acc[m][n], w + n * LANES * 4, x + m * x_row);
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++) vec_store_f32(sums + m * ld + n * LANES, acc[m][n]);
}

/* The same where K_STEP divides the number of columns. */
INLINE void attend_rows(int pairs, int rows, int64_t columns, int64_t steps, const char *x, int64_t x_row, const char *w,
                        int64_t w_step, const float *factors, float *sums, int64_t ld) {
    int64_t c = 0;
    for (; c + ATTEND_COLUMNS <= columns; c += ATTEND_COLUMNS)
        attend_tile(pairs, rows, ATTEND_VECS, steps, x, x_row, w + 4 * c, w_step, factors, sums + c, ld);
    for (; c < columns; c += K_STEP) attend_tile(pairs, rows, 2, steps, x, x_row, w + 4 * c, w_step, factors, sums + c, ld);
}

INLINE void attend_panel(int pairs, int64_t rows, int64_t columns, int64_t steps, const char *x, int64_t x_row, const char *w,
                         int64_t w_step, const float *factors, float *sums, int64_t ld) {
#define ATTEND_CASE(pairs, rows) \
    case rows: attend_rows(pairs, rows, columns, steps, x, x_row, w, w_step, factors, sums, ld); break;
    switch (rows) { FOR_PANEL_ROWS(ATTEND_CASE, pairs) }
}

/* A row as steps; an odd number of bf16 ends with a zero. */
INLINE void attend_words(int pairs, int dtype, const char *row, int64_t count, uint32_t *out) {
    if (!pairs) {
        for (int64_t i = 0; i < count; i++) out[i] = bits_of(load_as(dtype, row, i));
        return;
    }
    out[count / 2] = 0; /* overwritten if the number is even */
    memcpy(out, row, (size_t)(2 * count));
}

/* Keys as [steps][KEYS_AT_ONCE], zeros after the last one. */
INLINE void attend_keys(int pairs, int dtype, const char *key, int64_t stride, int64_t count, int64_t dim, uint32_t *out) {
    const int64_t steps = pairs ? (dim + 1) / 2 : dim, row = round_up(steps, LANES) + 1;
    float words[LANES * row];
    for (int64_t first = 0; first < KEYS_AT_ONCE; first += LANES) {
        for (int i = 0; i < LANES; i++) {
            if (first + i < count)
                attend_words(pairs, dtype, key + (first + i) * stride, dim, (uint32_t *)words + i * row);
            else
                memset(words + i * row, 0, (size_t)(4 * steps));
        }
        for (int64_t s = 0; s < steps; s += LANES) {
            Vec square[LANES];
            UNROLL for (int i = 0; i < LANES; i++) square[i] = vec_load_f32(words + i * row + s);
            vec_transpose(square);
            const int64_t rest = min64(LANES, steps - s);
            for (int i = 0; i < rest; i++) vec_store_f32((float *)out + (s + i) * KEYS_AT_ONCE + first, square[i]);
        }
    }
}

/* Values as [KEYS_AT_ONCE or half as many][columns], zeros after the last token and column. */
INLINE void attend_values(int pairs, int dtype, const char *value, int64_t stride, int64_t count, int64_t dim, int64_t columns,
                          uint32_t *out) {
    const int together = pairs ? 2 : 1;
    for (int64_t first = 0; first < KEYS_AT_ONCE; first += together, value += together * stride, out += columns) {
        memset(out, 0, (size_t)(4 * columns));
        if (first >= count) continue;
        if (!pairs)
            for (int64_t c = 0; c < dim; c++) out[c] = bits_of(load_as(dtype, value, c));
        else if (first + 1 < count)
            for (int64_t c = 0; c < dim; c++) out[c] = load_u16(value + 2 * c) | (uint32_t)load_u16(value + stride + 2 * c) << 16;
        else
            for (int64_t c = 0; c < dim; c++) out[c] = load_u16(value + 2 * c);
    }
}

/* Turns scores [first, end) into weights in place; the others of [low, high), whole vectors, become 0. Returns the factor
 * for the sums so far. The scale is positive; the greatest score is kept as an exponent of two. */
INLINE float attend_weights(int pairs, float *scores, int64_t low, int64_t first, int64_t end, int64_t high, float scale, float *most,
                            float *sum) {
    for (int64_t k = low; k < first; k++) scores[k] = -FLT_MAX;
    for (int64_t k = end; k < high; k++) scores[k] = -FLT_MAX;
    Vec tops = vec_load_f32(scores + low), totals = vec_zero();
    for (int64_t k = low + LANES; k < high; k += LANES) tops = vec_max(vec_load_f32(scores + k), tops);
    const float top = vec_most(tops)[0] * scale, greatest = *most > top ? *most : top;
    for (int64_t k = low; k < high; k += LANES) {
        const Vec weight = vec_exp2(vec_fma(vec_all(-greatest), vec_load_f32(scores + k), vec_all(scale)));
        totals = vec_add(totals, weight);
#if HAS_BF16_DOT
        if (pairs) {
            vec_store_bf16((char *)scores + 2 * k, weight);
            continue;
        }
#endif
        vec_store_f32(scores + k, weight);
    }
    const int64_t width = pairs ? 2 : 4;
    memset((char *)scores + width * low, 0, (size_t)(width * (first - low)));
    memset((char *)scores + width * end, 0, (size_t)(width * (high - end)));
    const float factor = *sum > 0 ? exp_f32((*most - greatest) * LN_2) : 0;
    *most = greatest;
    *sum = *sum * factor + vec_total(totals)[0];
    return factor;
}

/* The rows of some queries of a head, and the keys of a block that they see, [low, high), in whole tiles up to `wide`. */
typedef struct {
    int64_t rows, r, place, low, high, wide;
} AttendPanel;

/* The next panel of KEYS_AT_ONCE keys or fewer, from `begin` on, of which it sees some; 0 where there is none. */
INLINE int attend_next(const AttentionBlock *block, int64_t begin, int64_t count, AttendPanel *panel) {
    for (int64_t r = panel->r + panel->rows; r < block->heads * block->queries; r += panel->rows) {
        const int64_t q = r % block->queries;
        panel->rows = min64(PANEL_ROWS, block->queries - q), panel->r = r, panel->place = block->place + q;
        panel->low = max64(0, panel->place - block->window + 1 - begin) / K_STEP * K_STEP;
        panel->high = min64(count, panel->place + panel->rows - begin);
        panel->wide = round_up(panel->high, K_STEP);
        if (panel->low < panel->high) return 1;
    }
    return 0;
}

/* Columns of a matrix with this many steps that stay in the first-level cache while all rows take them. */
INLINE int64_t attend_slice(int64_t steps) { return max64(1, SLICE_BYTES / 4 / steps / ATTEND_COLUMNS) * ATTEND_COLUMNS; }

INLINE void attend_block(int pairs, const AttentionBlock *block, char *scratch) {
    const AttentionScratch at = attention_scratch(block, pairs, &ISA_SYMBOL);
    const int64_t rows = block->heads * block->queries, together = pairs ? 2 : 1, columns = at.columns;
    char *queries = scratch + at.queries, *keys = scratch + at.keys, *values = scratch + at.values;
    float *sums = (float *)(scratch + at.sums), *most = (float *)(scratch + at.most), *total = most + rows, *factors = total + rows;
    float *scores = (float *)(scratch + at.scores);
    const float scale = block->scale / LN_2;
    memset(sums, 0, (size_t)(4 * rows * columns));
    for (int64_t h = 0, r = 0; h < block->heads; h++)
        for (int64_t q = 0; q < block->queries; q++, r++) {
            attend_words(pairs, block->dtype, block->query + h * block->query_head + q * block->query_row, block->key_dim,
                         (uint32_t *)(queries + r * at.query_row));
            most[r] = block->sinks ? load_as(block->sinks_dtype, block->sinks, h) / LN_2 : -FLT_MAX;
            total[r] = block->sinks ? 1 : 0;
        }
    const int64_t last = block->place + block->queries - 1; /* of the last query */
    const int64_t stop = min64(block->length, last + 1), key_slice = attend_slice(at.query_steps);
    const int64_t value_slice = attend_slice(KEYS_AT_ONCE / together);
    int64_t begin = max64(0, block->place - block->window + 1) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    for (; begin < stop; begin += KEYS_AT_ONCE) {
        const int64_t count = min64(KEYS_AT_ONCE, stop - begin);
        attend_keys(pairs, block->dtype, block->key + begin * block->key_row, block->key_row, count, block->key_dim, (uint32_t *)keys);
        attend_values(pairs, block->dtype, block->value + begin * block->value_row, block->value_row, count, block->value_dim, columns,
                      (uint32_t *)values);
        for (int64_t slice = 0; slice < count; slice += key_slice)
            for (AttendPanel p = {0}; attend_next(block, begin, count, &p);) {
                const int64_t from = max64(p.low, slice), to = min64(p.wide, slice + key_slice);
                if (from < to)
                    attend_panel(pairs, p.rows, to - from, at.query_steps, queries + p.r * at.query_row, at.query_row, keys + 4 * from,
                                 4 * KEYS_AT_ONCE, NULL, scores + p.r * KEYS_AT_ONCE + from, KEYS_AT_ONCE);
            }
        for (AttendPanel p = {0}; attend_next(block, begin, count, &p);)
            for (int64_t m = 0; m < p.rows; m++) {
                float *row = scores + (p.r + m) * KEYS_AT_ONCE;
                const int64_t first = max64(p.low, p.place + m - block->window + 1 - begin);
                const int64_t end = max64(first, min64(count, p.place + m + 1 - begin));
                factors[p.r + m] = 1;
                if (first < min64(end, p.wide))
                    factors[p.r + m] = attend_weights(pairs, row, p.low, first, end, p.wide, scale, most + p.r + m, total + p.r + m);
                else
                    memset((char *)row + 4 / together * p.low, 0, (size_t)(4 / together * (p.wide - p.low)));
            }
        for (int64_t slice = 0; slice < columns; slice += value_slice)
            for (AttendPanel p = {0}; attend_next(block, begin, count, &p);)
                attend_panel(pairs, p.rows, min64(value_slice, columns - slice), parts_of(p.high - p.low, together),
                             (char *)(scores + p.r * KEYS_AT_ONCE) + 4 / together * p.low, 4 * KEYS_AT_ONCE,
                             values + 4 * (p.low / together * columns + slice), 4 * columns, factors + p.r,
                             sums + p.r * columns + slice, columns);
    }
    for (int64_t h = 0, r = 0; h < block->heads; h++)
        for (int64_t q = 0; q < block->queries; q++, r++) {
            float *row = sums + r * columns;
            const float share = total[r] > 0 ? 1 / total[r] : 0;
            for (int64_t c = 0; c < block->value_dim; c++) row[c] *= share;
            store(block->out + h * block->out_head + q * block->out_row, block->dtype, row, block->value_dim);
        }
}

static void attend(const AttentionBlock *block, char *scratch) {
#if HAS_BF16_DOT
    if (block->dtype == DTYPE_BF16) {
        attend_block(1, block, scratch);
        return;
    }
#endif
    attend_block(0, block, scratch);
}
