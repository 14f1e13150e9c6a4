/* The estimates of `Combination` (trained.py), at the speed of the machine.
 *
 * trained.py says what is computed and why; tests hold the two equal up to the order of sums.
 *
 * Legend: L layers, E experts of a layer, K experts of a token, V variants, S sources.
 */

#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { FEATURES = 7, NUM_RECENT = 2 };
static const float PRIOR_TOKENS = 8.0f, PRIOR_OCCURRENCES = 2.0f;

EXPORT int moe_combined_version(void) { return 1; }

static float clip(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

static float log_odds(float chance) {
    float bounded = clip(chance, 1e-4f, 1.0f - 1e-4f);
    return logf(bounded / (1.0f - bounded));
}

/* What a table says of a token: `visits` [L][E] is NULL where it does not know the token. */
static float share_of(const uint16_t *visits, float occurrences, float share, int32_t at) {
    if (!visits) return share;
    float visited = (float)visits[at] + PRIOR_OCCURRENCES * share;
    return clip(visited / (occurrences + PRIOR_OCCURRENCES), 0.0f, 1.0f);
}

static float visits(const int64_t *path, int32_t top_k, int32_t expert) {
    for (int32_t k = 0; k < top_k; k++)
        if (path[k] == expert) return 1.0f;
    return 0.0f;
}

/* Logits [V][L][E] of one token, less what its own path adds.
 *
 * `share` [L][E], `weights` [V][L][FEATURES] and `bias` [V][L][E] were learned. `of` and `after`
 * [L][E] are the rows of tables for the token and for the one before, seen so often. The sequence
 * has `num_tokens`, which visited `counts` [L][E] times and `recent` [NUM_RECENT][L][E]; `previous`
 * and `recalled` [L][K] are earlier paths. */
EXPORT void moe_combined_token(int32_t num_variants, int32_t num_layers, int32_t num_experts,
                               int32_t top_k, const float *share, const float *weights,
                               const float *bias, const uint16_t *of, float of_occurrences,
                               const uint16_t *after, float after_occurrences, int64_t num_tokens,
                               const float *counts, const float *recent, const int64_t *previous,
                               const int64_t *recalled, float *logits) {
    int32_t size = num_layers * num_experts;
    for (int32_t at = 0; at < size; at++) {
        int32_t layer = at / num_experts, expert = at % num_experts;
        float total = (float)num_tokens + PRIOR_TOKENS;
        const float features[FEATURES] = {
            log_odds((counts[at] + PRIOR_TOKENS * share[at]) / total),
            log_odds(share_of(of, of_occurrences, share[at], at)),
            log_odds(share_of(after, after_occurrences, share[at], at)),
            visits(previous + layer * top_k, top_k, expert),
            visits(recalled + layer * top_k, top_k, expert),
            recent[at],
            recent[size + at],
        };
        for (int32_t v = 0; v < num_variants; v++) {
            const float *w = weights + (v * num_layers + layer) * FEATURES;
            float sum = bias[v * size + at];
            for (int32_t f = 0; f < FEATURES; f++) sum += features[f] * w[f];
            logits[v * size + at] = sum;
        }
    }
}

/* The `width` experts of a layer that any of some tokens visits most probably, the likeliest first,
 * into `best` and `chances`; `any` [E] is scratch, and holds all chances by expert.
 *
 * `logits` are those of a layer and variant, `stride` apart from token to token. Of `num_sources`
 * known layers the rows of `links` [S][E + 1][2][E] are added: `ids` and `gates` [K] are those of the
 * last known layer of the first token, of whose path the layers before lie in front. */
EXPORT void moe_combined_layer(int32_t num_tokens, int32_t num_layers, int32_t num_experts,
                               int32_t top_k, int32_t num_sources, const float *logits,
                               int64_t stride, const float *links, const int64_t *ids,
                               const float *gates, int32_t width, float *any, int32_t *best,
                               float *chances) {
    for (int32_t t = 0; t < num_tokens; t++) {
        /* of one token in place, of others behind it */
        float *sums = t ? any + num_experts : any;
        for (int32_t e = 0; e < num_experts; e++) sums[e] = logits[t * stride + e];
        for (int32_t s = 0; s < num_sources; s++)
            for (int32_t k = 0; k < top_k; k++) {
                int32_t at = (t * num_layers - s) * top_k + k;
                const float *rows = links + (s * (num_experts + 1) + ids[at]) * 2 * num_experts;
                for (int32_t e = 0; e < num_experts; e++)
                    sums[e] += rows[e] + gates[at] * rows[num_experts + e];
            }
        for (int32_t e = 0; e < num_experts; e++) {
            float chance = 1.0f / (1.0f + expf(-sums[e]));
            any[e] = t ? 1.0f - (1.0f - any[e]) * (1.0f - chance) : chance;
        }
    }
    int32_t held = 0;
    for (int32_t e = 0; e < num_experts; e++) { /* equal ones in the order of their numbers */
        int32_t at = held;
        while (at > 0 && chances[at - 1] < any[e]) at--;
        if (at >= width) continue;
        if (held < width) held++;
        for (int32_t i = held - 1; i > at; i--) best[i] = best[i - 1], chances[i] = chances[i - 1];
        best[at] = e, chances[at] = any[e];
    }
}
