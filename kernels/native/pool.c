/* The thread pool, for calls of microseconds to milliseconds. Workers watch a generation counter for a bounded time and then
 * sleep on a condition variable: calls in close succession start in about a microsecond, and an idle pool costs nothing.
 *
 * The caller never waits for a worker to wake up: it opens the job, works on it, closes it, and waits only for workers that
 * are inside. `inside` and `open_job` are written and read in opposite order on the two sides with sequentially consistent
 * operations, so the caller sees a worker that finds the job open.
 *
 * OpenMP's threads spin for milliseconds after each parallel region of torch, and take half of our time when there are as
 * many workers as cores (measured: 27 instead of 60 GB/s). So a call may run on those threads instead. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "kernels.h"

/* Runs fn(context) on `num_threads` threads and returns when all are done: OpenMP's GOMP_parallel. */
typedef void (*ParallelFn)(PoolFn fn, void *context, unsigned num_threads, unsigned flags);

enum { MAX_THREADS = 256, TURNS_BEFORE_YIELD = 2000, TURNS_PER_CLOCK = 64, PAGE = 4096 };

static struct {
    pthread_mutex_t call_lock;  /* one call at a time */
    pthread_mutex_t sleep_lock; /* guards sleeping and waking */
    pthread_cond_t wake;
    atomic_uint generation; /* raised with every job, and to stop the workers */
    atomic_uint open_job;   /* generation of the job that may be entered, or 0 */
    atomic_int inside;      /* workers inside, or about to look at, the job */
    atomic_int sleepers;
    atomic_int stopping;
    atomic_llong spin_ns;
    ParallelFn parallel; /* OpenMP's threads, or NULL */
    PoolFn fn;
    void *context;
    int wanted_workers, num_workers;
    pthread_t workers[MAX_THREADS];
    void *scratch;
    int64_t scratch_bytes;
} pool = {
    .call_lock = PTHREAD_MUTEX_INITIALIZER,
    .sleep_lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void pool_relax(int turn) {
    if (turn < TURNS_BEFORE_YIELD)
        cpu_relax();
    else
        sched_yield();
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Waits until the generation differs from `seen` and returns it. */
static unsigned wait_for_generation(unsigned seen) {
    int64_t deadline = now_ns() + atomic_load_explicit(&pool.spin_ns, memory_order_relaxed);
    for (int turn = 1;; turn++) {
        unsigned current = atomic_load(&pool.generation);
        if (current != seen) return current;
        cpu_relax();
        if (turn % TURNS_PER_CLOCK == 0 && now_ns() > deadline) break;
    }
    pthread_mutex_lock(&pool.sleep_lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep_lock);
    return atomic_load(&pool.generation);
}

static void next_generation(void) {
    if (atomic_fetch_add(&pool.generation, 1) + 1 == 0) atomic_fetch_add(&pool.generation, 1); /* 0 means "no job" */
    if (atomic_load(&pool.sleepers) > 0) {
        pthread_mutex_lock(&pool.sleep_lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep_lock);
    }
}

static void *work(void *first_generation) {
    unsigned seen = (unsigned)(uintptr_t)first_generation;
    while (!atomic_load(&pool.stopping)) {
        seen = wait_for_generation(seen);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open_job) == seen) pool.fn(pool.context);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static void stop_workers(void) {
    atomic_store(&pool.stopping, 1);
    next_generation();
    for (int i = 0; i < pool.num_workers; i++) pthread_join(pool.workers[i], NULL);
    atomic_store(&pool.stopping, 0);
    pool.num_workers = 0;
}

static void start_workers(void) {
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the application's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    uintptr_t generation = atomic_load(&pool.generation);
    while (pool.num_workers < pool.wanted_workers) {
        /* With fewer threads than wanted the answers are the same, only later. */
        if (pthread_create(&pool.workers[pool.num_workers], NULL, work, (void *)generation)) break;
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Only the thread that forks lives on in the child: its pool starts anew. */
static void before_fork(void) {
    pthread_mutex_lock(&pool.call_lock);
    pthread_mutex_lock(&pool.sleep_lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.sleep_lock);
    pthread_mutex_unlock(&pool.call_lock);
}

static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.call_lock, NULL);
    pthread_mutex_init(&pool.sleep_lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleepers, 0);
    pool.num_workers = 0;
    pool.parallel = NULL; /* GNU OpenMP has no threads left in a child, and waits for them */
}

static void register_fork_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

void pool_begin(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handlers);
    pthread_mutex_lock(&pool.call_lock);
}

void pool_end(void) { pthread_mutex_unlock(&pool.call_lock); }

int pool_threads(void) { return pool.wanted_workers + 1; }

void pool_run(PoolFn fn, void *context, int share) {
    if (share && pool.parallel) {
        pool.parallel(fn, context, (unsigned)pool_threads(), 0);
        return;
    }
    if (pool.num_workers != pool.wanted_workers) start_workers();
    pool.fn = fn;
    pool.context = context;
    unsigned job = atomic_load(&pool.generation) + 1;
    atomic_store(&pool.open_job, job ? job : 1);
    next_generation();
    fn(context);
    atomic_store(&pool.open_job, 0);
    for (int turn = 0; atomic_load(&pool.inside) > 0; turn++) pool_relax(turn);
}

typedef struct {
    PartFn fn;
    void *context;
    int64_t count, at_once;
    atomic_llong next;
    atomic_int next_thread;
} Parts;

static void take_parts(void *of) {
    Parts *parts = of;
    const int thread = atomic_fetch_add(&parts->next_thread, 1);
    for (;;) {
        const int64_t first = atomic_fetch_add(&parts->next, parts->at_once);
        if (first >= parts->count) return;
        parts->fn(parts->context, thread, first, min64(first + parts->at_once, parts->count));
    }
}

void pool_each(PartFn fn, void *context, int64_t count, int64_t at_once, int share) {
    Parts parts = {.fn = fn, .context = context, .count = count, .at_once = at_once};
    pool_run(take_parts, &parts, share);
}

void *pool_scratch(int64_t bytes) {
    if (bytes > pool.scratch_bytes) {
        const int64_t rounded = round_up(bytes, PAGE);
        free(pool.scratch);
        pool.scratch = aligned_alloc(PAGE, (size_t)rounded);
        pool.scratch_bytes = pool.scratch ? rounded : 0;
    }
    return pool.scratch;
}

MOE_EXPORT void moe_set_num_threads(int num_threads) {
    const int workers = num_threads < 1 ? 0 : num_threads > MAX_THREADS ? MAX_THREADS - 1 : num_threads - 1;
    pool_begin();
    if (workers < pool.num_workers) stop_workers();
    pool.wanted_workers = workers;
    pool_end();
}

/* What calls that share threads run on instead of the pool's own workers. */
MOE_EXPORT void moe_set_parallel(ParallelFn parallel) {
    pool_begin();
    pool.parallel = parallel;
    pool_end();
}

/* How long an idle worker watches for work before it sleeps. */
MOE_EXPORT void moe_set_spin_ns(int64_t nanoseconds) { atomic_store(&pool.spin_ns, nanoseconds); }
