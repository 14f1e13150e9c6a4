/* Replays recorded routing through the simple eviction policies, at the speed of the machine.
 *
 * The policies themselves are the Python classes beside this file: they serve live stores, and say
 * here by a code and a few numbers which rule they follow. This loop counts the hits that
 * `EvictionPolicy.access` would, event by event, for caches that start empty.
 *
 * A cache holds keys 0 .. num_keys-1. All keys of an event are looked up before any is inserted;
 * an event that needs more slots than there are evicts nothing, and the last of its missing keys
 * fill the free slots.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NOBODY (-1)
#define HIGHEST INT64_MAX

enum rule { LRU = 0, LFU = 1, SLRU = 2, SIEVE = 3, STATIC = 4, BELADY = 5, BELADY_BYPASS = 6 };

/* Keys in a line, the next to go first. */
typedef struct {
    int32_t first, last, length;
} line;

typedef struct {
    int32_t num_keys, num_slots, num_held, width, hand;
    line lines[2];      /* LRU uses the first; SLRU: on probation, protected */
    uint8_t *held;      /* 0 or, in SLRU, 1 + the line */
    uint8_t *mark;      /* in the event that is served; SIEVE: used since the hand came by */
    int32_t *before, *after;
    int32_t *queue;     /* SIEVE, the oldest first */
    int32_t *slot;      /* static */
    int64_t *uses;      /* LFU */
    int64_t *ranks;     /* a tree of minima over 2 * width places; the keys from `width` on */
} cache;

static void line_add(cache *c, int l, int32_t key) {
    line *to = &c->lines[l];
    c->before[key] = to->last;
    c->after[key] = NOBODY;
    *(to->last == NOBODY ? &to->first : &c->after[to->last]) = key;
    to->last = key;
    to->length++;
    c->held[key] = (uint8_t)(1 + l);
}

static void line_take(cache *c, int32_t key) {
    line *from = &c->lines[c->held[key] - 1];
    int32_t before = c->before[key], after = c->after[key];
    *(before == NOBODY ? &from->first : &c->after[before]) = after;
    *(after == NOBODY ? &from->last : &c->before[after]) = before;
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

static int32_t line_victim(const cache *c, int l) {
    int32_t key = c->lines[l].first;
    while (key != NOBODY && c->mark[key]) key = c->after[key];
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

typedef struct {
    enum rule rule;
    double protected_share;
    const int64_t *order; /* static: the place of each key's weight among all weights */
    int64_t clock;
} settings;

static int64_t rank_of(cache *c, settings *s, int32_t key, int32_t global, int64_t next_use) {
    switch (s->rule) {
    case LFU: return (++c->uses[key] << 40) + ++s->clock;
    case STATIC: return (s->order[global] << 32) + c->slot[key];
    default: return -next_use;
    }
}

/* Finds a victim that the event does not use and lets it go; returns its slot. */
static int32_t evict(cache *c, const settings *s, const int32_t *keys, int32_t num_keys) {
    int32_t key;
    switch (s->rule) {
    case LRU:
        line_take(c, line_victim(c, 0));
        break;
    case SLRU:
        key = line_victim(c, 0);
        line_take(c, key == NOBODY ? line_victim(c, 1) : key);
        c->num_held--;
        slru_balance(c, s->protected_share);
        return 0;
    case SIEVE:
        sieve_evict(c, keys, num_keys);
        return 0;
    default: /* ranked; keys of the event rank highest where they must stay */
        key = lowest(c);
        set_rank(c, key, HIGHEST);
        c->held[key] = 0;
        c->num_held--;
        return c->slot[key];
    }
    c->num_held--;
    return 0;
}

static void insert(cache *c, settings *s, int32_t key, int32_t global, int64_t next_use) {
    c->num_held++;
    if (s->rule == LRU || s->rule == SLRU) {
        line_add(c, 0, key);
        return;
    }
    c->held[key] = 1;
    if (s->rule == SIEVE) {
        c->mark[key] = 0;
        c->queue[c->num_held - 1] = key;
    } else {
        set_rank(c, key, rank_of(c, s, key, global, next_use));
    }
}

static void touch(cache *c, settings *s, int32_t key, int32_t global, int64_t next_use) {
    switch (s->rule) {
    case LRU:
        line_take(c, key);
        line_add(c, 0, key);
        return;
    case SLRU:
        line_take(c, key);
        line_add(c, 1, key);
        slru_balance(c, s->protected_share);
        return;
    case SIEVE: c->mark[key] = 1; return;
    case STATIC: return;
    default: set_rank(c, key, rank_of(c, s, key, global, next_use));
    }
}

/* Keeps a newcomer only if it ranks no lower than what it would push out. */
static void settle(cache *c, settings *s, int32_t key, int32_t global, int64_t next_use) {
    c->slot[key] = c->num_held;
    if (c->num_held >= c->num_slots) {
        int32_t victim = lowest(c);
        int declined = s->rule == STATIC ? s->order[global] < c->ranks[c->width + victim] >> 32
                                         : -next_use < c->ranks[c->width + victim];
        if (declined) return;
        c->slot[key] = evict(c, s, NULL, 0);
    }
    insert(c, s, key, global, next_use);
}

static int64_t serve(cache *c, settings *s, const int32_t *keys, int32_t num_keys,
                     int32_t first_key, const int64_t *next_uses, uint8_t *kept) {
    int32_t local[num_keys ? num_keys : 1];
    int32_t num_hits = 0;
    for (int32_t k = 0; k < num_keys; k++) {
        local[k] = keys[k] - first_key;
        kept[k] = !c->held[local[k]]; /* to be inserted */
        num_hits += !kept[k];
    }
    int32_t room = c->num_slots - c->num_held, num_missing = num_keys - num_hits;
    int may_decline = s->rule == STATIC || s->rule == BELADY_BYPASS;
    if (num_keys > c->num_slots) {
        for (int32_t k = 0, skip = num_missing - room; k < num_keys && skip > 0; k++)
            if (kept[k]) kept[k] = 0, skip--;
    } else if (may_decline) {
        for (int32_t k = 0; k < num_keys; k++)
            if (!kept[k]) touch(c, s, local[k], keys[k], next_uses[k]);
        for (int32_t k = 0; k < num_keys; k++)
            if (kept[k]) settle(c, s, local[k], keys[k], next_uses[k]);
        return num_hits;
    } else if (num_missing > room) {
        int is_line = s->rule == LRU || s->rule == SLRU, is_ranked = !is_line && s->rule != SIEVE;
        for (int32_t k = 0; k < num_keys; k++) {
            if (is_line) c->mark[local[k]] = 1;
            if (is_ranked && !kept[k]) set_rank(c, local[k], HIGHEST);
        }
        for (int32_t n = num_missing - room; n > 0; n--) evict(c, s, local, num_keys);
        for (int32_t k = 0; k < num_keys; k++)
            if (is_line) c->mark[local[k]] = 0;
    }
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

static void clear(cache *c) {
    c->num_held = c->hand = 0;
    c->lines[0] = c->lines[1] = (line){NOBODY, NOBODY, 0};
    memset(c->held, 0, c->num_keys);
    memset(c->mark, 0, c->num_keys);
    memset(c->uses, 0, sizeof(int64_t) * c->num_keys);
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
    c->ranks = take(&next, 2 * (size_t)c->width * sizeof(int64_t));
    c->before = take(&next, n * sizeof(int32_t));
    c->after = take(&next, n * sizeof(int32_t));
    c->queue = take(&next, n * sizeof(int32_t));
    c->slot = take(&next, n * sizeof(int32_t));
    c->held = take(&next, n);
    c->mark = take(&next, n);
    return (size_t)(next - memory);
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

/* Serves runs of events, each from empty caches.
 *
 * keys [starts[num_events]]: key numbers, distinct within an event; cache g holds the keys from
 * g * keys_each on. starts [num_events + 1]. runs [num_runs + 1]: the events at which they begin.
 * num_slots [num_caches]. order [num_caches * keys_each]: for the static rule. hits [num_events].
 * Returns 0, or 1 where memory is short.
 */
EXPORT int moe_replay_events(int rule, double protected_share, const int64_t *order,
                             const int32_t *keys, const int64_t *starts, const int64_t *runs,
                             int64_t num_runs, int32_t num_caches, int32_t keys_each,
                             const int32_t *num_slots, int64_t *hits) {
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
    settings s = {.rule = (enum rule)rule, .protected_share = protected_share, .order = order};
    for (int32_t g = 0; !failed && g < num_caches; g++) {
        caches[g] = shape;
        caches[g].num_slots = num_slots[g];
        lay_out(&caches[g], memory + each * (size_t)g);
    }
    for (int64_t run = 0; !failed && run < num_runs; run++) {
        for (int32_t g = 0; g < num_caches; g++) clear(&caches[g]);
        if (looks_ahead)
            find_next_uses(keys, starts[runs[run]], starts[runs[run + 1]], next, last, all_keys);
        for (int64_t e = runs[run]; e < runs[run + 1]; e++) {
            int64_t start = starts[e];
            int32_t count = (int32_t)(starts[e + 1] - start);
            int32_t g = count ? keys[start] / keys_each : 0;
            hits[e] = serve(&caches[g], &s, keys + start, count, g * keys_each,
                            looks_ahead ? next + start : next, kept);
        }
    }
    free(caches), free(memory), free(next), free(last), free(kept);
    return failed;
}
