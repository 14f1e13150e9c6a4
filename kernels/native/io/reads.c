/* Reads in flight without the interpreter: threads that serve the blocks of submitted reads, demands before read-aheads.
 *
 * A Python thread that ends a read needs the interpreter's lock, which the computing thread holds: each waits for the other,
 * several times a read. These threads never need it. Finished reads stay in a list until the computing thread takes them; a
 * counter that can be read without a call tells whether there are any. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>

#include "kernels.h"

enum { PATIENCE_S = 1, FIELDS = 6, FILE_ENDED = -1, WORTH_A_CALL = 512 << 10 };

/* One positional read: `place` bytes after the start of the slot, of which `needed` bytes must arrive. */
typedef struct {
    int64_t fd, offset, place, size, needed;
} Block;

typedef struct Read {
    struct Read *previous, *next; /* neighbours in its list */
    char *into;
    int64_t name; /* the caller's name for it; no two reads have the same */
    int64_t num_blocks, next_block, unfinished, bytes, ended_ns;
    int64_t error, error_block, error_offset; /* errno or FILE_ENDED, of the first block that failed */
    int is_ahead;
    int64_t num_steps;
    const OrderStep *steps; /* done after the last block, before the end is told */
    Block blocks[];
} Read;

typedef struct {
    Read *first, *last;
} List;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t ready, changed;
    atomic_llong events; /* reads that ended, and calls of moe_reads_kick */
    List demands, aheads, serving, finished; /* each read stands in one of them: in `serving` once its last block was begun */
    int num_idle, is_called; /* threads without work, and whether one is being woken */
    int closed, num_sleepers, num_threads;
    pthread_mutex_t ordering; /* one expert at a time is put in order, with this scratch memory */
    char *scratch;
    int64_t scratch_bytes;
    pthread_t threads[];
} Queue;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void append(List *list, Read *read) {
    read->previous = list->last;
    read->next = NULL;
    *(list->last ? &list->last->next : &list->first) = read;
    list->last = read;
}

static void take_out(List *list, Read *read) {
    *(read->previous ? &read->previous->next : &list->first) = read->next;
    *(read->next ? &read->next->previous : &list->last) = read->previous;
}

static List *waiting_list(Queue *queue, const Read *read) { return read->is_ahead ? &queue->aheads : &queue->demands; }

/* Reads a block; returns errno, FILE_ENDED or 0, and how many bytes came. An offset of -1 means where the file stands, as in
 * a pipe. */
static int64_t fill(const Block *block, char *into, int64_t *done) {
    while (*done < block->needed) {
        struct iovec part = {into + block->place + *done, (size_t)(block->size - *done)};
        ssize_t moved = preadv2((int)block->fd, &part, 1, block->offset < 0 ? -1 : block->offset + *done, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        if (moved == 0) return FILE_ENDED;
        *done += moved;
    }
    return 0;
}

/* Wakes threads without holding the lock: a thread that wakes up on another processor would only wait for it. */
static void unlock_and_tell(Queue *queue) {
    atomic_fetch_add(&queue->events, 1);
    const int has_sleepers = queue->num_sleepers > 0;
    pthread_mutex_unlock(&queue->lock);
    if (has_sleepers) pthread_cond_broadcast(&queue->changed);
}

/* Wakes one thread if there is work and none was woken. That takes a tenth of the time of a small read, so the computing
 * thread does it once for reads submitted together. A thread that is about to read a large block, or begins to wait, wakes
 * more. */
static void unlock_and_call(Queue *queue) {
    const int calls = (queue->demands.first || queue->aheads.first) && queue->num_idle && !queue->is_called;
    queue->is_called |= calls;
    pthread_mutex_unlock(&queue->lock);
    if (calls) pthread_cond_signal(&queue->ready);
}

/* Puts what was read in order; returns errno or 0. */
static int64_t put_in_order(Queue *queue, const Read *read) {
    const int64_t needed = order_scratch_bytes(read->steps, read->num_steps);
    int64_t error = 0;
    pthread_mutex_lock(&queue->ordering);
    if (needed > queue->scratch_bytes) {
        free(queue->scratch);
        queue->scratch = malloc((size_t)needed);
        queue->scratch_bytes = queue->scratch ? needed : 0;
        error = queue->scratch ? 0 : ENOMEM;
    }
    if (!error) moe_put_in_order(read->steps, read->num_steps, read->into, queue->scratch);
    pthread_mutex_unlock(&queue->ordering);
    return error;
}

static void serve_block(Queue *queue, Read *read, int64_t number) {
    const Block *block = &read->blocks[number];
    int64_t done = 0;
    if (block->size >= WORTH_A_CALL)
        unlock_and_call(queue);
    else
        pthread_mutex_unlock(&queue->lock);
    const int64_t error = fill(block, read->into, &done);
    pthread_mutex_lock(&queue->lock);
    read->bytes += done;
    if (error && !read->error) {
        read->error = error;
        read->error_block = number;
        read->error_offset = block->offset + done;
    }
    if (--read->unfinished == 0) {
        if (read->num_steps && !read->error) { /* nothing else removes it from `serving` */
            pthread_mutex_unlock(&queue->lock);
            read->error = put_in_order(queue, read);
            pthread_mutex_lock(&queue->lock);
        }
        read->ended_ns = now_ns();
        take_out(&queue->serving, read);
        append(&queue->finished, read);
        unlock_and_tell(queue);
        pthread_mutex_lock(&queue->lock);
    }
}

static void *serve(void *of) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    while (!queue->closed) {
        Read *read = queue->demands.first ? queue->demands.first : queue->aheads.first;
        if (!read) {
            queue->num_idle++;
            pthread_cond_wait(&queue->ready, &queue->lock);
            queue->num_idle--;
            queue->is_called = 0;
            continue;
        }
        const int64_t number = read->next_block++;
        if (read->next_block == read->num_blocks) {
            take_out(waiting_list(queue, read), read);
            append(&queue->serving, read);
        }
        serve_block(queue, read, number);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static Read *find(const List *list, int64_t name) {
    Read *read = list->first;
    while (read && read->name != name) read = read->next;
    return read;
}

/* Ends the threads once they have read their current blocks. Finished reads can still be taken; the rest never ends. */
MOE_EXPORT void moe_reads_stop(void *of) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    queue->closed = 1;
    unlock_and_tell(queue);
    pthread_mutex_lock(&queue->lock);
    pthread_cond_broadcast(&queue->ready);
    while (queue->num_sleepers) pthread_cond_wait(&queue->ready, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
    while (queue->num_threads) pthread_join(queue->threads[--queue->num_threads], NULL);
}

/* Stops a queue and frees it. */
MOE_EXPORT void moe_reads_close(void *of) {
    Queue *queue = of;
    moe_reads_stop(queue);
    List *lists[] = {&queue->demands, &queue->aheads, &queue->serving, &queue->finished};
    for (int i = 0; i < 4; i++)
        for (Read *read; (read = lists[i]->first);) {
            take_out(lists[i], read);
            free(read);
        }
    free(queue->scratch);
    free(queue);
}

/* Starts a queue with its threads; NULL without memory or a thread. */
MOE_EXPORT void *moe_reads_open(int num_threads) {
    Queue *queue = calloc(1, sizeof *queue + (size_t)num_threads * sizeof(pthread_t));
    if (!queue) return NULL;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_mutex_init(&queue->ordering, NULL);
    pthread_cond_init(&queue->ready, NULL);
    pthread_cond_init(&queue->changed, NULL);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the application's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (queue->num_threads < num_threads) {
        if (pthread_create(&queue->threads[queue->num_threads], NULL, serve, queue)) break;
        queue->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (queue->num_threads) return queue;
    moe_reads_close(queue);
    return NULL;
}

/* The number of events so far. */
MOE_EXPORT const void *moe_reads_events(void *of) { return &((Queue *)of)->events; }

/* Queues a read of at least one block into a slot, under a new name, with what puts it in order; moe_reads_start must
 * follow. Returns 0 without memory. */
MOE_EXPORT int moe_reads_submit(void *of, int64_t name, const void *blocks, int64_t num_blocks, const void *steps,
                                int64_t num_steps, char *into, int is_ahead) {
    Queue *queue = of;
    const size_t block_bytes = (size_t)num_blocks * sizeof(Block), step_bytes = (size_t)num_steps * sizeof(OrderStep);
    Read *read = malloc(sizeof *read + block_bytes + step_bytes);
    if (!read) return 0;
    OrderStep *own_steps = (OrderStep *)(read->blocks + num_blocks);
    *read = (Read){.into = into, .name = name, .num_blocks = num_blocks, .unfinished = num_blocks, .is_ahead = is_ahead,
                   .num_steps = num_steps, .steps = own_steps};
    for (int64_t i = 0; i < num_blocks; i++) read->blocks[i] = ((const Block *)blocks)[i];
    for (int64_t i = 0; i < num_steps; i++) own_steps[i] = ((const OrderStep *)steps)[i];
    pthread_mutex_lock(&queue->lock);
    append(waiting_list(queue, read), read);
    pthread_mutex_unlock(&queue->lock);
    return 1;
}

/* Lets the threads serve what was submitted. */
MOE_EXPORT void moe_reads_start(void *of) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    unlock_and_call(queue);
}

/* Turns what is left of a read-ahead into a demand. */
MOE_EXPORT void moe_reads_promote(void *of, int64_t name) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    Read *read = find(&queue->aheads, name);
    if (read) {
        take_out(&queue->aheads, read);
        read->is_ahead = 0;
        append(&queue->demands, read);
    }
    pthread_mutex_unlock(&queue->lock);
}

/* Takes back a read if none of its blocks was begun; returns whether it did. */
MOE_EXPORT int moe_reads_cancel(void *of, int64_t name) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    Read *read = find(&queue->aheads, name);
    if (!read) read = find(&queue->demands, name);
    if (read && read->next_block) read = NULL;
    if (read) take_out(waiting_list(queue, read), read);
    pthread_mutex_unlock(&queue->lock);
    free(read);
    return read != NULL;
}

/* Lists finished reads, FIELDS numbers each: name, bytes, error, the block and the place in the file of the error, and how
 * many ns ago it ended. Returns how many. They stay listed until moe_reads_forget, so an interrupted caller can ask again. */
MOE_EXPORT int64_t moe_reads_ended(void *of, int64_t *out, int64_t room) {
    Queue *queue = of;
    int64_t count = 0;
    pthread_mutex_lock(&queue->lock);
    for (const Read *read = queue->finished.first; read && count < room; read = read->next, count++) {
        const int64_t fields[FIELDS] = {read->name, read->bytes, read->error, read->error_block, read->error_offset,
                                        now_ns() - read->ended_ns};
        memcpy(out + FIELDS * count, fields, sizeof fields);
    }
    pthread_mutex_unlock(&queue->lock);
    return count;
}

/* Forgets the first finished reads. */
MOE_EXPORT void moe_reads_forget(void *of, int64_t count) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    for (Read *read; count > 0 && (read = queue->finished.first); count--) {
        take_out(&queue->finished, read);
        free(read);
    }
    pthread_mutex_unlock(&queue->lock);
}

/* Sleeps until the number of events changes, or for a while, so that the caller can look for signals. */
MOE_EXPORT void moe_reads_wait(void *of, int64_t seen) {
    Queue *queue = of;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&queue->lock);
    queue->num_sleepers++;
    int num_calls = 0;
    for (const Read *read = queue->demands.first; read && num_calls < queue->num_idle; read = read->next) num_calls++;
    pthread_mutex_unlock(&queue->lock);
    while (num_calls-- > 0) pthread_cond_signal(&queue->ready);
    pthread_mutex_lock(&queue->lock);
    while (atomic_load(&queue->events) == seen)
        if (pthread_cond_timedwait(&queue->changed, &queue->lock, &until)) break;
    if (--queue->num_sleepers == 0 && queue->closed) pthread_cond_broadcast(&queue->ready);
    pthread_mutex_unlock(&queue->lock);
}

/* Wakes the waiting threads: something other than a read has changed. */
MOE_EXPORT void moe_reads_kick(void *of) {
    Queue *queue = of;
    pthread_mutex_lock(&queue->lock);
    unlock_and_tell(queue);
}
