/* One call of the products: what is asked, and how it is divided among threads. plan.c divides it, driver.c runs it. */
#ifndef MOE_RUNTIME_CALL_H
#define MOE_RUNTIME_CALL_H

#include <stdatomic.h>

#include "kernels.h"
#include "formats/planes.h"
#include "formats/quantized.h"

enum { STAGE_HIDDEN, STAGE_OUT, NUM_STAGES };
enum { GATE, UP, DOWN, NUM_MATRICES };

/* Items [begin, end) of one stage that are not taken yet, packed as begin << 32 | end; alone on its cache line. */
typedef struct {
    _Alignas(64) atomic_ullong items;
} Range;

/* An expert, or a portion of its rows. */
typedef struct {
    const Expert *weights;
    int64_t first_row, num_rows;
    char *hidden; /* packed hidden values, shared by all threads */
    int64_t first_item[NUM_STAGES];
    int64_t hidden_items, out_items;
    atomic_llong hidden_done; /* finished items of the first stage */
    int64_t hidden_block, out_block; /* weight rows of one item */
} ExpertWork;

typedef struct {
    const Isa *isa;
    int kinds[NUM_MATRICES], x_dtype, weight_dtype, bias_dtype, activation;
    const float *formula; /* NULL: the activation without bounds and offsets */
    int64_t dim_in, dim_hidden, dim_out, num_works;
    const char *x;
    int64_t x_stride;
    const int64_t *token_ids, *destinations; /* NULL: row r of x, row r of out */
    char *out;
    int64_t out_stride;
    ExpertWork *work;
    char *buffers; /* one of packed_bytes + sums_bytes + decoded_bytes for every thread */
    int64_t packed_bytes, sums_bytes, decoded_bytes;
    int num_threads, share_threads;
    int decodes; /* quantised matrices are multiplied by their values, in the type of x */
    Range *ranges; /* [stage][thread] */
    atomic_int next_thread, is_damaged;
} Call;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows of a matrix that are decoded at once: as many tiles as stay in the first-level cache, or one. */
static inline int64_t decoded_rows(const Call *call, int kind) {
    enum { DECODED_ROWS = 8 };
    return kind == KIND_BF16_TILES ? 2 * PANEL_ROWS_OF_TILES : DECODED_ROWS / call->isa->tile_rows * call->isa->tile_rows;
}

static inline const PlanesMatrix *planes_of(const Matrix *matrix) {
    const int is_coded = matrix->quantized && matrix->quantized->codes == CODE_PLANES;
    return is_coded ? (const PlanesMatrix *)matrix->quantized : NULL;
}

/* Whether its rows are decoded before they are multiplied, and from where to where the next of them lies then, in bytes. */
static inline int is_decoded(const Call *call, const Matrix *matrix) {
    return matrix->quantized && (call->decodes || planes_of(matrix));
}

static inline int64_t decoded_stride(const Call *call, const Matrix *matrix, int64_t k) {
    if (planes_of(matrix)) return planes_blocks(k) * PLANES_BLOCK * 2;
    return ((k * dtype_bytes(call->x_dtype) + 63) / 64 | 1) * 64;
}

static inline int64_t thread_bytes(const Call *call) { return call->packed_bytes + call->sums_bytes + call->decoded_bytes; }

/* Cuts the call into items, shares them among threads and lays everything out in the pool's scratch memory, whose lock is
 * held. `call->work` is the caller's to free, also after STATUS_NO_MEMORY. */
int plan_call(Call *call, const Expert *experts, const int64_t *counts, int64_t num_experts);

#endif
