/* Divides a call among threads: how every matrix is multiplied, how large the items are, and which thread begins where. */
#include <stdlib.h>

#include "pool.h"
#include "products/call.h"

/* Weight rows of one item: a multiple of every k_step and tile height, so that hidden values are packed whole. */
enum { BLOCK_ROWS = 32, BLOCK_ROWS_BY_THREES = 48 };
enum { BLOCK_BYTES = 128 << 10, MAX_BLOCK_ROWS = 512, MAX_BLOCK_SUMS = 1 << 14 };

/* Packed rows of an expert that its weights are multiplied with at once: those of two threads stay in the cache they share.
 * An expert with more is computed in portions, each like an expert of its own. Matrix units need them in the second-level cache
 * of each thread (measured on Granite Rapids: at 512 rows of 4 KiB, reading the weights once more takes a third less time). */
enum { PORTION_BYTES = 4 << 20, PORTION_BYTES_OF_TILES = 1 << 20 };

/* Weights times rows, in bytes, up to which the calling thread works alone: a few microseconds, as long as it takes to
 * be sure that no other thread is inside. A small router is such a call. */
enum { ALONE_BYTES = 32 << 10 };

/* Every thread has a block, where there are rows enough. */
static int64_t block_rows(const Call *call, const Matrix *matrix, int64_t row_bytes, int64_t num_rows, int64_t weight_rows) {
    /* the lossless code says where every 32nd row begins; 32 hidden values share a scale */
    const int by_32 = planes_of(matrix) || call->kinds[DOWN] >= KIND_QUANT_INT4;
    int64_t rows = call->isa->tile_rows == 3 && !by_32 ? BLOCK_ROWS_BY_THREES : BLOCK_ROWS;
    const int64_t threads = call->num_threads;
    while (rows * 2 * row_bytes <= BLOCK_BYTES && rows * 2 <= MAX_BLOCK_ROWS && rows * 2 * num_rows <= MAX_BLOCK_SUMS &&
           rows * 2 * threads <= weight_rows)
        rows *= 2;
    return rows;
}

static int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

/* The experts of one call are of one format. */
static void choose_kinds(Call *call, const Expert *experts) {
    const Matrix *matrices[NUM_MATRICES] = {&experts->gate, &experts->up, &experts->down};
    for (int i = 0; i < NUM_MATRICES; i++) {
        const int is_coded = matrices[i]->quantized && !planes_of(matrices[i]);
        const int64_t k = i == DOWN && call->dim_hidden ? call->dim_hidden : call->dim_in;
        if (is_coded && !call->decodes)
            call->kinds[i] = call->isa->quantized_kind(matrices[i]->quantized, call->x_dtype);
        else
            call->kinds[i] = weight_kind(call->isa, call->x_dtype, is_coded ? call->x_dtype : call->weight_dtype);
        if (is_decoded(call, matrices[i]))
            call->decoded_bytes = max64(call->decoded_bytes, decoded_rows(call, call->kinds[i]) * decoded_stride(call, matrices[i], k));
    }
}

static int64_t weight_row_bytes(const Call *call, const Matrix *matrix, int64_t k) {
    if (!matrix->quantized) return k * dtype_bytes(call->weight_dtype);
    if (planes_of(matrix)) return planes_row_bytes(k);
    return code_row_bytes(matrix->quantized, k) + groups_of_row(matrix->quantized, k) * SCALE_BYTES[matrix->quantized->scale_type];
}

static int64_t largest_packed_row(const Call *call) {
    int64_t bytes = 0;
    for (int i = 0; i < NUM_MATRICES; i++)
        bytes = max64(bytes, packed_row_bytes(call->kinds[i], call->dim_in, call->isa->k_step));
    return bytes;
}

/* How many portions an expert's rows are computed in. */
static int64_t num_portions(const Call *call, int64_t num_rows) {
    const int64_t k_step = call->isa->k_step;
    const int64_t hidden = packed_row_bytes(call->kinds[DOWN], call->dim_hidden, k_step);
    const int64_t bytes = call->kinds[DOWN] == KIND_BF16_TILES ? PORTION_BYTES_OF_TILES : PORTION_BYTES;
    const int64_t most = max64(1, bytes / max64(1, max64(hidden, largest_packed_row(call))));
    return max64(1, (num_rows + most - 1) / most);
}

static void plan_expert(Call *call, ExpertWork *work) {
    const int64_t rows = work->num_rows;
    const int64_t depth = call->dim_hidden ? call->dim_hidden : call->dim_in;
    work->hidden_block = block_rows(call, &work->weights->up, weight_row_bytes(call, &work->weights->up, call->dim_in), rows, call->dim_hidden);
    work->out_block = block_rows(call, &work->weights->down, weight_row_bytes(call, &work->weights->down, depth), rows, call->dim_out);
    if (rows) {
        work->hidden_items = (call->dim_hidden + work->hidden_block - 1) / work->hidden_block;
        work->out_items = (call->dim_out + work->out_block - 1) / work->out_block;
    }
    const int64_t packed = aligned(rows * largest_packed_row(call));
    const int64_t sums = aligned(rows * max64(2 * work->hidden_block, work->out_block) * 4);
    call->packed_bytes = max64(call->packed_bytes, packed);
    call->sums_bytes = max64(call->sums_bytes, sums);
}

/* Numbers the items of every stage and gives each thread its range of them. */
static void share_items(Call *call) {
    for (int stage = 0; stage < NUM_STAGES; stage++) {
        int64_t total = 0;
        for (int64_t e = 0; e < call->num_works; e++) {
            ExpertWork *work = &call->work[e];
            work->first_item[stage] = total;
            total += stage == STAGE_HIDDEN ? work->hidden_items : work->out_items;
        }
        for (int64_t t = 0; t < call->num_threads; t++) {
            const uint64_t begin = (uint64_t)(total * t / call->num_threads), end = (uint64_t)(total * (t + 1) / call->num_threads);
            atomic_init(&call->ranges[stage * call->num_threads + t].items, begin << 32 | end);
        }
    }
}

static int is_small(const Call *call, const int64_t *counts, int64_t num_experts) {
    const int64_t depth = call->dim_hidden ? call->dim_hidden : call->dim_in;
    const int64_t expert_bytes =
        (2 * call->dim_hidden * call->dim_in + depth * call->dim_out) * dtype_bytes(call->weight_dtype);
    int64_t bytes = 0;
    for (int64_t e = 0; e < num_experts && bytes <= ALONE_BYTES; e++) bytes += counts[e] * expert_bytes;
    return bytes <= ALONE_BYTES;
}

/* ---- the whole call ---- */

int plan_call(Call *call, const Expert *experts, const int64_t *counts, int64_t num_experts) {
    call->isa = current_isa();
    choose_kinds(call, experts);
    call->num_threads = is_small(call, counts, num_experts) ? 1 : pool_threads();
    for (int64_t e = 0; e < num_experts; e++) call->num_works += num_portions(call, counts[e]);
    call->work = calloc((size_t)call->num_works, sizeof *call->work);
    if (!call->work) return STATUS_NO_MEMORY;
    ExpertWork *work = call->work;
    int64_t total_rows = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        const int64_t portions = num_portions(call, counts[e]);
        for (int64_t p = 0; p < portions; p++, work++) {
            const int64_t start = panel_start(p, portions, counts[e]);
            work->weights = &experts[e];
            work->first_row = total_rows + start;
            work->num_rows = panel_start(p + 1, portions, counts[e]) - start;
            plan_expert(call, work);
        }
        total_rows += counts[e];
    }
    const int64_t range_bytes = NUM_STAGES * call->num_threads * (int64_t)sizeof(Range);
    const int64_t row_bytes = packed_row_bytes(call->kinds[DOWN], call->dim_hidden, call->isa->k_step);
    const int64_t hidden_bytes = aligned(total_rows * row_bytes);
    char *scratch = pool_scratch(range_bytes + hidden_bytes + thread_bytes(call) * call->num_threads);
    if (!scratch) return STATUS_NO_MEMORY;
    call->ranges = (Range *)scratch;
    call->buffers = scratch + range_bytes + hidden_bytes;
    for (int64_t e = 0; e < call->num_works; e++) call->work[e].hidden = scratch + range_bytes + call->work[e].first_row * row_bytes;
    share_items(call);
    return STATUS_OK;
}
