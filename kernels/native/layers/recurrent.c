/* Steps of one token in layers with recurrent states: linear attention by the gated delta rule, state spaces, and the short
 * convolutions before both.
 *
 * A state is read and written once, where torch's operations pass over it several times. One thread computes a whole head, or
 * channel, in a fixed order: neither the number of threads nor other sequences change a bit.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

/* Columns of a state that are summed at a time: sums of two kinds stay in registers. */
enum { COLUMNS = 32, CHANNELS_AT_ONCE = 1024, PARTIAL_SUMS = 16 };

/* Loops of a constant number of turns become vectors only where they are inlined. */
#define INLINE static inline __attribute__((always_inline))

/* As decode_step/recurrent_step.py writes it. Without gaps: state [sequences, heads, key_dim, value_dim], query and key
 * [sequences, groups, key_dim], value and out [sequences, heads, value_dim], log_decay [sequences, heads, decays], beta
 * [sequences, heads]. */
typedef struct {
    float *state;
    const char *query, *key, *value, *beta;
    const float *log_decay;
    float *out;
    int64_t sequences, heads, groups, key_dim, value_dim;
    int64_t decays; /* one of a head, or key_dim */
    int64_t query_dtype, value_dtype, beta_dtype, share_threads;
    double scale;    /* of queries */
    double unit_eps; /* queries and keys get unit length; below zero they do not */
} DeltaCall;

/* As above: state [sequences, channels, width], taps [channels, num_taps], x and out [sequences, channels]; bias may be NULL. All
 * of one data type. */
typedef struct {
    char *state;
    const char *x, *taps, *bias;
    char *out;
    int64_t sequences, channels, width, num_taps, dtype, share_threads;
} ConvCall;

typedef struct {
    const void *ask;
    atomic_llong next;
} Items;

static inline float load(const char *values, int64_t i, int64_t dtype) {
    if (dtype == DTYPE_F32) return load_f32(values + 4 * i);
    return dtype == DTYPE_BF16 ? load_bf16(values + 2 * i) : load_f16(values + 2 * i);
}

static inline float dot(const float *left, const float *right, int64_t count) {
    float lanes[PARTIAL_SUMS] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + PARTIAL_SUMS <= count; i += PARTIAL_SUMS)
        for (int lane = 0; lane < PARTIAL_SUMS; lane++) lanes[lane] += left[i + lane] * right[i + lane];
    for (int lane = 0; lane < PARTIAL_SUMS; lane++) sum += lanes[lane];
    for (; i < count; i++) sum += left[i] * right[i];
    return sum;
}

/* Widens, and gives unit length where asked. */
static inline void read_vector(const DeltaCall *ask, const char *values, int64_t first, double scale, float *out) {
    for (int64_t k = 0; k < ask->key_dim; k++) out[k] = load(values, first + k, ask->query_dtype);
    float factor = 1;
    if (ask->unit_eps >= 0) factor = 1 / sqrtf(dot(out, out, ask->key_dim) + (float)ask->unit_eps);
    for (int64_t k = 0; k < ask->key_dim; k++) out[k] = out[k] * factor * (float)scale;
}

/* Some columns of a state: S = decay S; S += key (beta (value - key . S)); out = query . S, whose part of what was known is
 * summed while the state is read. */
INLINE void delta_columns(const DeltaCall *ask, int count, const float *query, const float *key, const float *decay, float overlap,
                          float beta, const float *value, float *state, float *out) {
    float known[COLUMNS] = {0}, found[COLUMNS] = {0}, learnt[COLUMNS];
    for (int64_t k = 0; k < ask->key_dim; k++) {
        const float *row = state + k * ask->value_dim, of_key = key[k] * decay[k], of_query = query[k] * decay[k];
        for (int i = 0; i < count; i++) {
            known[i] += of_key * row[i];
            found[i] += of_query * row[i];
        }
    }
    for (int i = 0; i < count; i++) {
        learnt[i] = (value[i] - known[i]) * beta;
        out[i] = found[i] + overlap * learnt[i];
    }
    for (int64_t k = 0; k < ask->key_dim; k++) {
        float *row = state + k * ask->value_dim;
        for (int i = 0; i < count; i++) row[i] = decay[k] * row[i] + key[k] * learnt[i];
    }
}

MOE_CLONES static void delta_head(const DeltaCall *ask, int64_t item) {
    const int64_t keys = ask->key_dim, values = ask->value_dim;
    const int64_t group = item / ask->heads * ask->groups + item % ask->heads / (ask->heads / ask->groups);
    float query[keys], key[keys], decay[keys], value[values];
    read_vector(ask, ask->query, group * keys, ask->scale, query);
    read_vector(ask, ask->key, group * keys, 1, key);
    for (int64_t k = 0; k < keys; k++) decay[k] = k < ask->decays ? expf(ask->log_decay[item * ask->decays + k]) : decay[0];
    for (int64_t i = 0; i < values; i++) value[i] = load(ask->value, item * values + i, ask->value_dtype);
    const float overlap = dot(query, key, keys), beta = load(ask->beta, item, ask->beta_dtype);
    float *state = ask->state + item * keys * values, *out = ask->out + item * values;
    int64_t first = 0;
    for (; first + COLUMNS <= values; first += COLUMNS)
        delta_columns(ask, COLUMNS, query, key, decay, overlap, beta, value + first, state + first, out + first);
    for (; first < values; first++)
        delta_columns(ask, 1, query, key, decay, overlap, beta, value + first, state + first, out + first);
}

static void delta_heads(void *context) {
    Items *items = context;
    const DeltaCall *ask = items->ask;
    for (;;) {
        const int64_t item = atomic_fetch_add(&items->next, 1);
        if (item >= ask->sequences * ask->heads) return;
        delta_head(ask, item);
    }
}

MOE_EXPORT void moe_delta_rule_step(const DeltaCall *ask) {
    Items items = {.ask = ask};
    pool_begin();
    pool_run(delta_heads, &items, (int)ask->share_threads);
    pool_end();
}

/* The last inputs move up by one, x behind them; the result is the sum of the last with the taps, rounded once. */
#define DEFINE_CONV(NAME, LOAD, STORE, BYTES)                                                                        \
    MOE_CLONES static void conv_##NAME(const ConvCall *ask, int64_t sequence, int64_t first, int64_t last) {         \
        for (int64_t c = first; c < last; c++) {                                                                     \
            const int64_t place = sequence * ask->channels + c;                                                      \
            char *row = ask->state + place * ask->width * BYTES;                                                     \
            const char *taps = ask->taps + c * ask->num_taps * BYTES, *x = ask->x + place * BYTES;                   \
            const char *before = row + (ask->width + 1 - ask->num_taps) * BYTES;                                     \
            float sum = ask->bias ? LOAD(ask->bias + c * BYTES) : 0;                                                 \
            for (int64_t k = 0; k + 1 < ask->num_taps; k++) sum += LOAD(before + k * BYTES) * LOAD(taps + k * BYTES); \
            sum += LOAD(x) * LOAD(taps + (ask->num_taps - 1) * BYTES);                                               \
            STORE(ask->out + place * BYTES, sum);                                                                    \
            memmove(row, row + BYTES, (size_t)((ask->width - 1) * BYTES));                                           \
            memcpy(row + (ask->width - 1) * BYTES, x, BYTES);                                                        \
        }                                                                                                            \
    }

DEFINE_CONV(f32, load_f32, store_f32, 4)
DEFINE_CONV(bf16, load_bf16, store_bf16, 2)
DEFINE_CONV(f16, load_f16, store_f16, 2)

static void conv_channels(void *context) {
    static void (*const convs[])(const ConvCall *, int64_t, int64_t, int64_t) = {conv_f32, conv_bf16, conv_f16};
    Items *items = context;
    const ConvCall *ask = items->ask;
    const int64_t parts = (ask->channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
    for (;;) {
        const int64_t item = atomic_fetch_add(&items->next, 1);
        if (item >= ask->sequences * parts) return;
        const int64_t first = item % parts * CHANNELS_AT_ONCE, end = first + CHANNELS_AT_ONCE;
        convs[ask->dtype](ask, item / parts, first, end < ask->channels ? end : ask->channels);
    }
}

MOE_EXPORT void moe_conv_step(const ConvCall *ask) {
    Items items = {.ask = ask};
    if (ask->sequences * ask->channels <= CHANNELS_AT_ONCE) {
        conv_channels(&items);
        return;
    }
    pool_begin();
    pool_run(conv_channels, &items, (int)ask->share_threads);
    pool_end();
}
