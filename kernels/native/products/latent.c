/* Attention of single queries to latents, without expanding keys and values (DeepSeek-V2, section 2.1.2): the query is
 * multiplied by a head's key matrix, and the mixed latents by its value matrix.
 *
 * An item is a query and some heads, which share the reading of its latents. Sums run in one order: neither the number of
 * threads nor the other queries change a bit. */
#include "kernels.h"

/* Tokens whose scores of the turned part are computed before they are added, and most panels of rows of an item. */
enum { TOKENS_AT_ONCE = 512, MOST_PANELS = 2 };

/* What a query attends to, as decode_step/latent_attention.py writes it: for each token a latent and the turned part of its
 * key. */
typedef struct {
    const char *latents, *turned;
    int64_t latent_stride, turned_stride, length;
    const float *mask; /* [length] to be added to scores, or NULL */
} Tokens;

/* As decode_step/latent_attention.py writes it. */
typedef struct {
    const char *query;    /* [count, heads, key_dim + turned_dim] */
    const Tokens *tokens; /* of each query */
    const char *weight;   /* [heads, key_dim + value_dim, rank], the key matrix of a head before its value matrix */
    int64_t weight_stride;
    char *out; /* [count, heads, value_dim] */
    int64_t count, heads, key_dim, turned_dim, value_dim, rank, dtype, share_threads;
    double scale;
} LatentCall;

typedef struct {
    const LatentCall *ask;
    const Isa *isa;
    int kind;
    int64_t together, blocks; /* heads of an item, items of a query */
    int64_t columns;          /* the rank in whole steps */
    int64_t room, floats;     /* of scores of a head, and of a thread's scratch */
    float *scratch;
} Latent;

/* out[m, n] = dot(x[m], row n of a matrix). */
static void multiply_rows(const Latent *call, const float *x, int64_t x_stride, int64_t num_rows, const char *data, int64_t stride,
                          int64_t num_weight_rows, int64_t k, char *packed, float *out, int64_t ldo) {
    const Matrix matrix = {.data = data, .stride = stride}, none = {0};
    pack_panels(call->isa, call->kind, (const char *)x, 4 * x_stride, DTYPE_F32, NULL, num_rows, 0, k, k, packed);
    call->isa->multiply(call->kind, matrix, num_weight_rows, k, packed, num_rows, out, ldo, none);
}

/* out[m] = sum over n of x[m, n] * row n of a matrix of `rank` columns. */
static void mix_rows(const Latent *call, const float *x, int64_t x_stride, int64_t num_rows, const char *data, int64_t stride,
                     int64_t k, float *sums, float *out) {
    const Matrix matrix = {.data = data, .stride = stride};
    const Rows rows = {(const char *)x, 4 * x_stride, 4, 4 * x_stride * call->isa->max_panel_rows};
    call->isa->multiply_columns(call->kind, matrix, k, call->ask->rank, rows, num_rows, sums, out, call->columns);
}

static void attend_block(const Latent *call, int64_t index, int64_t first, float *scratch) {
    const LatentCall *ask = call->ask;
    const Tokens *tokens = &ask->tokens[index];
    const int64_t heads = min64(call->together, ask->heads - first);
    const int64_t width = ask->key_dim + ask->turned_dim, size = dtype_bytes((int)ask->dtype), length = tokens->length;
    const int64_t head_bytes = (ask->key_dim + ask->value_dim) * ask->weight_stride, row = round_up(width, 16), room = call->room;
    const char *weight = ask->weight + first * head_bytes;
    float *query = scratch, *latent = query + heads * row, *sums = latent + heads * call->columns;
    float *turned = sums + heads * call->columns, *scores = turned + heads * TOKENS_AT_ONCE;
    char *packed = (char *)(scores + heads * room);
    for (int64_t h = 0; h < heads; h++) {
        const char *source = ask->query + ((index * ask->heads + first + h) * width) * size;
        for (int64_t k = 0; k < width; k++) query[h * row + k] = load_as((int)ask->dtype, source, k) * (float)ask->scale;
        mix_rows(call, query + h * row, row, 1, weight + h * head_bytes, ask->weight_stride, ask->key_dim, sums,
                 latent + h * call->columns);
    }
    multiply_rows(call, latent, call->columns, heads, tokens->latents, tokens->latent_stride, length, ask->rank, packed, scores, room);
    for (int64_t begin = 0; begin < length; begin += TOKENS_AT_ONCE) {
        const int64_t count = min64(TOKENS_AT_ONCE, length - begin);
        multiply_rows(call, query + ask->key_dim, row, heads, tokens->turned + begin * tokens->turned_stride, tokens->turned_stride,
                      count, ask->turned_dim, packed, turned, TOKENS_AT_ONCE);
        for (int64_t h = 0; h < heads; h++)
            for (int64_t k = 0; k < count; k++) scores[h * room + begin + k] += turned[h * TOKENS_AT_ONCE + k];
    }
    for (int64_t h = 0; h < heads; h++) {
        if (tokens->mask)
            for (int64_t k = 0; k < length; k++) scores[h * room + k] += tokens->mask[k];
        moe_softmax(scores + h * room, length, NULL);
    }
    mix_rows(call, scores, room, heads, tokens->latents, tokens->latent_stride, length, sums, latent);
    for (int64_t h = 0; h < heads; h++) {
        multiply_rows(call, latent + h * call->columns, 0, 1, weight + h * head_bytes + ask->key_dim * ask->weight_stride,
                      ask->weight_stride, ask->value_dim, ask->rank, packed, scores, 0);
        call->isa->store(ask->out + (index * ask->heads + first + h) * ask->value_dim * size, (int)ask->dtype, scores,
                         ask->value_dim);
    }
}

/* One query after another with the same heads, whose matrices stay in the cache. */
static void attend_item(void *context, int thread, int64_t item, int64_t end) {
    Latent *call = context;
    (void)end; /* one at a time */
    attend_block(call, item % call->ask->count, item / call->ask->count * call->together, call->scratch + thread * call->floats);
}

/* out = softmax(scale * query . keys + mask) . values, where keys and values are those that the latents would expand to. */
MOE_EXPORT int moe_latent_attention(const LatentCall *ask) {
    const Isa *isa = current_isa();
    Latent call = {.ask = ask, .isa = isa, .kind = column_kind(isa, DTYPE_F32, (int)ask->dtype)};
    int64_t longest = ask->value_dim;
    for (int64_t i = 0; i < ask->count; i++) longest = max64(longest, ask->tokens[i].length);
    pool_begin();
    const int64_t threads = pool_threads(), most = MOST_PANELS * isa->max_panel_rows;
    call.blocks = parts_of(ask->heads, min64(most, parts_of(ask->count * ask->heads, threads)));
    call.together = parts_of(ask->heads, call.blocks);
    call.columns = round_up(ask->rank, isa->k_step);
    call.room = round_up(longest, 16) + 16; /* rows a power of two apart would share few sets of the cache */
    const int64_t wide = max64(ask->rank, ask->turned_dim);
    call.floats = round_up(call.together * (round_up(ask->key_dim + ask->turned_dim, 16) + 2 * call.columns + TOKENS_AT_ONCE + call.room +
                                           packed_row_bytes(call.kind, wide, isa->k_step) / 4), 16);
    call.scratch = pool_scratch(threads * call.floats * (int64_t)sizeof(float));
    if (call.scratch) pool_each(attend_item, &call, ask->count * call.blocks, 1, (int)ask->share_threads);
    pool_end();
    return call.scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
