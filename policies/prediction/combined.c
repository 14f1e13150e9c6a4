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
enum { SOURCES = 3, NUM_DISTANCES = 3, FARTHEST = 4 };
static const float PRIOR_TOKENS = 8.0f, PRIOR_OCCURRENCES = 2.0f;

EXPORT int moe_combined_version(void) { return 2; }

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

/* A step's tokens, T of them, as trained.py knows them (`_Tokens`, field by field).
 *
 * `links` [NUM_DISTANCES][L][SOURCES][E + 1][2][E] were learned. `path` and `gates` [T][L][K] are
 * noted as layers are routed. `path_free` is the variant for layers of which none before is near.
 * `any` [2][E] is scratch. */
struct tokens {
    const float *logits, *links;
    const int64_t *path;
    const float *gates;
    float *any, *chances;
    int32_t *best;
    int32_t num_tokens, num_variants, num_layers, num_experts, top_k, path_free;
};

/* Chances `any` [E] that any of the tokens visits an expert of a layer, after layer `now`. */
static void chances_of(const struct tokens *of, int32_t now, int32_t layer) {
    int32_t experts = of->num_experts, top_k = of->top_k, ahead = layer - now;
    int32_t num_sources = now < SOURCES ? now + 1 : SOURCES, variant = of->path_free;
    if (now >= 0 && ahead <= FARTHEST) variant = ahead < 3 ? ahead - 1 : NUM_DISTANCES - 1;
    const float *links = of->links, *logits = of->logits + (variant * of->num_layers + layer) * experts;
    if (num_sources) links += (int64_t)(variant * of->num_layers + layer) * SOURCES * (experts + 1) * 2 * experts;
    for (int32_t t = 0; t < of->num_tokens; t++) {
        /* of one token in place, of others behind it */
        float *sums = t ? of->any + experts : of->any;
        for (int32_t e = 0; e < experts; e++) sums[e] = logits[e];
        logits += (int64_t)of->num_variants * of->num_layers * experts;
        for (int32_t s = 0; s < num_sources; s++)
            for (int32_t k = 0; k < top_k; k++) {
                int32_t at = (t * of->num_layers + now - s) * top_k + k;
                const float *rows = links + (s * (experts + 1) + of->path[at]) * 2 * experts;
                for (int32_t e = 0; e < experts; e++)
                    sums[e] += rows[e] + of->gates[at] * rows[experts + e];
            }
        for (int32_t e = 0; e < experts; e++) {
            float chance = 1.0f / (1.0f + expf(-sums[e]));
            of->any[e] = t ? 1.0f - (1.0f - of->any[e]) * (1.0f - chance) : chance;
        }
    }
}

/* The `width` experts of each of some layers that any token visits most probably, and at least
 * with a chance of `least`, the likeliest first: `best`, as layer times E plus expert, and
 * `chances`. Returns how many there are. */
EXPORT int32_t moe_combined_guess(const struct tokens *of, int32_t now, int32_t first,
                                  int32_t count, int32_t width, float least) {
    int32_t found = 0;
    for (int32_t layer = first; layer < first + count; layer++) {
        int32_t *best = of->best + found, held = 0;
        float *chances = of->chances + found;
        chances_of(of, now, layer);
        for (int32_t e = 0; e < of->num_experts; e++) { /* equal ones in the order of their numbers */
            int32_t at = held;
            while (at > 0 && chances[at - 1] < of->any[e]) at--;
            if (at >= width || of->any[e] < least) continue;
            if (held < width) held++;
            for (int32_t i = held - 1; i > at; i--)
                best[i] = best[i - 1], chances[i] = chances[i - 1];
            best[at] = layer * of->num_experts + e, chances[at] = of->any[e];
        }
        found += held;
    }
    return found;
}
