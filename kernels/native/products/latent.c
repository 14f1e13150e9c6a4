/* Attention of single queries to latents, of which keys and values would be expanded (DeepSeek-V2, section 2.1.2): the product
 * with a head's key matrix is taken with its query, and that with its value matrix with what was mixed.
 *
 * An item is a query and some heads, which share the reading of its latents. Every sum runs in one order whatever the items
 * are, so neither the number of threads nor the other queries change a bit.
 */
#include <stdatomic.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

/* Tokens whose scores of the turned part are computed before they are added, and panels of rows of an item at most. */
enum { TOKENS_AT_ONCE = 512, MOST_PANELS = 2 };

/* What a query attends to, as decode_step/latent_attention.py writes it: tokens, each with a latent and the turned part of its keys. */
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
    atomic_int next_thread;
    atomic_llong next;
} Latent;

static const int kinds[] = {KIND_F32, KIND_BF16, KIND_F16};

static float load_value(const char *source, int dtype) {
    return dtype == DTYPE_F32 ? load_f32(source) : dtype == DTYPE_BF16 ? load_bf16(source) : load_f16(source);
}

static int64_t rounded(int64_t count) { return (count + 15) / 16 * 16; }

/* out[m, n] = dot(x[m], row n of a matrix), for rows of x without gaps. */
static void multiply_rows(const Latent *call, const float *x, int64_t x_stride, int64_t num_rows, const char *data, int64_t stride,
                          int64_t num_weight_rows, int64_t k, char *packed, float *out, int64_t ldo) {
    const Isa *isa = call->isa;
    const int64_t panels = num_panels(num_rows, isa->max_panel_rows), bytes = packed_row_bytes(call->kind, k, isa->k_step);
    for (int64_t p = 0; p < panels; p++) {
        const int64_t start = panel_start(p, panels, num_rows), end = panel_start(p + 1, panels, num_rows);
        for (int64_t m = start; m < end; m++)
            isa->pack(call->kind, (const char *)(x + m * x_stride), DTYPE_F32, k, packed + start * bytes, 0, (int)(m - start),
                      (int)(end - start), k);
    }
    const Matrix matrix = {.data = data, .stride = stride}, none = {0};
    isa->multiply(call->kind, matrix, num_weight_rows, k, packed, num_rows, out, ldo, none);
}

/* out[m] = sum over n of x[m, n] * row n of a matrix of `rank` columns. */
static void mix_rows(const Latent *call, const float *x, int64_t x_stride, int64_t num_rows, const char *data, int64_t stride,
                     int64_t k, float *sums, float *out) {
    const Matrix matrix = {.data = data, .stride = stride};
    const int64_t row = x_stride * (int64_t)sizeof *x;
    const Rows rows = {(const char *)x, row, sizeof *x, row * call->isa->max_panel_rows};
    call->isa->multiply_columns(call->kind, matrix, k, call->ask->rank, rows, num_rows, sums, out, call->columns);
}

static void attend_block(const Latent *call, int64_t index, int64_t first, float *scratch) {
    const LatentCall *ask = call->ask;
    const Tokens *tokens = &ask->tokens[index];
    const int64_t left = ask->heads - first, heads = left < call->together ? left : call->together;
    const int64_t width = ask->key_dim + ask->turned_dim, size = dtype_bytes((int)ask->dtype), length = tokens->length;
    const int64_t head_bytes = (ask->key_dim + ask->value_dim) * ask->weight_stride, row = rounded(width), room = call->room;
    const char *weight = ask->weight + first * head_bytes;
    float *query = scratch, *latent = query + heads * row, *sums = latent + heads * call->columns;
    float *turned = sums + heads * call->columns, *scores = turned + heads * TOKENS_AT_ONCE;
    char *packed = (char *)(scores + heads * room);
    for (int64_t h = 0; h < heads; h++) {
        const char *source = ask->query + ((index * ask->heads + first + h) * width) * size;
        for (int64_t k = 0; k < width; k++) query[h * row + k] = load_value(source + k * size, (int)ask->dtype) * (float)ask->scale;
        mix_rows(call, query + h * row, row, 1, weight + h * head_bytes, ask->weight_stride, ask->key_dim, sums,
                 latent + h * call->columns);
    }
    multiply_rows(call, latent, call->columns, heads, tokens->latents, tokens->latent_stride, length, ask->rank, packed, scores, room);
    for (int64_t begin = 0; begin < length; begin += TOKENS_AT_ONCE) {
        const int64_t rest = length - begin, count = rest < TOKENS_AT_ONCE ? rest : TOKENS_AT_ONCE;
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

static void attend_blocks(void *context) {
    Latent *call = context;
    float *scratch = call->scratch + atomic_fetch_add(&call->next_thread, 1) * call->floats;
    for (;;) { /* queries one after another with the same heads, whose matrices stay in the cache */
        const int64_t item = atomic_fetch_add(&call->next, 1);
        if (item >= call->ask->count * call->blocks) return;
        attend_block(call, item % call->ask->count, item / call->ask->count * call->together, scratch);
    }
}

/* out = softmax(scale * query . keys + mask) . values, of keys and values that are expanded from the latents of each query. */
MOE_EXPORT int moe_latent_attention(const LatentCall *ask) {
    const Isa *isa = current_isa();
    Latent call = {.ask = ask, .isa = isa, .kind = kinds[ask->dtype]};
    int64_t longest = ask->value_dim;
    for (int64_t i = 0; i < ask->count; i++) longest = ask->tokens[i].length > longest ? ask->tokens[i].length : longest;
    pool_begin();
    const int64_t threads = pool_threads(), most = MOST_PANELS * isa->max_panel_rows;
    const int64_t even = (ask->count * ask->heads + threads - 1) / threads, limit = even < most ? even : most;
    call.blocks = (ask->heads + limit - 1) / limit;
    call.together = (ask->heads + call.blocks - 1) / call.blocks;
    call.columns = (ask->rank + isa->k_step - 1) / isa->k_step * isa->k_step;
    call.room = rounded(longest) + 16; /* rows a power of two apart would share few sets of the cache */
    const int64_t wide = ask->rank > ask->turned_dim ? ask->rank : ask->turned_dim;
    call.floats = rounded(call.together * (rounded(ask->key_dim + ask->turned_dim) + 2 * call.columns + TOKENS_AT_ONCE + call.room +
                                           packed_row_bytes(call.kind, wide, isa->k_step) / (int64_t)sizeof(float)));
    call.scratch = pool_scratch(threads * call.floats * (int64_t)sizeof(float));
    if (call.scratch) pool_run(attend_blocks, &call, (int)ask->share_threads);
    pool_end();
    return call.scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
