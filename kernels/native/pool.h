/* A small thread pool for calls of a few microseconds to a few milliseconds. */
#ifndef MOE_RUNTIME_POOL_H
#define MOE_RUNTIME_POOL_H

#include <stdint.h>

typedef void (*PoolFn)(void *context);

/* Runs fn(context) on the calling thread and on whichever workers come in time, and returns when all have left it.
 * fn hands out its own work: it must be right when only the caller runs it. One call at a time; a second caller waits.
 * The pool's lock is held from pool_begin to pool_end, so that buffers shared by all calls may be touched between them. */
void pool_begin(void);
void pool_run(PoolFn fn, void *context, int share);
void pool_end(void);

/* A function that runs fn(context) on `num_threads` threads and returns when all are done: OpenMP's GOMP_parallel.
 * pool_run uses it instead of the pool's own workers when `share` is set and such a function is known. */
typedef void (*ParallelFn)(PoolFn fn, void *context, unsigned num_threads, unsigned flags);
void pool_set_parallel(ParallelFn parallel);

/* Memory that lasts until pool_end, 64-byte aligned and reused by the next call; NULL when there is none. */
void *pool_scratch(int64_t bytes);

/* Number of threads that work on a call, the caller included (at least 1). */
void pool_resize(int num_threads);
int pool_size(void);

/* The same for a caller that holds the lock. */
int pool_threads(void);

/* How long an idle worker watches for work before it sleeps. */
void pool_set_spin(int64_t nanoseconds);

/* One turn of a waiting loop; `turn` counts them, so that long waits give the processor away. */
void pool_relax(int turn);

#endif
