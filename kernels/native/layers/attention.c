/* The attention layer for one token a sequence, from hidden values to hidden values, in one call; and for whole sequences
 * the work between the products.
 *
 * Between the products lie a few thousand operations on values in the cache; as separate calls they take longer than the
 * products of a small model. Each is rounded to the data type as a separate operation would be: setup.py compiles this file
 * without fused multiply-add. */
#include "kernels.h"

enum { ROWS_AT_ONCE = 4 };

/* Turns the pairs (x[i], x[i + half]) by the angles of a position: x * cos + (-x[half:], x[:half]) * sin. The angles of
 * second values lie `angle` values after those of first values. */
INLINE void rotate_as(int dtype, const char *restrict x, const char *restrict cos, const char *restrict sin, char *restrict out,
                      int64_t half, int64_t angle) {
    for (int64_t i = 0; i < half; i++) {
        const float first = load_as(dtype, x, i), second = load_as(dtype, x, half + i);
        store_as(dtype, out, i, round_as(dtype, first * load_as(dtype, cos, i)) + round_as(dtype, -second * load_as(dtype, sin, i)));
        store_as(dtype, out, half + i, round_as(dtype, second * load_as(dtype, cos, angle + i)) +
                                           round_as(dtype, first * load_as(dtype, sin, angle + i)));
    }
}

MOE_CLONES static void rotate(int dtype, const char *x, const char *cos, const char *sin, char *out, int64_t half, int64_t angle) {
#define ROTATE(type) rotate_as(type, x, cos, sin, out, half, angle)
    BY_DTYPE(dtype, ROTATE)
}

/* The layer's weights and sizes, as attention_step.py writes them; norms and biases may be NULL. A weight with a negative
 * stride is a quantised one: its pointer is to a `Matrix`. */
typedef struct {
    const char *qkv;
    int64_t qkv_stride;
    const char *output;
    int64_t output_stride;
    const char *qkv_bias, *output_bias;
    const char *q_norm, *k_norm;
    int64_t q_norm_dim, k_norm_dim; /* values that are normalised together: of a head, or of all heads */
    int64_t dim_in, dim_out, heads, key_heads, key_dim, value_dim, dtype;
    const char *sinks; /* of each query head, or NULL */
    int64_t sinks_dtype;
    int64_t pairs_share; /* whether both values of a pair have one cosine and one sine */
    double q_eps, k_eps, scale;
} AttentionLayer;

/* Keys or values of sequences and their heads. */
typedef struct {
    char *data;
    int64_t outer, inner, row; /* bytes between sequences, heads, tokens */
} Cached;

/* Where sequences of one length keep keys and values, as attention_step.py writes it; the token goes to the last row. */
typedef struct {
    Cached keys, values;
    int64_t length, dtype;
} Place;

/* Cosines and sines of each sequence's position, for `dim` values of a head, or for 2 * dim where pairs share them. */
typedef struct {
    const char *cos, *sin;
    int64_t stride, dim;
} Angles;

enum { QUERIES, KEYS };

/* Normalises the heads of one row, if the layer does, into `normed`, and turns them by the angles of a position. */
static void make_heads(const AttentionLayer *layer, int kind, const Angles *angles, int64_t position, const char *row,
                       char *normed, char *out, int64_t out_stride) {
    const int dtype = (int)layer->dtype;
    const int64_t size = dtype_bytes(dtype), bytes = layer->key_dim * size, heads = kind == KEYS ? layer->key_heads : layer->heads;
    const char *norm = kind == KEYS ? layer->k_norm : layer->q_norm;
    if (norm) {
        const int64_t dim = kind == KEYS ? layer->k_norm_dim : layer->q_norm_dim;
        const double eps = kind == KEYS ? layer->k_eps : layer->q_eps;
        moe_norm_rows(row, dim * size, heads * layer->key_dim / dim, norm, normed, dim, (float)eps, dtype, NORM_ROUNDED);
        row = normed;
    }
    const int64_t half = layer->pairs_share ? angles->dim : angles->dim / 2, turned = 2 * half * size;
    const int64_t at = position * angles->stride;
    for (int64_t h = 0; h < heads; h++, row += bytes, out += out_stride) {
        rotate(dtype, row, angles->cos + at, angles->sin + at, out, half, layer->pairs_share ? 0 : half);
        memcpy(out + turned, row + turned, (size_t)(bytes - turned));
    }
}

/* Makes the queries of one sequence, and writes its key and value into their places. Keys to be rounded are made in `row`. */
static void place_heads(const AttentionLayer *layer, const Angles *angles, int64_t sequence, char *row, char *normed, char *queries,
                        const Cached *keys, const Cached *values, int64_t last, int cached_dtype) {
    const int dtype = (int)layer->dtype, is_rounded = cached_dtype == DTYPE_ROUNDED;
    const int64_t size = dtype_bytes(dtype), key_bytes = layer->key_dim * size, value_bytes = layer->value_dim * size;
    char *key = row + layer->heads * key_bytes, *value = key + layer->key_heads * key_bytes;
    char *key_place = keys->data + last * keys->row, *value_place = values->data + last * values->row;
    make_heads(layer, QUERIES, angles, sequence, row, normed, queries, key_bytes);
    if (is_rounded && !layer->k_norm) memcpy(normed, key, (size_t)(layer->key_heads * key_bytes));
    make_heads(layer, KEYS, angles, sequence, is_rounded && !layer->k_norm ? normed : key, normed, is_rounded ? key : key_place,
               is_rounded ? key_bytes : keys->inner);
    for (int64_t h = 0; h < layer->key_heads; h++, key_place += keys->inner, value_place += values->inner) {
        if (is_rounded) {
            moe_round_row(dtype, key + h * key_bytes, layer->key_dim, key_place);
            moe_round_row(dtype, value + h * value_bytes, layer->value_dim, value_place);
        } else {
            memcpy(value_place, value + h * value_bytes, (size_t)value_bytes);
        }
    }
}

typedef struct {
    const AttentionLayer *layer;
    const char *rows[2]; /* queries and keys, [num_rows, heads * key_dim] without gaps */
    char *out[2];        /* [sequences, heads, tokens, key_dim] */
    Angles angles;
    int64_t tokens, angle_rows;
    char *normed;
    int64_t normed_bytes; /* of each thread */
} Heads;

static void make_some_heads(void *context, int thread, int64_t first, int64_t end) {
    Heads *call = context;
    const AttentionLayer *layer = call->layer;
    const int64_t bytes = layer->key_dim * dtype_bytes((int)layer->dtype), tokens = call->tokens;
    for (int64_t r = first; r < end; r++)
        for (int kind = QUERIES; kind <= KEYS; kind++) {
            const int64_t heads = kind == KEYS ? layer->key_heads : layer->heads;
            char *out = call->out[kind] + (r / tokens * heads * tokens + r % tokens) * bytes;
            make_heads(layer, kind, &call->angles, r % call->angle_rows, call->rows[kind] + r * heads * bytes,
                       call->normed + thread * call->normed_bytes, out, tokens * bytes);
        }
}

/* The heads of queries and keys of whole sequences, normalised and turned. There are `angle_rows` rows of angles: one
 * sequence's, for all, or those of all. */
MOE_EXPORT int moe_attention_heads(const AttentionLayer *layer, const char *queries, const char *keys, int64_t num_rows,
                                   int64_t tokens, const char *cos, const char *sin, int64_t angle_rows, int64_t angle_dim,
                                   char *query_heads, char *key_heads, int share_threads) {
    const int64_t size = dtype_bytes((int)layer->dtype), normed_bytes = layer->heads * layer->key_dim * size;
    pool_begin();
    Heads call = {.layer = layer, .rows = {queries, keys}, .out = {query_heads, key_heads},
                  .angles = {cos, sin, angle_dim * size, angle_dim}, .tokens = tokens, .angle_rows = angle_rows,
                  .normed = pool_scratch(pool_threads() * normed_bytes), .normed_bytes = normed_bytes};
    if (call.normed) pool_each(make_some_heads, &call, num_rows, ROWS_AT_ONCE, share_threads);
    pool_end();
    return call.normed ? STATUS_OK : STATUS_NO_MEMORY;
}

/* x and out are [batch, dim] without gaps. */
static int multiply(const AttentionLayer *layer, const char *x, int64_t dim_in, int64_t batch, const char *weight, int64_t stride,
                    const char *bias, char *out, int64_t dim_out, int share_threads) {
    const int dtype = (int)layer->dtype;
    const int64_t size = dtype_bytes(dtype), x_bytes = dim_in * size, out_bytes = dim_out * size;
    if (stride >= 0)
        return moe_linear(x, x_bytes, batch, weight, stride, bias, out, out_bytes, dim_in, dim_out, dtype, dtype, share_threads);
    return moe_quantized_linear(x, x_bytes, batch, (const Matrix *)weight, bias, dtype, out, out_bytes, dim_in, dim_out, dtype, 0,
                                share_threads);
}

/* x and out are [batch, dim] without gaps. Sequences are divided evenly among the places. `scratch` holds for every sequence
 * a row of the first product, two rows of queries and one of mixed values. With a mask there is a single place. */
MOE_EXPORT int moe_attention_step(const AttentionLayer *layer, const char *x, int64_t batch, const char *cos, const char *sin,
                                  int64_t angle_stride, int64_t angle_dim, const Place *places, int64_t num_places,
                                  const float *mask, char *scratch, char *out, int share_threads) {
    const int dtype = (int)layer->dtype;
    const int64_t size = dtype_bytes(dtype), q_bytes = layer->heads * layer->key_dim * size;
    const int64_t mixed_bytes = layer->heads * layer->value_dim * size;
    const int64_t qkv_count = (layer->heads + layer->key_heads) * layer->key_dim + layer->key_heads * layer->value_dim;
    char *queries = scratch + batch * qkv_count * size, *normed = queries + batch * q_bytes, *mixed = normed + batch * q_bytes;
    const Angles angles = {cos, sin, angle_stride, angle_dim};
    int status = multiply(layer, x, layer->dim_in, batch, layer->qkv, layer->qkv_stride, layer->qkv_bias, scratch, qkv_count,
                          share_threads);
    if (status != STATUS_OK) return status;
    const int64_t together = batch / num_places;
    for (int64_t b = 0; b < batch; b++) {
        const Place *place = &places[b / together];
        Cached keys = place->keys, values = place->values;
        keys.data += b % together * keys.outer;
        values.data += b % together * values.outer;
        place_heads(layer, &angles, b, scratch + b * qkv_count * size, normed, queries + b * q_bytes, &keys, &values,
                    place->length - 1, (int)place->dtype);
    }
    for (int64_t p = 0; p < num_places; p++) {
        const Cached *keys = &places[p].keys, *values = &places[p].values;
        status = moe_single_query_attention(
            queries + p * together * q_bytes, q_bytes, keys->data, keys->outer, keys->inner, keys->row, values->data,
            values->outer, values->inner, values->row, mask, layer->sinks, (int)layer->sinks_dtype,
            mixed + p * together * mixed_bytes, together, layer->key_heads, layer->heads / layer->key_heads, places[p].length,
            layer->key_dim, layer->value_dim, (float)layer->scale, dtype, (int)places[p].dtype, share_threads);
        if (status != STATUS_OK) return status;
    }
    return multiply(layer, mixed, layer->heads * layer->value_dim, batch, layer->output, layer->output_stride, layer->output_bias,
                    out, layer->dim_out, share_threads);
}
