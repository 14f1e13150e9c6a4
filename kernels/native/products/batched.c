/* Many small products with the matrices where they lie: a few rows times each of a batch of matrices.
 *
 * Attention of one query over cached keys and values is two such batches with a softmax between them: one matrix of
 * keys and one of values for each head, each read once. The weighted sum of a token's expert outputs is another.
 * One thread computes a whole batch element, so neither the number of threads nor the other elements change a bit.
 */
#include <stdatomic.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

typedef struct {
    const char *w; /* [outer, inner, w_rows, w_cols] by strides in bytes, unit stride along w_cols */
    int64_t outer, inner, num_rows, w_rows, w_cols;
    int64_t outer_stride, inner_stride, row_stride;
    int dtype;
} Batch;

/* out = sum over n of x[n] * w[n]: a loop over columns that every compiler vectorises. */
#define DEFINE_MIX(NAME, LOAD, BYTES)                                                                                   \
    MOE_CLONES static void mix_##NAME(const Batch *batch, const float *x, const char *w, float *restrict out) {         \
        const int64_t rows = batch->w_rows, cols = batch->w_cols, stride = batch->row_stride;                           \
        for (int64_t k = 0; k < cols; k++) out[k] = 0;                                                                  \
        for (int64_t n = 0; n < rows; n++, w += stride) {                                                               \
            const float weight = x[n];                                                                                  \
            for (int64_t k = 0; k < cols; k++) out[k] += weight * LOAD(w + k * BYTES);                                  \
        }                                                                                                               \
    }

DEFINE_MIX(f32, load_f32, 4)
DEFINE_MIX(bf16, load_bf16, 2)
DEFINE_MIX(f16, load_f16, 2)

/* Scores to weights: exponentials of what they are below their maximum, which sum to one, together with that of the sink
 * (a score that no value belongs to; may be NULL). Maximum and sum run in a fixed number of parts, so that every
 * instruction set adds in the same order. */
enum { PARTS = 64 };
MOE_CLONES static void softmax(float *restrict scores, int64_t count, const float *sink) {
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

void moe_softmax(float *scores, int64_t count, const float *sink) { softmax(scores, count, sink); }

typedef void (*Mix)(const Batch *, const float *, const char *, float *);
static const Mix mixes[] = {mix_f32, mix_bf16, mix_f16};
static const int kinds[] = {KIND_F32, KIND_BF16, KIND_F16};

typedef float (*Load)(const char *);
static const Load loads[] = {load_f32, load_bf16, load_f16};
static const int widths[] = {4, 2, 2};

/* out[m, n] = dot(x[m], w[n]), by the kernel of linear layers, one row of x at a time. */
static void multiply_transposed(const Batch *batch, const float *x, const char *w, float *out) {
    const Isa *isa = current_isa();
    const int kind = kinds[batch->dtype];
    char packed[packed_row_bytes(kind, batch->w_cols, isa->k_step)] __attribute__((aligned(64)));
    const Matrix matrix = {.data = w, .stride = batch->row_stride}, none = {0};
    for (int64_t m = 0; m < batch->num_rows; m++, x += batch->w_cols, out += batch->w_rows) {
        isa->pack(kind, (const char *)x, DTYPE_F32, batch->w_cols, packed, 0, 0, 1, batch->w_cols);
        isa->multiply(kind, matrix, batch->w_rows, batch->w_cols, packed, 1, out, batch->w_rows, none);
    }
}

/* out[t] = sum over k of weights[t, k] * rows[t * choices + k], summed in the order of k. */
typedef struct {
    Batch rows; /* of one token after another: `outer` tokens of `w_rows` choices */
    const char *weights;
    char *out;
    int weights_dtype;
    float *sums; /* [threads, w_cols] */
    atomic_int next_thread;
    atomic_llong next;
} Combination;

static void combine_tokens(void *context) {
    Combination *call = context;
    const Batch *rows = &call->rows;
    const int64_t choices = rows->w_rows, dim = rows->w_cols, width = widths[rows->dtype];
    float *sums = call->sums + atomic_fetch_add(&call->next_thread, 1) * dim, weights[choices];
    for (;;) {
        const int64_t token = atomic_fetch_add(&call->next, 1);
        if (token >= rows->outer) return;
        const char *source = call->weights + token * choices * widths[call->weights_dtype];
        for (int64_t k = 0; k < choices; k++) weights[k] = loads[call->weights_dtype](source + k * widths[call->weights_dtype]);
        mixes[rows->dtype](rows, weights, rows->w + token * choices * dim * width, sums);
        current_isa()->store(call->out + token * dim * width, rows->dtype, sums, dim);
    }
}

/* Rows, weights and out lie without gaps; a single token is summed by the calling thread. */
MOE_EXPORT int moe_combine_slots(const char *rows, const char *weights, char *out, int64_t num_tokens, int64_t choices,
                                 int64_t dim, int dtype, int weights_dtype, int share_threads) {
    Combination call = {.weights = weights, .out = out, .weights_dtype = weights_dtype};
    call.rows = (Batch){.w = rows, .outer = num_tokens, .w_rows = choices, .w_cols = dim,
                        .row_stride = dim * widths[dtype], .dtype = dtype};
    pool_begin();
    call.sums = pool_scratch(pool_threads() * dim * (int64_t)sizeof(float));
    if (call.sums && num_tokens == 1)
        combine_tokens(&call);
    else if (call.sums)
        pool_run(combine_tokens, &call, share_threads);
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
    int sinks_dtype;
    float scale;
    float *scratch;
    int64_t scratch_floats; /* of one of outer * inner elements */
    atomic_llong next;
} Attention;

static void attend_head(Attention *call, int64_t element) {
    const Batch *keys = &call->keys, *values = &call->values;
    const int64_t outer = element / keys->inner, inner = element % keys->inner, rows = keys->num_rows;
    const int64_t length = keys->w_rows, dim = keys->w_cols, dtype = keys->dtype;
    float *query = call->scratch + element * call->scratch_floats, *scores = query + rows * dim, *mixed = scores + rows * length;
    const char *source = call->query + outer * call->query_stride + inner * rows * dim * widths[dtype];
    for (int64_t k = 0; k < rows * dim; k++) query[k] = loads[dtype](source + k * widths[dtype]) * call->scale;
    multiply_transposed(keys, query, keys->w + outer * keys->outer_stride + inner * keys->inner_stride, scores);
    const char *sinks = call->sinks;
    if (sinks) sinks += inner * rows * widths[call->sinks_dtype];
    const char *value = values->w + outer * values->outer_stride + inner * values->inner_stride;
    for (int64_t m = 0; m < rows; m++, scores += length, mixed += values->w_cols) {
        if (call->mask)
            for (int64_t k = 0; k < length; k++) scores[k] += call->mask[outer * length + k];
        const float sink = sinks ? loads[call->sinks_dtype](sinks + m * widths[call->sinks_dtype]) : 0;
        softmax(scores, length, sinks ? &sink : NULL);
        mixes[dtype](values, scores, value, mixed);
    }
    const int64_t count = rows * values->w_cols;
    current_isa()->store(call->out + element * count * widths[dtype], (int)dtype, mixed - count, count);
}

static void attend_heads(void *context) {
    Attention *call = context;
    for (;;) {
        const int64_t element = atomic_fetch_add(&call->next, 1);
        if (element >= call->keys.outer * call->keys.inner) return;
        attend_head(call, element);
    }
}

/* softmax(scale * query . keys + mask, sink of the head) . values; query, keys, values and out have one data type. */
MOE_EXPORT int moe_single_query_attention(const char *query, int64_t query_stride, const char *key, int64_t key_outer,
                                          int64_t key_inner, int64_t key_row, const char *value, int64_t value_outer,
                                          int64_t value_inner, int64_t value_row, const float *mask, const char *sinks,
                                          int sinks_dtype, char *out,
                                          int64_t outer, int64_t inner, int64_t rows, int64_t length, int64_t key_dim,
                                          int64_t value_dim, float scale, int dtype, int share_threads) {
    const Batch shape = {.outer = outer, .inner = inner, .num_rows = rows, .w_rows = length, .dtype = dtype};
    Attention call = {.keys = shape, .values = shape, .query = query, .mask = mask, .sinks = sinks,
                      .sinks_dtype = sinks_dtype, .out = out, .query_stride = query_stride, .scale = scale,
                      .scratch_floats = rows * (key_dim + length + value_dim)};
    call.keys.w = key, call.keys.w_cols = key_dim;
    call.keys.outer_stride = key_outer, call.keys.inner_stride = key_inner, call.keys.row_stride = key_row;
    call.values.w = value, call.values.w_cols = value_dim;
    call.values.outer_stride = value_outer, call.values.inner_stride = value_inner, call.values.row_stride = value_row;
    pool_begin();
    call.scratch = pool_scratch(outer * inner * call.scratch_floats * (int64_t)sizeof(float));
    if (call.scratch) pool_run(attend_heads, &call, share_threads);
    pool_end();
    return call.scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
