/* Attention of prompts: many queries to keys and values where they lie.
 *
 * A thread takes a block of queries with all heads that share a key head, so their keys are reordered once for all; the
 * longest blocks go first. Neither the blocks nor the number of threads change a bit. */
#include "kernels.h"

/* Rows of a block, which stay in the second-level cache with their sums; its queries are a multiple of those of a panel. */
enum { ROWS_OF_BLOCK = 384, QUERIES_TOGETHER = 12 };

/* As prompt_attention.py writes it; distances in bytes. Query q of a sequence sees the keys up to place + q. */
typedef struct {
    const char *query, *key, *value, *sinks;
    char *out;
    int64_t query_outer, query_head, query_row, key_outer, key_head, key_row, value_outer, value_head, value_row;
    int64_t outer, heads, key_heads, queries, length, key_dim, value_dim, place, window, dtype, sinks_dtype, share_threads;
    double scale;
} PromptCall;

typedef struct {
    const PromptCall *ask;
    const Isa *isa;
    int64_t together, blocks;
    char *scratch;
    int64_t bytes; /* of each thread */
} Prompt;

/* A block of queries of one key head of one sequence. */
static AttentionBlock block_at(const Prompt *call, int64_t item) {
    const PromptCall *ask = call->ask;
    const int64_t size = dtype_bytes((int)ask->dtype), shared = ask->heads / ask->key_heads, row = ask->heads * ask->value_dim * size;
    const int64_t group = item % ask->key_heads, outer = item / ask->key_heads % ask->outer, head = group * shared;
    const int64_t first = (call->blocks - 1 - item / ask->key_heads / ask->outer) * call->together;
    return (AttentionBlock){
        .query = ask->query + outer * ask->query_outer + head * ask->query_head + first * ask->query_row,
        .key = ask->key + outer * ask->key_outer + group * ask->key_head,
        .value = ask->value + outer * ask->value_outer + group * ask->value_head,
        .out = ask->out + (outer * ask->queries + first) * row + head * ask->value_dim * size,
        .sinks = ask->sinks ? ask->sinks + head * dtype_bytes((int)ask->sinks_dtype) : NULL,
        .query_head = ask->query_head, .query_row = ask->query_row, .key_row = ask->key_row, .value_row = ask->value_row,
        .out_head = ask->value_dim * size, .out_row = row,
        .heads = shared, .queries = min64(call->together, ask->queries - first), .length = ask->length, .key_dim = ask->key_dim,
        .value_dim = ask->value_dim, .place = ask->place + first, .window = ask->window,
        .dtype = (int)ask->dtype, .sinks_dtype = (int)ask->sinks_dtype, .scale = (float)ask->scale,
    };
}

static void attend_item(void *context, int thread, int64_t item, int64_t end) {
    const Prompt *call = context;
    (void)end; /* one at a time */
    const AttentionBlock block = block_at(call, item);
    call->isa->attend(&block, call->scratch + thread * call->bytes);
}

/* out [outer, queries, heads, value_dim] = softmax(scale * query . keys, sink of the head) . values. */
MOE_EXPORT int moe_prompt_attention(const PromptCall *ask) {
    const Isa *isa = current_isa();
    const int64_t shared = ask->heads / ask->key_heads;
    Prompt call = {.ask = ask, .isa = isa};
    call.together = max64(QUERIES_TOGETHER, ROWS_OF_BLOCK / shared / QUERIES_TOGETHER * QUERIES_TOGETHER);
    call.together = min64(call.together, ask->queries);
    call.blocks = parts_of(ask->queries, call.together);
    pool_begin();
    const AttentionBlock first = {.heads = shared, .queries = call.together, .key_dim = ask->key_dim, .value_dim = ask->value_dim};
    call.bytes = attention_scratch(&first, isa->has_bf16_dot && ask->dtype == DTYPE_BF16, isa).bytes;
    call.scratch = pool_scratch(pool_threads() * call.bytes);
    if (call.scratch) pool_each(attend_item, &call, ask->outer * ask->key_heads * call.blocks, 1, (int)ask->share_threads);
    pool_end();
    return call.scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
