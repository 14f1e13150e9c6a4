/* Many small products with matrices where they lie: a few rows times each of a batch of matrices.
 *
 * Attention of one query to cached keys and values is two such batches with a softmax between them: a matrix of keys and one
 * of values for each head, each read once. The weighted sum of a token's expert outputs is another. One thread computes a
 * whole batch element: neither the number of threads nor the other elements change a bit. */
#include "kernels.h"

typedef struct {
    const char *w; /* [outer, inner, w_rows, w_cols] by strides in bytes, unit stride along w_cols */
    int64_t inner, num_rows, w_rows, w_cols;
    int64_t outer_stride, inner_stride, row_stride;
    int dtype;
} Batch;

/* out = sum over n of x[n] * w[n]: a loop over columns that every compiler vectorises. */
INLINE void mix_as(int dtype, const Batch *batch, const float *restrict x, const char *w, float *restrict out) {
    const int64_t rows = batch->w_rows, cols = batch->w_cols, stride = batch->row_stride;
    for (int64_t k = 0; k < cols; k++) out[k] = 0;
    int64_t n = 0;
    for (; n + 1 < rows; n += 2, w += 2 * stride)
        for (int64_t k = 0; k < cols; k++) {
            const float sum = out[k] + x[n] * load_as(dtype, w, k);
            out[k] = sum + x[n + 1] * load_as(dtype, w + stride, k);
        }
    if (n < rows)
        for (int64_t k = 0; k < cols; k++) out[k] += x[n] * load_as(dtype, w, k);
}

MOE_CLONES static void mix(const Batch *batch, const float *restrict x, const char *w, float *restrict out) {
#define MIX(type) mix_as(type, batch, x, w, out)
    BY_DTYPE(batch->dtype, MIX)
}

/* Turns scores into weights: exponentials that sum to one, with that of the sink, a score without a value, which may be
 * NULL. Maximum and sum run in a fixed number of parts: every instruction set adds in the same order. */
enum { PARTS = 64 };
MOE_CLONES void moe_softmax(float *restrict scores, int64_t count, const float *sink) {
    float parts[PARTS], most, sum = 0;
    const int64_t whole = count / PARTS * PARTS;
    for (int i = 0; i < PARTS; i++) parts[i] = scores[0];
    for (int64_t k = 0; k < whole; k += PARTS)
        for (int i = 0; i < PARTS; i++) parts[i] = scores[k + i] > parts[i] ? scores[k + i] : parts[i];
    most = parts[0];
    for (int i = 1; i < PARTS; i++) most = parts[i] > most ? parts[i] : most;
    for (int64_t k = whole; k < count; k++) most = scores[k] > most ? scores[k] : most;
    if (sink && *sink > most) most = *sink;
    for (int64_t k = 0; k < count; k++) scores[k] = exp_f32(scores[k] - most);
    for (int i = 0; i < PARTS; i++) parts[i] = 0;
    for (int64_t k = 0; k < whole; k += PARTS)
        for (int i = 0; i < PARTS; i++) parts[i] += scores[k + i];
    for (int64_t k = whole; k < count; k++) parts[k - whole] += scores[k];
    for (int i = 0; i < PARTS; i++) sum += parts[i];
    if (sink) sum += exp_f32(*sink - most);
    for (int64_t k = 0; k < count; k++) scores[k] /= sum;
}

/* ---- rows rounded to int8 ---- */

INLINE void round_row_as(int dtype, const char *x, int64_t count, char *out) {
    for (int64_t first = 0; first < count; first += ROUNDED_VALUES, out += ROUNDED_BYTES) {
        float values[ROUNDED_VALUES], most = 0;
        int has_nan = 0;
        for (int i = 0; i < ROUNDED_VALUES; i++) {
            values[i] = load_as(dtype, x, first + i);
            most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
            has_nan |= values[i] != values[i];
        }
        const uint16_t half = f32_to_f16(has_nan ? NAN : most / 127.0f < 65504.0f ? most / 127.0f : 65504.0f);
        const float scale = f16_to_f32(half);
        store_u16(out, half);
        for (int i = 0; i < ROUNDED_VALUES; i++) {
            const float code = scale == 0 ? 0 : rintf(values[i] / scale);
            out[2 + i] = (char)(code > 127.0f ? 127 : code < -127.0f ? -127 : code == code ? (int)code : 0);
        }
    }
}

MOE_CLONES void moe_round_row(int dtype, const char *x, int64_t count, char *out) {
#define ROUND_ROW(type) round_row_as(type, x, count, out)
    BY_DTYPE(dtype, ROUND_ROW)
}

/* ---- products ---- */

/* out[m, n] = dot(x[m], w[n]), by the kernel of linear layers: a row's bits do not depend on the others. */
static void multiply_transposed(const Batch *batch, const float *x, const char *w, char *packed, float *out) {
    const Isa *isa = current_isa();
    const Matrix matrix = {.data = w, .stride = batch->row_stride}, none = {0};
    if (batch->dtype == DTYPE_ROUNDED) {
        isa->dot_rounded(matrix, batch->w_rows, batch->w_cols, x, batch->num_rows, out);
        return;
    }
    const int kind = column_kind(isa, DTYPE_F32, batch->dtype);
    pack_panels(isa, kind, (const char *)x, 4 * batch->w_cols, DTYPE_F32, NULL, batch->num_rows, 0, batch->w_cols, batch->w_cols,
                packed);
    isa->multiply(kind, matrix, batch->w_rows, batch->w_cols, packed, batch->num_rows, out, batch->w_rows, none);
}

/* out[t] = sum over k of weights[t, k] * rows[t * choices + k], summed in the order of k. */
typedef struct {
    Batch rows; /* token after token, `w_rows` choices each */
    const char *weights;
    char *out;
    int weights_dtype;
    float *sums; /* [threads, w_cols] */
} Combination;

static void combine_tokens(void *context, int thread, int64_t first, int64_t end) {
    Combination *call = context;
    const Batch *rows = &call->rows;
    const int64_t choices = rows->w_rows, row_bytes = rows->row_stride;
    float *sums = call->sums + thread * rows->w_cols, weights[choices];
    for (int64_t token = first; token < end; token++) {
        for (int64_t k = 0; k < choices; k++) weights[k] = load_as(call->weights_dtype, call->weights, token * choices + k);
        mix(rows, weights, rows->w + token * choices * row_bytes, sums);
        current_isa()->store(call->out + token * row_bytes, rows->dtype, sums, rows->w_cols);
    }
}

/* Rows, weights and out lie without gaps; a single token is summed by the calling thread. */
MOE_EXPORT int moe_combine_slots(const char *rows, const char *weights, char *out, int64_t num_tokens, int64_t choices,
                                 int64_t dim, int dtype, int weights_dtype, int share_threads) {
    Combination call = {.weights = weights, .out = out, .weights_dtype = weights_dtype};
    call.rows = (Batch){.w = rows, .w_rows = choices, .w_cols = dim, .row_stride = dim * dtype_bytes(dtype), .dtype = dtype};
    pool_begin();
    call.sums = pool_scratch(pool_threads() * dim * (int64_t)sizeof(float));
    if (call.sums && num_tokens == 1)
        combine_tokens(&call, 0, 0, 1);
    else if (call.sums)
        pool_each(combine_tokens, &call, num_tokens, 1, share_threads);
    pool_end();
    return call.sums ? STATUS_OK : STATUS_NO_MEMORY;
}

/* Attention of one query in each head; `rows` query heads share a key head. */
typedef struct {
    Batch keys, values; /* as products: queries with keys, weights with values */
    const char *query;  /* [outer, inner * num_rows, keys.w_cols], heads and elements without gaps */
    const float *mask;  /* [outer, length] to be added to scores, or NULL */
    const char *sinks;  /* [inner * num_rows], a further score of each head, or NULL */
    char *out;          /* [outer, inner * num_rows, values.w_cols] without gaps */
    int64_t query_stride;
    int dtype, sinks_dtype; /* of query and out, and of sinks */
    float scale;
    float *scratch;
    int64_t scratch_floats, packed_floats; /* for one of outer * inner elements, and for its packed queries */
} Attention;

static void attend_head(void *context, int thread, int64_t element, int64_t end) {
    Attention *call = context;
    const Batch *keys = &call->keys, *values = &call->values;
    const int64_t outer = element / keys->inner, inner = element % keys->inner, rows = keys->num_rows;
    const int64_t length = keys->w_rows, dim = keys->w_cols, size = dtype_bytes(call->dtype), count = rows * values->w_cols;
    float *packed = call->scratch + element * call->scratch_floats, *query = packed + call->packed_floats;
    float *scores = query + rows * dim, *mixed = scores + rows * length;
    const char *source = call->query + outer * call->query_stride + inner * rows * dim * size;
    (void)thread, (void)end; /* one at a time */
    for (int64_t k = 0; k < rows * dim; k++) query[k] = load_as(call->dtype, source, k) * call->scale;
    multiply_transposed(keys, query, keys->w + outer * keys->outer_stride + inner * keys->inner_stride, (char *)packed, scores);
    const char *value = values->w + outer * values->outer_stride + inner * values->inner_stride;
    for (int64_t m = 0; m < rows; m++) {
        float *own = scores + m * length;
        if (call->mask)
            for (int64_t k = 0; k < length; k++) own[k] += call->mask[outer * length + k];
        const float sink = call->sinks ? load_as(call->sinks_dtype, call->sinks, inner * rows + m) : 0;
        moe_softmax(own, length, call->sinks ? &sink : NULL);
        if (values->dtype != DTYPE_ROUNDED) mix(values, own, value, mixed + m * values->w_cols);
    }
    const Matrix rounded = {.data = value, .stride = values->row_stride};
    if (values->dtype == DTYPE_ROUNDED) current_isa()->mix_rounded(rounded, length, values->w_cols, scores, rows, mixed);
    current_isa()->store(call->out + element * count * size, call->dtype, mixed, count);
}

/* softmax(scale * query . keys + mask, sink of the head) . values; query and out have one data type, keys and values too. */
MOE_EXPORT int moe_single_query_attention(const char *query, int64_t query_stride, const char *key, int64_t key_outer,
                                          int64_t key_inner, int64_t key_row, const char *value, int64_t value_outer,
                                          int64_t value_inner, int64_t value_row, const float *mask, const char *sinks,
                                          int sinks_dtype, char *out, int64_t outer, int64_t inner, int64_t rows, int64_t length,
                                          int64_t key_dim, int64_t value_dim, float scale, int dtype, int cached_dtype,
                                          int share_threads) {
    Attention call = {.keys = {key, inner, rows, length, key_dim, key_outer, key_inner, key_row, cached_dtype},
                      .values = {value, inner, rows, length, value_dim, value_outer, value_inner, value_row, cached_dtype},
                      .query = query, .mask = mask, .sinks = sinks, .dtype = dtype, .sinks_dtype = sinks_dtype, .out = out,
                      .query_stride = query_stride, .scale = scale};
    const Isa *isa = current_isa();
    if (cached_dtype != DTYPE_ROUNDED)
        call.packed_floats = rows * packed_row_bytes(column_kind(isa, DTYPE_F32, cached_dtype), key_dim, isa->k_step) / 4;
    call.scratch_floats = round_up(call.packed_floats + rows * (key_dim + length + value_dim), 16);
    pool_begin();
    call.scratch = pool_scratch(outer * inner * call.scratch_floats * (int64_t)sizeof(float));
    if (call.scratch) pool_each(attend_head, &call, outer * inner, 1, share_threads);
    pool_end();
    return call.scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
