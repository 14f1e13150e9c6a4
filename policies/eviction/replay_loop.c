/* Replays recorded routing through the eviction policies that a rule describes, at the speed of the
 * machine.
 *
 * The policies themselves are the Python classes beside this file: they serve live stores, and say
 * here by a code and a few numbers which rule they follow. This loop counts the hits that
 * `EvictionPolicy.access` would, event by event, for caches that start empty.
 *
 * All keys of an event are looked up before any is inserted; of an event that needs more slots than
 * there are the held keys stay, and the first of the missing ones are not kept.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NO_KEY (-1)
#define HIGHEST INT64_MAX

/* A cache has lines by recency, a tree of ranks, a list of what is held, scores. A rule uses some of
 * these parts. */

/* Keys in a line, the next to go first. */
typedef struct {
    int32_t first, last, length;
} line;

typedef struct {
    int32_t num_keys, num_slots, num_held, width, hand;
    line lines[2];      /* LRU, expert buffering use the first; SLRU: on probation, protected */
    uint8_t *held;      /* 0 or, in SLRU, 1 + the line */
    uint8_t *mark;      /* in the event that is served; SIEVE: used since the hand came by */
    int32_t *before, *after;
    int32_t *queue;     /* SIEVE, the oldest first; others: what is held, in any order */
    int32_t *slot;      /* static: the slot; others: the place in the queue */
    int64_t *uses;      /* so far (LFU, LEC), or since it came in (LFRU, GDSF) */
    int64_t *last_use;  /* by the cache's clock */
    int64_t *ranks;     /* a tree of minima over 2 * width places; the keys from `width` on */
    double *score;      /* MRS: moving average of gate weights; ageing: log2 of the uses' weight */
    int64_t clock;      /* uses so far */
    int64_t floor;      /* GDSF: rank of the last victim */
    double now;         /* ageing: half-lives so far */
    uint64_t random;
} cache;

static void line_add(cache *c, int l, int32_t key) {
    line *to = &c->lines[l];
    c->before[key] = to->last;
    c->after[key] = NO_KEY;
    *(to->last == NO_KEY ? &to->first : &c->after[to->last]) = key;
    to->last = key;
    to->length++;
    c->held[key] = (uint8_t)(1 + l);
}

static void line_take(cache *c, int32_t key) {
    line *from = &c->lines[c->held[key] - 1];
    int32_t before = c->before[key], after = c->after[key];
    *(before == NO_KEY ? &from->first : &c->after[before]) = after;
    *(after == NO_KEY ? &from->last : &c->before[after]) = before;
    from->length--;
    c->held[key] = 0;
}

static void set_rank(cache *c, int32_t key, int64_t rank) {
    int64_t place = c->width + key;
    c->ranks[place] = rank;
    for (place >>= 1; place; place >>= 1) {
        int64_t left = c->ranks[2 * place], right = c->ranks[2 * place + 1];
        int64_t least = left < right ? left : right;
        if (c->ranks[place] == least) return;
        c->ranks[place] = least;
    }
}

static int32_t lowest(const cache *c) {
    int64_t place = 1;
    while (place < c->width) place = 2 * place + (c->ranks[2 * place] != c->ranks[place]);
    return (int32_t)(place - c->width);
}

/* What is held in any order: the last one takes the place of one that leaves. */
static void list_add(cache *c, int32_t key) {
    c->held[key] = 1;
    c->slot[key] = c->num_held - 1;
    c->queue[c->num_held - 1] = key;
}

static void list_take(cache *c, int32_t key) {
    int32_t last = c->queue[c->num_held - 1];
    c->held[key] = 0;
    c->queue[c->slot[key]] = last;
    c->slot[last] = c->slot[key];
}

static void clear(cache *c, double score) {
    c->num_held = c->hand = 0;
    c->clock = c->floor = 0;
    c->now = 0.0;
    c->random = 0;
    c->lines[0] = c->lines[1] = (line){NO_KEY, NO_KEY, 0};
    memset(c->held, 0, c->num_keys);
    memset(c->mark, 0, c->num_keys);
    memset(c->uses, 0, sizeof(int64_t) * c->num_keys);
    for (int32_t key = 0; key < c->num_keys; key++) c->score[key] = score;
    for (int32_t place = 0; place < 2 * c->width; place++) c->ranks[place] = HIGHEST;
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
    c->uses = take(&next, n * sizeof(int64_t));
    c->last_use = take(&next, n * sizeof(int64_t));
    c->score = take(&next, n * sizeof(double));
    c->ranks = take(&next, 2 * (size_t)c->width * sizeof(int64_t));
    c->before = take(&next, n * sizeof(int32_t));
    c->after = take(&next, n * sizeof(int32_t));
    c->queue = take(&next, n * sizeof(int32_t));
    c->slot = take(&next, n * sizeof(int32_t));
    c->held = take(&next, n);
    c->mark = take(&next, n);
    return (size_t)(next - memory);
}

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

/* By which part of a cache a rule finds its victim. */
static int is_line(enum rule r) { return r == LRU || r == SLRU || r == EXPERT_BUFFERING; }
static int is_list(enum rule r) { return r == LFRU || r == MRS || r == RANDOM; }
static int is_ranked(enum rule r) { return !is_line(r) && !is_list(r) && r != SIEVE; }
static int may_decline(enum rule r) { return r == STATIC || r == BELADY_BYPASS || r == LEC; }

/* The protected line may hold this share of all that is held, and one key at least. */
static void slru_balance(cache *c, double share) {
    line *protected = &c->lines[1];
    for (;;) {
        double bound = share * c->num_held;
        if (protected->length <= (bound > 1.0 ? bound : 1.0)) return;
        int32_t oldest = protected->first;
        line_take(c, oldest);
        line_add(c, 0, oldest);
    }
}

/* The first of a line, or the last of all, that the event does not use. */
static int32_t line_first(const cache *c, int l) {
    int32_t key = c->lines[l].first;
    while (key != NO_KEY && c->mark[key]) key = c->after[key];
    return key;
}

static int32_t line_last(const cache *c) {
    int32_t key = c->lines[0].last;
    while (key != NO_KEY && c->mark[key]) key = c->before[key];
    return key;
}

static void sieve_evict(cache *c, const int32_t *keys, int32_t num_keys) {
    int32_t place = c->hand;
    for (;; place++) {
        if (place >= c->num_held) place = 0;
        int32_t key = c->queue[place];
        int in_use = 0;
        for (int32_t k = 0; k < num_keys; k++) in_use |= keys[k] == key;
        if (in_use) continue;
        if (!c->mark[key]) break;
        c->mark[key] = 0;
    }
    c->held[c->queue[place]] = 0;
    c->num_held--;
    memmove(c->queue + place, c->queue + place + 1, sizeof(int32_t) * (c->num_held - place));
    c->hand = place == c->num_held ? 0 : place;
}

static int64_t aged_rank(cache *c, double half_life, int32_t key, int32_t num_held) {
    c->now += 1 / (half_life * (num_held > 1 ? num_held : 1));
    double ahead = c->score[key] - c->now;
    c->score[key] = c->now + log2(1 + exp2(ahead < 1000.0 ? ahead : 1000.0));
    int64_t rank; /* positive numbers are ordered as their bits are */
    memcpy(&rank, &c->score[key], sizeof rank);
    return rank;
}

/* The new rank of a key that is used; `num_held` keys were held before. */
static int64_t rank_of(cache *c, const settings *s, int32_t key, int32_t num_held, int32_t global,
                       int64_t next_use) {
    switch (s->rule) {
    case LFU:
    case LEC: return (++c->uses[key] << 32) + ++c->clock;
    case GDSF: return ((c->floor + ++c->uses[key]) << 32) + ++c->clock;
    case AGING_LFU: return aged_rank(c, s->parameter, key, num_held);
    case STATIC: return (s->order[global] << 32) + c->slot[key];
    default: return -next_use;
    }
}

/* Of the keys that the event does not use the one of least worth, the oldest among equals. */
static int32_t list_lowest(const cache *c, enum rule rule) {
    int32_t lowest = NO_KEY;
    double least = 0.0, least_age = 1.0;
    for (int32_t place = 0; place < c->num_held; place++) {
        int32_t key = c->queue[place];
        if (c->mark[key]) continue;
        /* LFRU's worth is uses over age; products compare two of them without dividing */
        double age = rule == MRS ? 1.0 : (double)(c->clock + 1 - c->last_use[key]);
        double worth = rule == MRS ? c->score[key] : (double)c->uses[key];
        double own = worth * least_age, other = least * age;
        int is_older = lowest == NO_KEY || c->last_use[key] < c->last_use[lowest];
        if (lowest == NO_KEY || own < other || (own == other && is_older))
            lowest = key, least = worth, least_age = age;
    }
    return lowest;
}

/* Any number below `bound`, by the generator of `RandomChoice`. */
static int32_t draw(cache *c, int32_t bound) {
    c->random = c->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int32_t)((c->random >> 33) * (uint64_t)bound >> 31);
}

static int32_t random_victim(cache *c) {
    for (int attempt = 0; attempt < 4; attempt++) {
        int32_t key = c->queue[draw(c, c->num_held)];
        if (!c->mark[key]) return key;
    }
    int32_t num_free = 0;
    for (int32_t place = 0; place < c->num_held; place++) num_free += !c->mark[c->queue[place]];
    int32_t chosen = draw(c, num_free);
    for (int32_t place = 0;; place++)
        if (!c->mark[c->queue[place]] && chosen-- == 0) return c->queue[place];
}

/* Evicts a key that the event does not use; returns its slot. */
static int32_t evict(cache *c, const settings *s, const int32_t *keys, int32_t num_keys) {
    int32_t key = NO_KEY;
    if (s->rule == SIEVE) {
        sieve_evict(c, keys, num_keys);
        return 0;
    }
    if (is_line(s->rule)) {
        key = s->rule == EXPERT_BUFFERING ? line_last(c) : line_first(c, 0);
        line_take(c, key == NO_KEY ? line_first(c, 1) : key);
    } else if (is_list(s->rule)) {
        list_take(c, s->rule == RANDOM ? random_victim(c) : list_lowest(c, s->rule));
    } else { /* keys of the event rank highest where they must stay */
        key = lowest(c);
        if (s->rule == GDSF) {
            if (c->ranks[1] >> 32 > c->floor) c->floor = c->ranks[1] >> 32;
            c->uses[key] = 0;
        }
        set_rank(c, key, HIGHEST);
        c->held[key] = 0;
    }
    c->num_held--;
    if (s->rule == SLRU) slru_balance(c, s->parameter);
    return is_ranked(s->rule) ? c->slot[key] : 0;
}

static void insert(cache *c, const settings *s, int32_t key, int32_t global, int64_t next_use) {
    c->num_held++;
    if (is_line(s->rule)) {
        line_add(c, 0, key);
    } else if (is_list(s->rule)) {
        list_add(c, key);
        c->uses[key] = 1;
        c->last_use[key] = ++c->clock;
    } else if (s->rule == SIEVE) {
        c->held[key] = 1;
        c->mark[key] = 0;
        c->queue[c->num_held - 1] = key;
    } else {
        c->held[key] = 1;
        set_rank(c, key, rank_of(c, s, key, c->num_held - 1, global, next_use));
    }
}

static void touch(cache *c, const settings *s, int32_t key, int32_t global, int64_t next_use) {
    switch (s->rule) {
    case LRU:
    case SLRU:
        line_take(c, key);
        line_add(c, s->rule == SLRU, key);
        if (s->rule == SLRU) slru_balance(c, s->parameter);
        return;
    case SIEVE: c->mark[key] = 1; return;
    case LFRU:
    case MRS:
        c->uses[key]++;
        c->last_use[key] = ++c->clock;
        return;
    case STATIC:
    case EXPERT_BUFFERING:
    case RANDOM: return;
    default: set_rank(c, key, rank_of(c, s, key, c->num_held, global, next_use));
    }
}

static int declines(const cache *c, const settings *s, int32_t key, int32_t global,
                    int64_t next_use) {
    int64_t lowest_rank = c->ranks[1];
    switch (s->rule) {
    case STATIC: return s->order[global] < lowest_rank >> 32;
    case LEC: return c->uses[key] + 1 <= lowest_rank >> 32;
    default: return -next_use < lowest_rank;
    }
}

/* Keeps a newcomer only if it is worth no less than what it would push out. */
static void keep_if_better(cache *c, const settings *s, int32_t key, int32_t global, int64_t next_use) {
    c->slot[key] = c->num_held;
    if (c->num_held >= c->num_slots) {
        if (declines(c, s, key, global, next_use)) {
            c->uses[key] += s->rule == LEC;
            return;
        }
        c->slot[key] = evict(c, s, NULL, 0);
    }
    insert(c, s, key, global, next_use);
}

/* Averages the gate weights of an event into the scores of its layer. */
static void average(cache *c, const settings *s, const int32_t *local, int32_t num_keys,
                    const double *gates) {
    double *score = c->score + (num_keys ? local[0] / s->layer_keys * s->layer_keys : 0);
    for (int32_t e = 0; e < s->layer_keys; e++) score[e] *= 1 - s->parameter;
    for (int32_t k = 0; k < num_keys; k++) c->score[local[k]] += s->parameter * gates[k];
}

/* Evicts as many keys as the missing ones need room, but none that the event uses. */
static void make_room(cache *c, const settings *s, const int32_t *local, int32_t num_keys,
                      int32_t num_evicted) {
    for (int32_t k = 0; k < num_keys; k++) {
        if (is_line(s->rule) || is_list(s->rule)) c->mark[local[k]] = 1;
        if (is_ranked(s->rule) && c->held[local[k]]) set_rank(c, local[k], HIGHEST);
    }
    for (int32_t n = num_evicted; n > 0; n--) evict(c, s, local, num_keys);
    if (s->rule == SIEVE) return; /* its marks say something else */
    for (int32_t k = 0; k < num_keys; k++) c->mark[local[k]] = 0;
}

static int64_t serve(cache *c, const settings *s, const int32_t *keys, int32_t num_keys,
                     int32_t first_key, const int64_t *next_uses, const double *gates,
                     uint8_t *kept) {
    int32_t local[num_keys ? num_keys : 1];
    int32_t num_hits = 0;
    for (int32_t k = 0; k < num_keys; k++) {
        local[k] = keys[k] - first_key;
        kept[k] = !c->held[local[k]]; /* to be inserted */
        num_hits += !kept[k];
    }
    if (s->rule == MRS) average(c, s, local, num_keys, gates);
    if (may_decline(s->rule)) {
        for (int32_t k = 0; k < num_keys; k++)
            if (!kept[k]) touch(c, s, local[k], keys[k], next_uses[k]);
        for (int32_t k = 0; k < num_keys; k++)
            if (kept[k]) keep_if_better(c, s, local[k], keys[k], next_uses[k]);
        return num_hits;
    }
    int32_t num_skipped = num_keys > c->num_slots ? num_keys - c->num_slots : 0;
    for (int32_t k = 0, skip = num_skipped; skip > 0; k++)
        if (kept[k]) kept[k] = 0, skip--;
    int32_t num_kept = num_keys - num_hits - num_skipped, room = c->num_slots - c->num_held;
    if (num_kept > room) make_room(c, s, local, num_keys, num_kept - room);
    for (int32_t k = 0; k < num_keys; k++) {
        if (kept[k]) {
            c->slot[local[k]] = c->num_held;
            insert(c, s, local[k], keys[k], next_uses[k]);
        } else if (c->held[local[k]]) {
            touch(c, s, local[k], keys[k], next_uses[k]);
        }
    }
    return num_hits;
}

/* For every use the number of the key's next use within its run; HIGHEST where there is none. */
static void find_next_uses(const int32_t *keys, int64_t first, int64_t stop, int64_t *next,
                           int64_t *last, int64_t num_keys) {
    for (int64_t key = 0; key < num_keys; key++) last[key] = HIGHEST;
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
    cache shape = {.num_keys = keys_each, .width = 1};
    while (shape.width < keys_each) shape.width *= 2;
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
