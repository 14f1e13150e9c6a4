/* Replays recorded routing through eviction policies at the speed of the machine.
 *
 * The policies are the Python classes beside this file, which also serve live stores; compiled.py
 * gives each that this file knows a code. This loop counts the hits that `EvictionPolicy.access`
 * would, event by event, for caches that start empty.
 *
 * All keys of an event are looked up before any is inserted. If an event needs more slots than
 * there are, held keys stay, and the first of the missing ones are not kept.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NOT_HELD (-1)
#define NEVER INT64_MAX

enum rule {
    LRU, LFU, SLRU, SIEVE, STATIC, BELADY, BELADY_BYPASS, AGING_LFU, LFRU, GDSF, LEC, MRS,
    EXPERT_BUFFERING, RANDOM
};

typedef struct {
    enum rule rule;
    double parameter;     /* SLRU: the protected share; ageing: the half-life; MRS: alpha */
    const int64_t *order; /* static: the place of each key's weight among all weights */
    int32_t layer_keys;   /* experts of a layer */
} settings;

typedef struct {
    int32_t num_keys, num_slots, num_held, num_protected, hand;
    int32_t *held;   /* [num_held] keys; SIEVE: the oldest first, others: in any order */
    int32_t *place;  /* of a key in `held`, or NOT_HELD; SIEVE: its place when it came */
    uint8_t *in_use; /* by the event that is served */
    uint8_t *marked; /* SIEVE: used since the hand passed; SLRU: protected */
    double *worth;   /* the least is evicted; MRS, ageing: also of keys that are not held */
    int64_t *stamp;  /* among equals the least is evicted: last use, static: slot */
    int64_t *uses;   /* so far (LFU, LEC), or since it came in (LFRU, GDSF) */
    int64_t clock;   /* uses so far */
    double floor;    /* GDSF: worth of the last victim */
    double now;      /* ageing: half-lives so far */
    uint64_t random;
} cache;

static int may_decline(enum rule r) { return r == STATIC || r == BELADY_BYPASS || r == LEC; }

static void clear(cache *c, double worth) {
    c->num_held = c->num_protected = c->hand = 0;
    c->clock = 0, c->random = 0;
    c->floor = c->now = 0.0;
    memset(c->in_use, 0, c->num_keys);
    memset(c->marked, 0, c->num_keys);
    memset(c->uses, 0, sizeof *c->uses * c->num_keys);
    for (int32_t key = 0; key < c->num_keys; key++) c->place[key] = NOT_HELD, c->worth[key] = worth;
}

static void *take(char **memory, size_t size) {
    void *part = *memory;
    *memory += (size + 15) & ~(size_t)15;
    return part;
}

/* Divides a block over the arrays of a cache; without a block returns how large it must be. */
static size_t lay_out(cache *c, char *memory) {
    char *next = memory;
    size_t n = c->num_keys;
    c->worth = take(&next, n * sizeof *c->worth);
    c->stamp = take(&next, n * sizeof *c->stamp);
    c->uses = take(&next, n * sizeof *c->uses);
    c->held = take(&next, n * sizeof *c->held);
    c->place = take(&next, n * sizeof *c->place);
    c->in_use = take(&next, n);
    c->marked = take(&next, n);
    return (size_t)(next - memory);
}

/* The held key of least worth that the event does not use, the one of least stamp among equals. */
static int32_t least_worth(const cache *c, enum rule rule) {
    int32_t found = NOT_HELD;
    double least = 0.0;
    for (int32_t place = 0; place < c->num_held; place++) {
        int32_t key = c->held[place];
        if (c->in_use[key]) continue;
        double worth = c->worth[key];
        if (rule == LFRU) worth = (double)c->uses[key] / (double)(c->clock + 1 - c->stamp[key]);
        if (found == NOT_HELD || worth < least ||
            (worth == least && c->stamp[key] < c->stamp[found]))
            found = key, least = worth;
    }
    return found;
}

/* Any number below `bound`, by the generator of `RandomChoice`. */
static int32_t draw(cache *c, int32_t bound) {
    c->random = c->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int32_t)((c->random >> 33) * (uint64_t)bound >> 31);
}

static int32_t random_victim(cache *c) {
    for (int attempt = 0; attempt < 4; attempt++) {
        int32_t key = c->held[draw(c, c->num_held)];
        if (!c->in_use[key]) return key;
    }
    int32_t num_free = 0;
    for (int32_t place = 0; place < c->num_held; place++) num_free += !c->in_use[c->held[place]];
    int32_t chosen = draw(c, num_free);
    for (int32_t place = 0;; place++)
        if (!c->in_use[c->held[place]] && chosen-- == 0) return c->held[place];
}

/* The first key without a mark from the hand on; removes the marks that it passes. */
static int32_t sieve_victim(cache *c) {
    for (;; c->hand++) {
        if (c->hand >= c->num_held) c->hand = 0;
        int32_t key = c->held[c->hand];
        if (c->in_use[key]) continue;
        if (!c->marked[key]) return key;
        c->marked[key] = 0;
    }
}

/* At most this share of the held keys is protected, and one at least. */
static void slru_balance(cache *c, double share) {
    while (c->num_protected > fmax(1.0, share * c->num_held)) {
        int32_t oldest = NOT_HELD;
        for (int32_t place = 0; place < c->num_held; place++) {
            int32_t key = c->held[place];
            if (c->marked[key] && (oldest == NOT_HELD || c->stamp[key] < c->stamp[oldest]))
                oldest = key;
        }
        c->marked[oldest] = 0, c->worth[oldest] = 0.0;
        c->stamp[oldest] = ++c->clock;
        c->num_protected--;
    }
}

/* Evicts a key that the event does not use; returns it. */
static int32_t evict(cache *c, const settings *s) {
    int32_t key = s->rule == SIEVE    ? sieve_victim(c)
                  : s->rule == RANDOM ? random_victim(c)
                                      : least_worth(c, s->rule);
    int32_t place = s->rule == SIEVE ? c->hand : c->place[key], last = c->held[--c->num_held];
    c->place[key] = NOT_HELD;
    if (s->rule == SIEVE) {
        memmove(c->held + place, c->held + place + 1, sizeof *c->held * (c->num_held - place));
        if (place == c->num_held) c->hand = 0;
    } else if (last != key) {
        c->held[place] = last, c->place[last] = place;
    }
    if (s->rule == GDSF) c->floor = fmax(c->floor, c->worth[key]), c->uses[key] = 0;
    if (s->rule == SLRU) {
        c->num_protected -= c->marked[key];
        slru_balance(c, s->parameter);
    }
    return key;
}

/* Notes a use of a held key, new or not; `num_before` keys were held before. */
static void use(cache *c, const settings *s, int32_t key, int32_t global, int is_new,
                int64_t next_use, int32_t num_before) {
    double ahead;
    c->clock++;
    switch (s->rule) {
    case SIEVE: c->marked[key] = (uint8_t)!is_new; return;
    case RANDOM: return;
    case EXPERT_BUFFERING:
        if (is_new) c->stamp[key] = -c->clock; /* the last one in is evicted first */
        return;
    case STATIC: c->worth[key] = (double)s->order[global]; return;
    case LFU:
    case LEC: c->worth[key] = (double)++c->uses[key]; break;
    case GDSF: c->worth[key] = c->floor + (double)++c->uses[key]; break;
    case LFRU: c->uses[key] = is_new ? 1 : c->uses[key] + 1; break;
    case AGING_LFU:
        c->now += 1 / (s->parameter * (num_before > 1 ? num_before : 1));
        ahead = c->worth[key] - c->now;
        c->worth[key] = c->now + log2(1 + exp2(ahead < 1000.0 ? ahead : 1000.0));
        break;
    case SLRU:
        c->num_protected += !is_new && !c->marked[key];
        c->marked[key] = (uint8_t)!is_new, c->worth[key] = !is_new;
        break;
    case BELADY:
    case BELADY_BYPASS: c->worth[key] = -(double)next_use; break;
    default: break;
    }
    c->stamp[key] = c->clock;
    if (s->rule == SLRU && !is_new) slru_balance(c, s->parameter);
}

static void insert(cache *c, const settings *s, int32_t key, int32_t global, int64_t next_use) {
    c->place[key] = c->num_held;
    c->held[c->num_held++] = key;
    use(c, s, key, global, 1, next_use, c->num_held - 1);
}

static int declines(const cache *c, const settings *s, int32_t key, int32_t global,
                    int64_t next_use, double least) {
    switch (s->rule) {
    case STATIC: return (double)s->order[global] < least;
    case LEC: return (double)(c->uses[key] + 1) <= least;
    default: return -(double)next_use < least;
    }
}

/* Keeps a newcomer only if it is worth no less than its victim. */
static void keep_if_better(cache *c, const settings *s, int32_t key, int32_t global,
                           int64_t next_use) {
    int64_t slot = c->num_held;
    if (c->num_held >= c->num_slots) {
        int32_t victim = c->num_held ? least_worth(c, s->rule) : NOT_HELD;
        if (victim == NOT_HELD || declines(c, s, key, global, next_use, c->worth[victim])) {
            c->uses[key] += s->rule == LEC;
            return;
        }
        slot = c->stamp[evict(c, s)];
    }
    insert(c, s, key, global, next_use);
    if (s->rule == STATIC) c->stamp[key] = slot; /* a newcomer takes the slot of its victim */
}

/* Averages the gate weights of an event into the worth of its layer's experts. */
static void average(cache *c, const settings *s, const int32_t *local, int32_t num_keys,
                    const double *gates) {
    double *worth = c->worth + (num_keys ? local[0] / s->layer_keys * s->layer_keys : 0);
    for (int32_t e = 0; e < s->layer_keys; e++) worth[e] *= 1 - s->parameter;
    for (int32_t k = 0; k < num_keys; k++) c->worth[local[k]] += s->parameter * gates[k];
}

static int64_t serve(cache *c, const settings *s, const int32_t *keys, int32_t num_keys,
                     int32_t first_key, const int64_t *next_uses, const double *gates,
                     uint8_t *kept) {
    int32_t local[num_keys ? num_keys : 1];
    int32_t num_hits = 0;
    for (int32_t k = 0; k < num_keys; k++) {
        local[k] = keys[k] - first_key;
        kept[k] = c->place[local[k]] == NOT_HELD; /* to be inserted */
        num_hits += !kept[k];
    }
    if (s->rule == MRS) average(c, s, local, num_keys, gates);
    if (may_decline(s->rule)) {
        for (int32_t k = 0; k < num_keys; k++)
            if (!kept[k]) use(c, s, local[k], keys[k], 0, next_uses[k], c->num_held);
        for (int32_t k = 0; k < num_keys; k++)
            if (kept[k]) keep_if_better(c, s, local[k], keys[k], next_uses[k]);
        return num_hits;
    }
    int32_t num_skipped = num_keys > c->num_slots ? num_keys - c->num_slots : 0;
    for (int32_t k = 0, skip = num_skipped; skip > 0; k++)
        if (kept[k]) kept[k] = 0, skip--;
    int32_t num_kept = num_keys - num_hits - num_skipped, room = c->num_slots - c->num_held;
    for (int32_t k = 0; k < num_keys; k++) c->in_use[local[k]] = 1;
    for (int32_t n = num_kept - room; n > 0; n--) evict(c, s);
    for (int32_t k = 0; k < num_keys; k++) c->in_use[local[k]] = 0;
    for (int32_t k = 0; k < num_keys; k++) {
        if (kept[k]) insert(c, s, local[k], keys[k], next_uses[k]);
        else if (c->place[local[k]] != NOT_HELD)
            use(c, s, local[k], keys[k], 0, next_uses[k], c->num_held);
    }
    return num_hits;
}

/* For every use the number of the key's next use within its run; NEVER where there is none. */
static void find_next_uses(const int32_t *keys, int64_t first, int64_t stop, int64_t *next,
                           int64_t *last, int64_t num_keys) {
    for (int64_t key = 0; key < num_keys; key++) last[key] = NEVER;
    for (int64_t use = stop - 1; use >= first; use--) {
        next[use] = last[keys[use]];
        last[keys[use]] = use;
    }
}

/* Raised with every change of what is exported; compiled.py uses no other version. */
EXPORT int moe_replay_version(void) { return 3; }

/* Serves runs of events, each from empty caches.
 *
 * keys [starts[num_events]]: key numbers, distinct within an event; cache g holds the keys from
 * g * keys_each on. starts [num_events + 1]. runs [num_runs + 1]: the events at which they begin.
 * num_slots [num_caches]. order [num_caches * keys_each]: for the static rule. gates
 * [starts[num_events]]: mean gate weight of each use, for MRS. hits [num_events].
 * Returns 0, or 1 where memory is short.
 */
EXPORT int moe_replay_events(int rule, double parameter, const int64_t *order,
                             const double *gates, int32_t layer_keys, const int32_t *keys,
                             const int64_t *starts, const int64_t *runs, int64_t num_runs,
                             int32_t num_caches, int32_t keys_each, const int32_t *num_slots,
                             int64_t *hits) {
    int64_t num_events = runs[num_runs], num_uses = starts[num_events], widest = 1;
    int64_t all_keys = (int64_t)num_caches * keys_each;
    for (int64_t e = 0; e < num_events; e++)
        if (starts[e + 1] - starts[e] > widest) widest = starts[e + 1] - starts[e];
    int looks_ahead = rule == BELADY || rule == BELADY_BYPASS;
    cache shape = {.num_keys = keys_each};
    size_t each = lay_out(&shape, NULL);
    cache *caches = calloc((size_t)num_caches, sizeof(cache));
    char *memory = malloc(each * (size_t)num_caches);
    int64_t *next = calloc((size_t)(looks_ahead ? num_uses : widest) + 1, sizeof(int64_t));
    int64_t *last = malloc(sizeof(int64_t) * (size_t)(all_keys + 1));
    uint8_t *kept = malloc((size_t)widest);
    int failed = !caches || !memory || !next || !last || !kept;
    settings s = {(enum rule)rule, parameter, order, layer_keys};
    for (int32_t g = 0; !failed && g < num_caches; g++) {
        caches[g] = shape;
        caches[g].num_slots = num_slots[g];
        lay_out(&caches[g], memory + each * (size_t)g);
    }
    for (int64_t run = 0; !failed && run < num_runs; run++) {
        for (int32_t g = 0; g < num_caches; g++)
            clear(&caches[g], rule == AGING_LFU ? -INFINITY : 0.0);
        if (looks_ahead)
            find_next_uses(keys, starts[runs[run]], starts[runs[run + 1]], next, last, all_keys);
        for (int64_t e = runs[run]; e < runs[run + 1]; e++) {
            int64_t start = starts[e];
            int32_t count = (int32_t)(starts[e + 1] - start);
            int32_t g = count ? keys[start] / keys_each : 0;
            hits[e] = serve(&caches[g], &s, keys + start, count, g * keys_each,
                            looks_ahead ? next + start : next, gates ? gates + start : gates, kept);
        }
    }
    free(caches), free(memory), free(next), free(last), free(kept);
    return failed;
}
