/* A cache of keys 0 .. num_keys-1 as the rules of replay_loop.c need it: lines by recency, a tree
 * of ranks, a list of what is held, scores. A rule uses some of these parts.
 */

#ifndef MOE_REPLAY_CACHE_H
#define MOE_REPLAY_CACHE_H

#include <stdint.h>
#include <string.h>

#define NOBODY (-1)
#define HIGHEST INT64_MAX

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
    c->lines[0] = c->lines[1] = (line){NOBODY, NOBODY, 0};
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

#endif
