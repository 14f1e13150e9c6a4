/* Steps of one token in layers with recurrent states: linear attention by the gated delta rule, state spaces, and the short
 * convolutions before both.
 *
 * A state is read and written once; torch's operations pass over it several times. One thread computes a whole head, or
 * channel, in a fixed order: neither the number of threads nor other sequences change a bit. */
#include "kernels.h"

/* Columns of a state summed at a time: both kinds of sums stay in registers. */
enum { COLUMNS = 32, CHANNELS_AT_ONCE = 1024, PARTIAL_SUMS = 16 };

/* As decode_step/recurrent_step.py writes it. Without gaps: state [sequences, heads, key_dim, value_dim], query and key
 * [sequences, groups, key_dim], value and out [sequences, heads, value_dim], log_decay [sequences, heads, decays], beta
 * [sequences, heads]. */
typedef struct {
    float *state;
    const char *query, *key, *value, *beta;
    const float *log_decay;
    float *out;
    int64_t sequences, heads, groups, key_dim, value_dim;
    int64_t decays; /* per head: one, or key_dim */
    int64_t query_dtype, value_dtype, beta_dtype, share_threads;
    double scale;    /* for queries */
    double unit_eps; /* if not negative, queries and keys get unit length */
} DeltaCall;

/* As above: state [sequences, channels, width], taps [channels, num_taps], x and out [sequences, channels]; bias may be NULL. All
 * of one data type. */
typedef struct {
    char *state;
    const char *x, *taps, *bias;
    char *out;
    int64_t sequences, channels, width, num_taps, dtype, share_threads;
} ConvCall;

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
    for (int64_t k = 0; k < ask->key_dim; k++) out[k] = load_as((int)ask->query_dtype, values, first + k);
    float factor = 1;
    if (ask->unit_eps >= 0) factor = 1 / sqrtf(dot(out, out, ask->key_dim) + (float)ask->unit_eps);
    for (int64_t k = 0; k < ask->key_dim; k++) out[k] = out[k] * factor * (float)scale;
}

/* Some columns of a state: S = decay S; S += key (beta (value - key . S)); out = query . S. The part of out from the old
 * state is summed as the state is read. */
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
    for (int64_t i = 0; i < values; i++) value[i] = load_as((int)ask->value_dtype, ask->value, item * values + i);
    const float overlap = dot(query, key, keys), beta = load_as((int)ask->beta_dtype, ask->beta, item);
    float *state = ask->state + item * keys * values, *out = ask->out + item * values;
    int64_t first = 0;
    for (; first + COLUMNS <= values; first += COLUMNS)
        delta_columns(ask, COLUMNS, query, key, decay, overlap, beta, value + first, state + first, out + first);
    for (; first < values; first++)
        delta_columns(ask, 1, query, key, decay, overlap, beta, value + first, state + first, out + first);
}

static void delta_item(void *context, int thread, int64_t item, int64_t end) {
    (void)thread, (void)end; /* one at a time */
    delta_head(context, item);
}

MOE_EXPORT void moe_delta_rule_step(DeltaCall *ask) {
    pool_begin();
    pool_each(delta_item, ask, ask->sequences * ask->heads, 1, (int)ask->share_threads);
    pool_end();
}

/* The last inputs move up by one and x follows; the result is their sum weighted by the taps, rounded once. */
INLINE void conv_as(int dtype, const ConvCall *ask, int64_t sequence, int64_t first, int64_t last) {
    const int64_t size = dtype_bytes(dtype), width = ask->width, num_taps = ask->num_taps;
    for (int64_t c = first; c < last; c++) {
        const int64_t place = sequence * ask->channels + c;
        char *row = ask->state + place * width * size;
        const char *taps = ask->taps + c * num_taps * size, *before = row + (width + 1 - num_taps) * size;
        float sum = ask->bias ? load_as(dtype, ask->bias, c) : 0;
        for (int64_t k = 0; k + 1 < num_taps; k++) sum += load_as(dtype, before, k) * load_as(dtype, taps, k);
        sum += load_as(dtype, ask->x, place) * load_as(dtype, taps, num_taps - 1);
        store_as(dtype, ask->out, place, sum);
        memmove(row, row + size, (size_t)((width - 1) * size));
        memcpy(row + (width - 1) * size, ask->x + place * size, (size_t)size);
    }
}

MOE_CLONES static void conv(const ConvCall *ask, int64_t sequence, int64_t first, int64_t last) {
#define CONV(type) conv_as(type, ask, sequence, first, last)
    BY_DTYPE(ask->dtype, CONV)
}

static void conv_item(void *context, int thread, int64_t item, int64_t end) {
    const ConvCall *ask = context;
    const int64_t parts = parts_of(ask->channels, CHANNELS_AT_ONCE), first = item % parts * CHANNELS_AT_ONCE;
    (void)thread, (void)end; /* one at a time */
    conv(ask, item / parts, first, min64(first + CHANNELS_AT_ONCE, ask->channels));
}

MOE_EXPORT void moe_conv_step(ConvCall *ask) {
    const int64_t items = ask->sequences * parts_of(ask->channels, CHANNELS_AT_ONCE);
    if (ask->sequences * ask->channels <= CHANNELS_AT_ONCE) {
        for (int64_t item = 0; item < items; item++) conv_item(ask, 0, item, item + 1);
        return;
    }
    pool_begin();
    pool_each(conv_item, ask, items, 1, (int)ask->share_threads);
    pool_end();
}
