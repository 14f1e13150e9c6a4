/* Looking ahead from one hidden state, a layer at a time: judges what was guessed for this layer, asks the gates of the next
 * ones, and says which of their experts are more likely than not. `policies/prediction/lookahead.py` says what is computed;
 * a test holds the two together.
 */
#include <stddef.h>
#include <string.h>

#include "kernels.h"

/* The memory of a look-ahead as gate_ranking/look_ahead.py lays it out. L layers, D distances, R ranks. */
typedef struct {
    const char *gates; /* [D * L] records of rank.c, each gate_bytes long */
    int64_t gate_bytes;
    int64_t num_layers, num_distances, num_ranks, num_experts;
    double prior, remembered, least; /* weights of RankRecord, and the least probability that is told */
    double *right;                   /* [D, L, R] */
    double *lists;                   /* [D, L] */
    double *every;                   /* [D, R] */
    double *all_lists;               /* [D] */
    int64_t *made;                   /* [D, L, R] what was ranked; -1 in the first place where nothing was */
    int64_t *counts;                 /* [3] visited, guessed, found: of the guesses one layer ahead */
} LookAhead;

static int64_t judge(LookAhead *state, int64_t distance, int64_t layer, const int64_t *ids, int64_t num_ids) {
    const int64_t ranks = state->num_ranks, at = distance * state->num_layers + layer;
    int64_t *made = state->made + at * ranks, found = 0;
    double *own = state->right + at * ranks, *every = state->every + distance * ranks;
    for (int64_t rank = 0; rank < ranks; rank++) {
        int is_visited = 0;
        for (int64_t i = 0; i < num_ids; i++) is_visited |= ids[i] == made[rank];
        own[rank] = own[rank] * state->remembered + is_visited;
        every[rank] = every[rank] * state->remembered + is_visited;
        found += is_visited;
    }
    state->lists[at] = state->lists[at] * state->remembered + 1.0;
    state->all_lists[distance] = state->all_lists[distance] * state->remembered + 1.0;
    made[0] = -1;
    return found;
}

static int64_t tell(const LookAhead *state, int64_t distance, int64_t layer, int64_t *experts, double *chances) {
    const int64_t ranks = state->num_ranks, at = distance * state->num_layers + layer;
    const double scale = state->prior / state->all_lists[distance], total = state->lists[at] + state->prior;
    int64_t count = 0;
    for (int64_t rank = 0; rank < ranks; rank++) {
        const double right = state->right[at * ranks + rank], every = state->every[distance * ranks + rank];
        const double chance = (right + scale * every) / total;
        if (chance < state->least) continue;
        experts[count] = layer * state->num_experts + state->made[at * ranks + rank];
        chances[count++] = chance;
    }
    return count;
}

/* A layer sent one token to these experts. Writes layer * num_experts + expert and the probability of every likely expert of
 * the next `horizon` layers, nearest layer first; returns how many. No gates are asked where `hidden` is NULL. */
MOE_EXPORT int64_t moe_look_ahead(void *of, int64_t layer, const int64_t *ids, int64_t num_ids, const char *hidden,
                                  int64_t horizon, int64_t *experts, double *chances) {
    LookAhead *state = of;
    const int64_t layers = state->num_layers, ranks = state->num_ranks;
    for (int64_t distance = 0; distance < state->num_distances; distance++) {
        if (state->made[(distance * layers + layer) * ranks] < 0) continue;
        const int64_t found = judge(state, distance, layer, ids, num_ids);
        if (distance > 0) continue;
        state->counts[0] += num_ids;
        state->counts[1] += ranks;
        state->counts[2] += found;
    }
    int64_t count = 0;
    for (int64_t distance = 0; hidden && distance < horizon && distance < state->num_distances; distance++) {
        const int64_t next = layer + distance + 1, at = distance * layers + next;
        if (next >= layers) break;
        if (moe_rank_experts(hidden, state->gates + at * state->gate_bytes, state->made + at * ranks) != STATUS_OK) break;
        count += tell(state, distance, next, experts + count, chances + count);
    }
    return count;
}

/* A step begins: what was guessed and not judged is forgotten. */
MOE_EXPORT void moe_look_ahead_anew(void *of) {
    LookAhead *state = of;
    const int64_t lists = state->num_distances * state->num_layers;
    for (int64_t i = 0; i < lists; i++) state->made[i * state->num_ranks] = -1;
}
