/* Which experts a gate prefers for a hidden state, and a look-ahead based on it: at every layer it checks earlier guesses,
 * asks the gates of the next layers, and names their likely experts.
 *
 * In torch a ranking is a product, a conversion and a sort of a few dozen numbers: four calls, each slower than the
 * arithmetic. `policies/prediction/hidden.py` specifies the look-ahead; a test holds the two together. */
#include "kernels.h"

enum { LANES = 16 };

/* The largest gate ranked without allocating; decode_step/gate_ranking.py sends larger ones through torch. */
enum { MOST_EXPERTS = 1024, MOST_DIMS = 16384 };

/* One gate as decode_step/gate_ranking.py writes it: weight [num_experts, dim] with unit stride, bias [num_experts] or NULL, both of fp32 or bf16. */
typedef struct {
    const char *weight;
    int64_t stride; /* bytes between rows */
    const float *bias;
    int64_t num_experts, dim, num_ranks, weight_dtype, hidden_dtype;
} Gate;

/* Sixteen sums side by side, which the compiler turns into vectors. */
INLINE float dot(const float *x, const char *row, int64_t dim, int dtype) {
    float lanes[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * load_as(dtype, row, i + lane);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    for (; i < dim; i++) sum += x[i] * load_as(dtype, row, i);
    return sum;
}

MOE_CLONES static void compute_logits(const Gate *gate, const char *hidden, float *x, float *logits) {
    if (gate->hidden_dtype == DTYPE_F32)
        for (int64_t i = 0; i < gate->dim; i++) x[i] = load_as(DTYPE_F32, hidden, i);
    else
        for (int64_t i = 0; i < gate->dim; i++) x[i] = load_as(DTYPE_BF16, hidden, i);
    for (int64_t e = 0; e < gate->num_experts; e++) {
        const char *row = gate->weight + e * gate->stride;
        logits[e] = gate->weight_dtype == DTYPE_F32 ? dot(x, row, gate->dim, DTYPE_F32) : dot(x, row, gate->dim, DTYPE_BF16);
        if (gate->bias) logits[e] += gate->bias[e];
    }
}

/* Writes the num_ranks experts with the largest logits, largest first, equal ones in their order. STATUS_NO_MEMORY: the gate
 * is too wide. */
MOE_EXPORT int moe_rank_experts(const char *hidden, const void *gate_record, int64_t *ranked) {
    const Gate *gate = gate_record;
    float x[MOST_DIMS], logits[MOST_EXPERTS];
    char taken[MOST_EXPERTS] = {0};
    if (gate->dim > MOST_DIMS || gate->num_experts > MOST_EXPERTS) return STATUS_NO_MEMORY;
    compute_logits(gate, hidden, x, logits);
    for (int64_t rank = 0; rank < gate->num_ranks; rank++) {
        int64_t best = -1;
        for (int64_t e = 0; e < gate->num_experts; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[best] = 1;
        ranked[rank] = best;
    }
    return STATUS_OK;
}

/* ---- the look-ahead ---- */

/* The memory of a look-ahead as decode_step/gate_ranking.py lays it out. L layers, D distances, N tokens, R ranks. */
typedef struct {
    const char *gates; /* [D * L] records of `Gate`, each gate_bytes long */
    int64_t gate_bytes;
    int64_t num_layers, num_distances, most_tokens, num_ranks, num_experts, top_k, hidden_bytes;
    double prior, remembered, least; /* weights of RankRecord, and the least probability worth telling */
    double *right;                   /* [D, L, R] */
    double *lists;                   /* [D, L] */
    double *every;                   /* [D, R] */
    double *all_lists;               /* [D] */
    int64_t *made;                   /* [D, L, most_tokens, R] what was ranked */
    int64_t *num_made;               /* [D, L] for how many tokens; 0 where nothing was */
    int64_t *counts;                 /* [3] experts visited, guessed, found: of the guesses one layer ahead */
    int64_t *experts;                /* [D * num_experts] what is told: layer * num_experts + expert */
    double *chances;                 /* [D * num_experts] and how probable it is */
} LookAhead;

static int64_t *made_at(const LookAhead *state, int64_t at) { return state->made + at * state->most_tokens * state->num_ranks; }

/* Takes note of which experts of one token's list were visited, rank by rank. */
static void judge(LookAhead *state, int64_t distance, int64_t at, const int64_t *made, const int64_t *ids) {
    const int64_t ranks = state->num_ranks;
    double *own = state->right + at * ranks, *every = state->every + distance * ranks;
    for (int64_t rank = 0; rank < ranks; rank++) {
        int is_visited = 0;
        for (int64_t i = 0; i < state->top_k; i++) is_visited |= ids[i] == made[rank];
        own[rank] = own[rank] * state->remembered + is_visited;
        every[rank] = every[rank] * state->remembered + is_visited;
    }
    state->lists[at] = state->lists[at] * state->remembered + 1.0;
    state->all_lists[distance] = state->all_lists[distance] * state->remembered + 1.0;
}

/* Counts the experts of all tokens, no one twice. */
static void count(LookAhead *state, const int64_t *made, int64_t num_made, const int64_t *ids, int64_t num_ids) {
    enum { VISITED = 1, GUESSED = 2 };
    char is[MOST_EXPERTS];
    memset(is, 0, (size_t)state->num_experts);
    for (int64_t i = 0; i < num_ids; i++)
        if (ids[i] >= 0 && ids[i] < state->num_experts) is[ids[i]] |= VISITED;
    for (int64_t i = 0; i < num_made; i++) is[made[i]] |= GUESSED;
    for (int64_t expert = 0; expert < state->num_experts; expert++) {
        state->counts[0] += (is[expert] & VISITED) != 0;
        state->counts[1] += (is[expert] & GUESSED) != 0;
        state->counts[2] += is[expert] == (VISITED | GUESSED);
    }
}

static double chance_of(const LookAhead *state, int64_t distance, int64_t at, int64_t rank) {
    const double scale = state->prior / state->all_lists[distance], total = state->lists[at] + state->prior;
    return (state->right[at * state->num_ranks + rank] + scale * state->every[distance * state->num_ranks + rank]) / total;
}

/* One token: its experts in their order. */
static int64_t tell_one(const LookAhead *state, int64_t distance, int64_t at, int64_t *experts, double *chances) {
    const int64_t *made = made_at(state, at);
    int64_t num_told = 0;
    for (int64_t rank = 0; rank < state->num_ranks; rank++) {
        const double chance = chance_of(state, distance, at, rank);
        if (chance < state->least) continue;
        experts[num_told] = made[rank];
        chances[num_told++] = chance;
    }
    return num_told;
}

/* Several tokens: the chance that one of them visits an expert, the likeliest first, of equals the first. */
static int64_t tell_all(const LookAhead *state, int64_t distance, int64_t at, int64_t *experts, double *chances) {
    const int64_t *made = made_at(state, at), total = state->num_made[at] * state->num_ranks;
    double missed[MOST_EXPERTS];
    char is_named[MOST_EXPERTS];
    int64_t num_told = 0;
    memset(is_named, 0, (size_t)state->num_experts);
    for (int64_t i = 0; i < total; i++) {
        const double before = is_named[made[i]] ? missed[made[i]] : 1.0;
        missed[made[i]] = before * (1.0 - chance_of(state, distance, at, i % state->num_ranks));
        is_named[made[i]] = 1;
    }
    for (int64_t expert = 0; expert < state->num_experts; expert++) {
        if (!is_named[expert]) continue;
        const double chance = 1.0 - missed[expert];
        if (chance < state->least) continue;
        int64_t place = num_told++;
        for (; place > 0 && missed[experts[place - 1]] > missed[expert]; place--) {
            experts[place] = experts[place - 1];
            chances[place] = chances[place - 1];
        }
        experts[place] = expert;
        chances[place] = chance;
    }
    return num_told;
}

static void judge_layer(LookAhead *state, int64_t layer, const int64_t *ids, int64_t num_tokens) {
    for (int64_t distance = 0; distance < state->num_distances; distance++) {
        const int64_t at = distance * state->num_layers + layer, *made = made_at(state, at);
        if (state->num_made[at] != num_tokens) continue;
        for (int64_t token = 0; token < num_tokens; token++)
            judge(state, distance, at, made + token * state->num_ranks, ids + token * state->top_k);
        if (distance == 0) count(state, made, num_tokens * state->num_ranks, ids, num_tokens * state->top_k);
        state->num_made[at] = 0;
    }
}

/* A layer sent tokens to these experts, each to top_k. Tells the likely experts of the next `horizon` layers, nearest layer
 * first; returns how many. */
MOE_EXPORT int64_t moe_look_ahead(void *of, int64_t layer, const int64_t *ids, int64_t num_tokens, const char *hidden,
                                  int64_t horizon) {
    LookAhead *state = of;
    const int64_t layers = state->num_layers, furthest = horizon < state->num_distances ? horizon : state->num_distances;
    judge_layer(state, layer, ids, num_tokens);
    if (num_tokens > state->most_tokens || state->num_experts > MOST_EXPERTS) return 0;
    int64_t total = 0;
    for (int64_t distance = 0; distance < furthest; distance++) {
        const int64_t next = layer + distance + 1, at = distance * layers + next;
        if (next >= layers) break;
        const char *gate = state->gates + at * state->gate_bytes;
        for (int64_t token = 0; token < num_tokens; token++)
            if (moe_rank_experts(hidden + token * state->hidden_bytes, gate, made_at(state, at) + token * state->num_ranks) != STATUS_OK)
                return total;
        state->num_made[at] = num_tokens;
        int64_t *experts = state->experts + total;
        const int64_t told = (num_tokens == 1 ? tell_one : tell_all)(state, distance, at, experts, state->chances + total);
        for (int64_t i = 0; i < told; i++) experts[i] += next * state->num_experts;
        total += told;
    }
    return total;
}

/* A step begins: what was guessed and not judged is forgotten. */
MOE_EXPORT void moe_look_ahead_anew(void *of) {
    LookAhead *state = of;
    memset(state->num_made, 0, (size_t)(state->num_distances * state->num_layers) * sizeof *state->num_made);
}
