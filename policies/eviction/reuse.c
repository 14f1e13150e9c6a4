/* The estimates of `ReuseEstimator` (reuse.py), at the speed of the machine.
 *
 * reuse.py says what is computed and why. Here the same is computed in one call for each routed
 * layer; tests hold the two equal up to the order of sums.
 *
 * Legend: L layers, E experts of a layer, K experts of a token, M remembered tokens, F features, C
 * width of the network's context.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    NUM_USES = 5,
    RECENCY = NUM_USES,
    FEATURES = NUM_USES + 7,
    NETWORK = FEATURES - 1,
    HORIZON = 16,
    FOLLOWERS = 8,
    ROWS = FOLLOWERS + 1,
    LONGEST_STEP = 32,
    LANES = 16,
    NUM_PASTS = 2,
};

/* What is kept from token to token, as in reuse_network.py and reuse.py. */
static const float USE_DECAYS[NUM_USES] = {0.8f, 0.95f, 0.99f, 0.996f, 0.9995f};
static const float PAST_DECAYS[NUM_PASTS] = {0.70710678f, 0.95760328f};
static const float GATE_DECAY = 0.95f, FLOOR = 0.003f, SHARPNESS = 20.0f, FAR = 7.0f;
static const double DISCOUNT = 0.8, FOLLOWER_DISCOUNT = 0.7, CERTAINTY = 0.02;

/* A running request. */
typedef struct request {
    struct request *next;
    int64_t id, token_id;
    int32_t rows[ROWS], num_rows; /* of its last tokens, the oldest first */
    int has_query;
    float *query;   /* [M] agreement of its last token with all remembered ones */
    float *before;  /* [M] the same of the token before, by the rows that follow */
    /* of the last tokens of its steps, for the network */
    int16_t *path, *path_before; /* [L][K] */
    float *now, *last, *part;    /* [C] of the present one so far; of the one before, all and so far */
    float *decayed, *pending;    /* [NUM_PASTS][C] of all before; of the present one */
} request;

/* A token of the running step. */
typedef struct {
    request *of;
    int32_t token, row, num_followed, followed[FOLLOWERS];
    int is_last;
} open_token;

/* Features of some experts at one moment, to be judged by what comes. */
typedef struct {
    int64_t step;
    int32_t *experts;
    float *features;
} example;

typedef struct {
    int32_t num_layers, num_experts, top_k, memory, learn_every, num_features, width;
    /* what was used */
    float *uses, *gates, *now_gates; /* [L][NUM_USES][E], [L][E], [L][E] */
    int64_t *last_use, *step;        /* [L][E], [L] */
    uint8_t *recent;                 /* [L][HORIZON][E] */
    int32_t *num_recent;             /* [L] */
    /* what was estimated */
    float *scores; /* [L][E] of the layer's last run */
    int64_t num_estimates, num_learned;
    int32_t routed, num_compared;
    example *examples; /* [L][HORIZON + 1], a ring */
    int32_t *first_example, *num_examples;
    double gram[FEATURES * FEATURES], moment[FEATURES], weights[FEATURES];
    /* what is remembered */
    uint8_t *visited;  /* [L][E + 1][M] */
    float *followed;   /* [L][M][E + 1] */
    int16_t *paths;    /* [M][L][K] */
    int64_t *token_id, *token_before;
    int32_t *row_before;
    float *closed; /* 0, or minus infinity: followers not known yet */
    int32_t next_row;
    request *requests;
    open_token *open;
    int32_t num_open, most_open;
    /* the network, if there is one */
    float *current, *past, *output; /* [L][E][C], [NUM_PASTS][L][E][C], [L][C][E] */
    float *bias;                    /* [L][E] */
    /* scratch */
    float *likeness, *log_none, *scratch, *recalled, *features;
} reuse;

EXPORT int moe_reuse_version(void) { return 1; }

static void free_request(request *r) {
    free(r->query), free(r->path), free(r->now);
    free(r);
}

EXPORT void moe_reuse_free(reuse *s) {
    if (!s) return;
    for (int32_t i = 0; s->examples && i < s->num_layers * (HORIZON + 1); i++)
        free(s->examples[i].experts), free(s->examples[i].features);
    while (s->requests) {
        request *next = s->requests->next;
        free_request(s->requests);
        s->requests = next;
    }
    void *all[] = {s->uses,   s->gates,    s->now_gates, s->last_use, s->step,         s->recent,
                   s->num_recent, s->scores, s->examples, s->first_example, s->num_examples,
                   s->visited, s->followed, s->paths, s->token_id, s->token_before, s->row_before,
                   s->closed, s->open, s->current, s->past, s->output, s->bias, s->likeness, s->log_none, s->scratch,
                   s->recalled, s->features};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(s);
}

/* NULL where there is no memory. */
EXPORT reuse *moe_reuse_new(int32_t num_layers, int32_t num_experts, int32_t top_k, int32_t memory,
                            int32_t learn_every) {
    reuse *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    size_t L = num_layers, E = num_experts, M = memory, half = E / 2 + 1;
    s->num_layers = num_layers, s->num_experts = num_experts, s->top_k = top_k;
    s->memory = memory, s->learn_every = learn_every, s->routed = -1;
    s->num_features = NETWORK;
#define NEW(member, number) (s->member = calloc((number), sizeof *s->member))
    int ok = NEW(uses, L * NUM_USES * E) && NEW(gates, L * E) && NEW(now_gates, L * E) &&
             NEW(last_use, L * E) && NEW(step, L) && NEW(recent, L * HORIZON * E) &&
             NEW(num_recent, L) && NEW(scores, L * E) && NEW(examples, L * (HORIZON + 1)) &&
             NEW(first_example, L) && NEW(num_examples, L) && NEW(visited, L * (E + 1) * M) &&
             NEW(followed, L * M * (E + 1)) && NEW(paths, M * L * top_k) && NEW(token_id, M) &&
             NEW(token_before, M) && NEW(row_before, M) && NEW(closed, M) && NEW(likeness, M) && NEW(log_none, E) &&
             NEW(scratch, M + E) && NEW(recalled, E + 1) && NEW(features, E * FEATURES);
#undef NEW
    for (size_t i = 0; ok && i < L * (HORIZON + 1); i++) {
        s->examples[i].experts = malloc(half * sizeof(int32_t));
        s->examples[i].features = malloc(half * FEATURES * sizeof(float));
        ok = s->examples[i].experts && s->examples[i].features;
    }
    if (!ok) {
        moe_reuse_free(s);
        return NULL;
    }
    for (size_t i = 0; i < L * E; i++) s->last_use[i] = -10000;
    for (size_t i = 0; i < M * L * top_k; i++) s->paths[i] = (int16_t)num_experts;
    for (size_t m = 0; m < M; m++) {
        s->token_id[m] = s->token_before[m] = -1;
        s->closed[m] = -INFINITY;
    }
    return s;
}

static request *request_of(reuse *s, int64_t id) {
    for (request *r = s->requests; r; r = r->next)
        if (r->id == id) return r;
    size_t M = s->memory, C = s->width, places = (size_t)s->num_layers * s->top_k;
    request *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->id = id, r->token_id = -1;
    r->query = calloc(2 * M, sizeof(float));
    r->path = malloc(2 * places * sizeof(int16_t));
    r->now = calloc((3 + 2 * NUM_PASTS) * C + 1, sizeof(float));
    if (!r->query || !r->path || !r->now) {
        free_request(r);
        return NULL;
    }
    r->before = r->query + M, r->path_before = r->path + places;
    r->last = r->now + C, r->part = r->last + C, r->decayed = r->part + C;
    r->pending = r->decayed + NUM_PASTS * C;
    for (size_t i = 0; i < 2 * places; i++) r->path[i] = (int16_t)s->num_experts;
    r->next = s->requests;
    return s->requests = r;
}

EXPORT void moe_reuse_finish(reuse *s, int64_t id) {
    int32_t kept = 0; /* tokens of the running step that are another request's */
    for (int32_t i = 0; i < s->num_open; i++)
        if (s->open[i].of->id != id) s->open[kept++] = s->open[i];
    s->num_open = kept;
    for (request **at = &s->requests; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            request *ended = *at;
            *at = ended->next;
            free_request(ended);
            return;
        }
}

/* The row of a token that is remembered from now on. */
static void open_row(reuse *s, request *r, int32_t token, int64_t token_id, int is_last) {
    int32_t L = s->num_layers, K = s->top_k, M = s->memory, width = s->num_experts + 1;
    int32_t row = s->next_row;
    s->next_row = (row + 1) % M;
    for (int32_t l = 0; l < L; l++) {
        int16_t *path = s->paths + ((size_t)row * L + l) * K;
        for (int32_t k = 0; k < K; k++) {
            s->visited[((size_t)l * width + path[k]) * M + row] = 0;
            path[k] = (int16_t)s->num_experts;
        }
        memset(s->followed + ((size_t)l * M + row) * width, 0, width * sizeof(float));
    }
    s->closed[row] = -INFINITY;
    open_token *t = &s->open[s->num_open++];
    *t = (open_token){.of = r, .token = token, .row = row, .is_last = is_last};
    for (int32_t i = r->num_rows - 1; i >= 0 && t->num_followed < FOLLOWERS; i--)
        if (r->rows[i] != row) t->followed[t->num_followed++] = r->rows[i];
    if (t->num_followed == FOLLOWERS) s->closed[r->rows[0]] = 0;
    if (is_last) {
        for (int32_t m = 0; m < M; m++) r->before[m] = r->has_query ? r->query[s->row_before[m]] : 0;
        for (int32_t m = 0; m < M; m++)
            r->query[m] = (token_id >= 0 && s->token_id[m] == token_id ? 4.0f : 0.0f) +
                          (r->token_id >= 0 && s->token_before[m] == r->token_id ? 2.0f : 0.0f);
        r->has_query = 1;
    }
    s->token_id[row] = token_id;
    s->token_before[row] = r->token_id;
    s->row_before[row] = r->num_rows ? r->rows[r->num_rows - 1] : row;
    if (r->num_rows == ROWS) memmove(r->rows, r->rows + 1, --r->num_rows * sizeof *r->rows);
    r->rows[r->num_rows++] = row;
    r->token_id = token_id;
}

static void add(float *to, const float *from, int32_t width) {
    for (int32_t d = 0; d < width; d++) to[d] += from[d];
}

/* The last token of a request's step becomes the one before. */
static void turn_context(reuse *s, request *r) {
    size_t C = s->width, places = (size_t)s->num_layers * s->top_k;
    memcpy(r->path_before, r->path, places * sizeof *r->path);
    for (size_t i = 0; i < places; i++) r->path[i] = (int16_t)s->num_experts;
    memcpy(r->last, r->now, C * sizeof(float));
    memset(r->now, 0, C * sizeof(float)), memset(r->part, 0, C * sizeof(float));
    for (size_t i = 0; i < NUM_PASTS * C; i++) {
        float kept = PAST_DECAYS[i / C];
        r->decayed[i] = kept * r->decayed[i] + (1 - kept) * r->pending[i];
    }
    memset(r->pending, 0, NUM_PASTS * C * sizeof(float));
}

/* Adds where the last token of a request's step went in a layer. */
static void note_context(reuse *s, request *r, int32_t layer, const int64_t *ids, int32_t top_k) {
    int32_t L = s->num_layers, E = s->num_experts, C = s->width;
    int16_t *path = r->path + (size_t)layer * s->top_k;
    const int16_t *before = r->path_before + (size_t)layer * s->top_k;
    for (int32_t k = 0; k < top_k; k++) {
        size_t place = (size_t)layer * E + ids[k];
        if (before[k] < E) add(r->part, s->current + ((size_t)layer * E + before[k]) * C, C);
        if (ids[k] < 0 || ids[k] >= E) continue;
        path[k] = (int16_t)ids[k];
        add(r->now, s->current + place * C, C);
        for (int32_t j = 0; j < NUM_PASTS; j++)
            add(r->pending + j * C, s->past + ((size_t)j * L * E + place) * C, C);
    }
}

/* [E] log odds that the running requests use an expert soon, by the network; several are one in
 * which any of them does. */
static void ask_network(const reuse *s, int32_t layer, float *odds) {
    int32_t E = s->num_experts, C = s->width, num_asked = 0;
    float context[256];
    for (int32_t i = 0; i < s->num_open; i++) {
        if (!s->open[i].is_last) continue;
        const request *r = s->open[i].of;
        num_asked++;
        for (int32_t c = 0; c < C; c++) {
            context[c] = r->now[c] + r->last[c] - r->part[c];
            for (int32_t j = 0; j < NUM_PASTS; j++) context[c] += r->decayed[j * C + c];
        }
        float *sums = num_asked == 1 ? odds : s->features;
        memcpy(sums, s->bias + (size_t)layer * E, E * sizeof(float));
        for (int32_t c = 0; c < C; c++) {
            const float *output = s->output + ((size_t)layer * C + c) * E;
            for (int32_t e = 0; e < E; e++) sums[e] += context[c] * output[e];
        }
        for (int32_t e = 0; e < E; e++)
            s->log_none[e] = (num_asked == 1 ? 0 : s->log_none[e]) - log1pf(expf(fminf(sums[e], 30)));
    }
    for (int32_t e = 0; num_asked > 1 && e < E; e++) {
        float none = fminf(s->log_none[e], -1e-6f);
        odds[e] = logf(-expm1f(none)) - none;
    }
}

/* A step begins; the tokens of one request stand together. -1: no memory. */
EXPORT int moe_reuse_begin(reuse *s, const int64_t *sequences, const int64_t *token_ids,
                           int32_t num_tokens) {
    s->num_open = s->num_compared = 0;
    if (num_tokens > s->most_open) {
        open_token *more = realloc(s->open, num_tokens * sizeof *more);
        if (!more) return -1;
        s->open = more, s->most_open = num_tokens;
    }
    for (int32_t first = 0, last; first < num_tokens; first = last + 1) {
        for (last = first; last + 1 < num_tokens && sequences[last + 1] == sequences[first];) last++;
        request *r = request_of(s, sequences[first]);
        if (!r) return -1;
        if (s->width) turn_context(s, r);
        int32_t from = last - first + 1 > LONGEST_STEP ? last - LONGEST_STEP + 1 : first;
        for (int32_t t = from; t <= last; t++) open_row(s, r, t, token_ids[t], t == last);
    }
    return 0;
}

/* Compares the paths of a step with all that is remembered, and remembers them. */
static void remember_paths(reuse *s, int32_t layer, const int64_t *ids, int32_t top_k) {
    int32_t M = s->memory, E = s->num_experts, width = E + 1;
    uint8_t *visited = s->visited + (size_t)layer * width * M;
    float *followed = s->followed + (size_t)layer * M * width;
    s->num_compared++;
    for (int32_t i = 0; i < s->num_open; i++) {
        const open_token *t = &s->open[i];
        const int64_t *chosen = ids + (size_t)t->token * top_k;
        int16_t *path = s->paths + ((size_t)t->row * s->num_layers + layer) * s->top_k;
        for (int32_t k = 0; k < top_k; k++) {
            int32_t e = chosen[k] < 0 || chosen[k] > E ? E : (int32_t)chosen[k];
            const uint8_t *with = visited + (size_t)e * M;
            for (int32_t m = 0; t->is_last && m < M; m++) t->of->query[m] += with[m];
        }
        for (int32_t k = 0; k < top_k; k++) {
            int32_t e = chosen[k] < 0 || chosen[k] > E ? E : (int32_t)chosen[k];
            float worth = (float)(1 - FOLLOWER_DISCOUNT);
            visited[(size_t)e * M + t->row] = 1;
            path[k] = (int16_t)e;
            for (int32_t f = 0; f < t->num_followed; f++, worth *= (float)FOLLOWER_DISCOUNT)
                followed[(size_t)t->followed[f] * width + e] += worth;
        }
        if (s->width && t->is_last) note_context(s, t->of, layer, chosen, top_k);
    }
}

static void use(reuse *s, int32_t layer, const int64_t *ids, const float *weights, int32_t num_tokens,
                int32_t top_k) {
    int32_t E = s->num_experts;
    float *uses = s->uses + (size_t)layer * NUM_USES * E, *gates = s->gates + (size_t)layer * E;
    float *now = s->now_gates + (size_t)layer * E;
    int64_t *last_use = s->last_use + (size_t)layer * E, step = ++s->step[layer];
    uint8_t *mark = s->recent + ((size_t)layer * HORIZON + step % HORIZON) * E;
    memset(mark, 0, E), memset(now, 0, E * sizeof *now);
    for (int32_t i = 0; i < num_tokens * top_k; i++)
        if (ids[i] >= 0 && ids[i] < E) mark[ids[i]] = 1, now[ids[i]] += weights ? weights[i] : 0;
    for (int32_t e = 0; e < E; e++) {
        now[e] /= (float)num_tokens;
        for (int32_t j = 0; j < NUM_USES; j++)
            uses[j * E + e] = USE_DECAYS[j] * uses[j * E + e] + (mark[e] ? 1 - USE_DECAYS[j] : 0);
        gates[e] = GATE_DECAY * gates[e] + (1 - GATE_DECAY) * now[e];
        if (mark[e]) last_use[e] = step;
    }
    if (s->num_recent[layer] < HORIZON) s->num_recent[layer]++;
}

/* Solves gram @ weights = moment by Cholesky. -1: gram is not positive definite. */
static int solve(reuse *s) {
    int32_t F = s->num_features;
    double root[FEATURES][FEATURES], y[FEATURES];
    for (int32_t i = 0; i < F; i++)
        for (int32_t j = 0; j <= i; j++) {
            double sum = s->gram[i * F + j];
            for (int32_t k = 0; k < j; k++) sum -= root[i][k] * root[j][k];
            if (i == j && !(sum > 0)) return -1;
            root[i][j] = i == j ? sqrt(sum) : sum / root[j][j];
        }
    for (int32_t i = 0; i < F; i++) {
        double sum = s->moment[i];
        for (int32_t k = 0; k < i; k++) sum -= root[i][k] * y[k];
        y[i] = sum / root[i][i];
    }
    for (int32_t i = F - 1; i >= 0; i--) {
        double sum = y[i];
        for (int32_t k = i + 1; k < F; k++) sum -= root[k][i] * s->weights[k];
        s->weights[i] = sum / root[i][i];
    }
    return 0;
}

/* One step of iteratively reweighted least squares from an estimate whose uses are known now. */
static void learn(reuse *s, int32_t layer) {
    int32_t E = s->num_experts, F = s->num_features, half = E / 2 + 1;
    if (!s->num_examples[layer]) return;
    int32_t first = s->first_example[layer];
    const example *judged = &s->examples[(size_t)layer * (HORIZON + 1) + first];
    if (judged->step + HORIZON > s->step[layer]) return;
    s->first_example[layer] = (first + 1) % (HORIZON + 1);
    s->num_examples[layer]--;
    for (int32_t i = 0; i < half; i++) {
        const float *x = judged->features + (size_t)i * F;
        double target = 0, worth = 1 - DISCOUNT, odds = 0;
        for (int64_t t = judged->step + 1; t <= judged->step + HORIZON; t++, worth *= DISCOUNT)
            target += s->recent[((size_t)layer * HORIZON + t % HORIZON) * E + judged->experts[i]] * worth;
        for (int32_t f = 0; f < F; f++) odds += x[f] * s->weights[f];
        double chance = 1 / (1 + exp(-odds)), certainty = chance * (1 - chance) + CERTAINTY;
        double wanted = odds + (target - chance) / certainty;
        for (int32_t f = 0; f < F; f++) {
            for (int32_t g = 0; g < F; g++) s->gram[f * F + g] += certainty * x[f] * x[g];
            s->moment[f] += certainty * x[f] * wanted;
        }
    }
    if (++s->num_learned % 32 == 0) solve(s);
}

/* A layer was routed: ids [N][K], weights [N][K] or NULL. */
EXPORT void moe_reuse_route(reuse *s, int32_t layer, const int64_t *ids, const float *weights,
                            int32_t num_tokens, int32_t top_k) {
    remember_paths(s, layer, ids, top_k);
    s->routed = layer;
    use(s, layer, ids, weights, num_tokens, top_k);
    learn(s, layer);
}

/* How like each remembered moment is to a request's present one, and the most of it. */
static float most_likely(reuse *s, const request *r, float path_weight, float before_weight) {
    float most[LANES], found = -INFINITY;
    for (int32_t i = 0; i < LANES; i++) most[i] = -INFINITY;
    for (int32_t m = 0; m < s->memory; m++)
        s->likeness[m] = r->query[m] * path_weight + r->before[m] * before_weight + s->closed[m];
    for (int32_t m = 0; m + LANES <= s->memory; m += LANES)
        for (int32_t i = 0; i < LANES; i++)
            most[i] = s->likeness[m + i] > most[i] ? s->likeness[m + i] : most[i];
    for (int32_t m = s->memory / LANES * LANES; m < s->memory; m++)
        most[0] = s->likeness[m] > most[0] ? s->likeness[m] : most[0];
    for (int32_t i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
    return found;
}

/* What followed the moments most like the present ones, into s->recalled [E + 1]. */
static void recall(reuse *s, int32_t layer) {
    int32_t M = s->memory, width = s->num_experts + 1;
    const float *followed = s->followed + (size_t)layer * M * width;
    float path_weight = SHARPNESS / (float)(s->num_compared * s->top_k + 6);
    float before_weight = SHARPNESS * 0.5f / (float)(s->num_layers * s->top_k);
    memset(s->recalled, 0, width * sizeof(float));
    for (int32_t i = 0; i < s->num_open; i++) {
        if (!s->open[i].is_last) continue;
        const request *r = s->open[i].of;
        float most = most_likely(s, r, path_weight, before_weight), sum = 0;
        if (!isfinite(most)) continue;
        memset(s->scratch, 0, width * sizeof(float));
        for (int32_t m = 0; m < M; m++) {
            if (s->likeness[m] < most - FAR) continue;
            float weight = expf(s->likeness[m] - most);
            const float *from = followed + (size_t)m * width;
            for (int32_t e = 0; e < width; e++) s->scratch[e] += weight * from[e];
            sum += weight;
        }
        for (int32_t e = 0; e < width; e++) s->recalled[e] += s->scratch[e] / sum;
    }
}

/* Keeps the features of the more recently used half of the experts: others are hardly ever held. */
static void keep_example(reuse *s, int32_t layer) {
    int32_t E = s->num_experts, F = s->num_features, half = E / 2 + 1;
    if (s->num_examples[layer] > HORIZON) return;
    int32_t place = (s->first_example[layer] + s->num_examples[layer]++) % (HORIZON + 1);
    example *kept = &s->examples[(size_t)layer * (HORIZON + 1) + place];
    const int64_t *last_use = s->last_use + (size_t)layer * E;
    kept->step = s->step[layer];
    for (int32_t e = 0, num_kept = 0; e < E && num_kept < half; e++) {
        int32_t num_later = 0; /* experts that were used later, or have lower numbers */
        for (int32_t other = 0; other < E; other++)
            num_later += last_use[other] - (other >= e) >= last_use[e];
        if (num_later >= half) continue;
        kept->experts[num_kept] = e;
        memcpy(kept->features + (size_t)num_kept++ * F, s->features + (size_t)e * F,
               F * sizeof(float));
    }
}

/* [E] scores of a layer: new ones of the one that was routed last, of others those of their last
 * run. The caller asks once for each run. */
EXPORT const float *moe_reuse_scores(reuse *s, int32_t layer) {
    int32_t E = s->num_experts, F = s->num_features;
    float *scores = s->scores + (size_t)layer * E;
    if (layer != s->routed) return scores;
    recall(s, layer);
    if (F > NETWORK) {
        ask_network(s, layer, s->scratch);
        for (int32_t e = 0; e < E; e++) s->features[(size_t)e * F + NETWORK] = s->scratch[e];
    }
    const float *uses = s->uses + (size_t)layer * NUM_USES * E;
    for (int32_t e = 0; e < E; e++) {
        float *x = s->features + (size_t)e * F;
        int64_t age = s->step[layer] - s->last_use[(size_t)layer * E + e];
        for (int32_t j = 0; j < NUM_USES; j++) x[j] = logf(uses[j * E + e] + FLOOR);
        x[RECENCY] = log1pf((float)age);
        x[RECENCY + 1] = age == 0;
        x[RECENCY + 2] = s->gates[(size_t)layer * E + e];
        x[RECENCY + 3] = s->now_gates[(size_t)layer * E + e];
        x[RECENCY + 4] = logf(s->recalled[e] + 0.01f);
        x[RECENCY + 5] = 1;
        double sum = 0;
        for (int32_t f = 0; f < F; f++) sum += x[f] * s->weights[f];
        scores[e] = (float)sum;
    }
    if (++s->num_estimates % s->learn_every == 0) keep_example(s, layer);
    return scores;
}

EXPORT int64_t moe_reuse_num_learned(const reuse *s) { return s->num_learned; }

/* The arrays that are kept between processes, and the weights that belong to them. */
EXPORT void *moe_reuse_array(reuse *s, int which) {
    void *arrays[] = {s->gram, s->moment, s->uses, s->gates, s->weights};
    return arrays[which];
}

/* Gives a new estimator a network. -1: no memory. */
EXPORT int moe_reuse_take_network(reuse *s, int32_t width, const float *current, const float *past,
                                  const float *output, const float *bias) {
    size_t places = (size_t)s->num_layers * s->num_experts, each = places * width * sizeof(float);
    s->current = malloc(each), s->past = malloc(NUM_PASTS * each), s->output = malloc(each);
    s->bias = malloc(places * sizeof(float));
    if (!s->current || !s->past || !s->output || !s->bias) return -1;
    memcpy(s->current, current, each), memcpy(s->past, past, NUM_PASTS * each);
    memcpy(s->output, output, each);
    memcpy(s->bias, bias, places * sizeof(float));
    s->width = width, s->num_features = FEATURES;
    return 0;
}
