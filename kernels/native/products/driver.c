/* The C interface: cuts one call into items that any thread may run.
 *
 * A call has two stages for every expert: multiply by gate and up and activate, multiply by down. A linear layer is
 * an expert that has only the second. Every thread packs the rows of x of the expert it works on for itself, so that
 * there is nothing to wait for before the first product.
 *
 * The items of a stage are numbered in the order of experts and blocks, and every thread has a contiguous range of
 * them: memory serves one long stream to each thread best (measured: blocks taken in turn are a seventh slower). A
 * thread whose range is empty takes from the ends of the others' ranges, so a thread that comes late or not at all
 * costs only its help. The second stage of an expert waits for its first. No thread goes to the second stage before
 * every item of the first has been taken, and whoever holds those can finish them.
 */
#include <stdlib.h>

#include "pool.h"
#include "products/call.h"

/* What belongs to one thread during a call. */
typedef struct {
    char *packed; /* rows of x of packed_for */
    float *sums;
    char *decoded; /* rows of a matrix */
    const ExpertWork *packed_for;
    int64_t packed_token; /* where it is one row; -1 where it is more */
    int packed_as;
} Local;

typedef struct {
    int stage; /* NUM_STAGES: there are no more items */
    int64_t expert, index;
} Item;

/* ---- items ---- */

/* Takes one item of a range, from the front or from the end; -1 when it is empty. */
static int64_t take(Range *range, int from_end) {
    unsigned long long items = atomic_load_explicit(&range->items, memory_order_relaxed);
    for (;;) {
        const uint32_t begin = (uint32_t)(items >> 32), end = (uint32_t)items;
        if (begin >= end) return -1;
        const unsigned long long rest = from_end ? items - 1 : items + (1ull << 32);
        if (atomic_compare_exchange_weak(&range->items, &items, rest)) return from_end ? end - 1 : begin;
    }
}

/* The next item for a thread that last took `last`: from its own range, or from the others' once it is empty. */
static Item take_item(Call *call, int thread, Item last) {
    for (; last.stage < NUM_STAGES; last.stage++) {
        int64_t number = -1;
        for (int i = 0; i < call->num_threads && number < 0; i++)
            number = take(&call->ranges[last.stage * call->num_threads + (thread + i) % call->num_threads], i > 0);
        if (number < 0) continue;
        const ExpertWork *work = call->work;
        while (number < work[last.expert].first_item[last.stage]) last.expert--;
        while (last.expert + 1 < call->num_works && number >= work[last.expert + 1].first_item[last.stage]) last.expert++;
        last.index = number - work[last.expert].first_item[last.stage];
        return last;
    }
    return last;
}

/* Whether the next item would be another thread's. Its owner may come for it yet, unless this thread is idle. */
static int would_steal(Call *call, int thread, int stage) {
    for (; stage < NUM_STAGES; stage++) {
        for (int i = 0; i < call->num_threads; i++) {
            Range *range = &call->ranges[stage * call->num_threads + (thread + i) % call->num_threads];
            const unsigned long long items = atomic_load_explicit(&range->items, memory_order_relaxed);
            if ((uint32_t)(items >> 32) < (uint32_t)items) return i > 0;
        }
    }
    return 0;
}

static Matrix rows_from(Matrix matrix, int64_t row) {
    matrix.data += row * matrix.stride;
    matrix.first_row += row;
    return matrix;
}

/* The weights an item reads first. */
static Matrix first_weights(const Call *call, Item item) {
    if (item.stage == NUM_STAGES) return (Matrix){0};
    const ExpertWork *work = &call->work[item.expert];
    const Expert *weights = work->weights;
    if (item.stage == STAGE_OUT) return rows_from(weights->down, item.index * work->out_block);
    return rows_from(weights->gate.data ? weights->gate : weights->up, item.index * work->hidden_block);
}

/* The packed rows of x of one expert, for one of its matrices. */
static const char *pack_rows(const Call *call, const ExpertWork *work, int matrix, Local *local) {
    const Isa *isa = call->isa;
    const int kind = call->kinds[matrix];
    const int64_t panels = num_panels(work->num_rows, panel_rows_of(isa, kind));
    const int64_t row_bytes = packed_row_bytes(kind, call->dim_in, isa->k_step);
    const int64_t token = work->num_rows > 1 ? -1 : call->token_ids ? call->token_ids[work->first_row] : work->first_row;
    const int is_same = local->packed_for == work || (local->packed_for && token >= 0 && local->packed_token == token);
    if (is_same && local->packed_as == kind) return local->packed;
    for (int64_t p = 0; p < panels; p++) {
        const int64_t start = panel_start(p, panels, work->num_rows), end = panel_start(p + 1, panels, work->num_rows);
        for (int64_t r = start; r < end; r++) {
            const int64_t row = work->first_row + r, source = call->token_ids ? call->token_ids[row] : row;
            isa->pack(kind, call->x + source * call->x_stride, call->x_dtype, call->dim_in,
                      local->packed + start * row_bytes, 0, (int)(r - start), (int)(end - start), call->dim_in);
        }
    }
    local->packed_for = work;
    local->packed_token = token;
    local->packed_as = kind;
    return local->packed;
}

static void wait_for_hidden(ExpertWork *work) {
    for (int turn = 0; atomic_load_explicit(&work->hidden_done, memory_order_acquire) < work->hidden_items; turn++)
        pool_relax(turn);
}

static void pack_hidden(const Call *call, ExpertWork *work, const float *values, int64_t first, int64_t count, int64_t ldo) {
    const Isa *isa = call->isa;
    const int64_t panels = num_panels(work->num_rows, panel_rows_of(isa, call->kinds[DOWN]));
    const int64_t row_bytes = packed_row_bytes(call->kinds[DOWN], call->dim_hidden, isa->k_step);
    for (int64_t p = 0; p < panels; p++) {
        const int64_t start = panel_start(p, panels, work->num_rows), end = panel_start(p + 1, panels, work->num_rows);
        for (int64_t r = start; r < end; r++)
            isa->pack(call->kinds[DOWN], (const char *)(values + r * ldo), DTYPE_F32, count, work->hidden + start * row_bytes,
                      first, (int)(r - start), (int)(end - start), call->dim_hidden);
    }
}

/* Whether rows of the lossless code are multiplied as they are decoded: by a single panel. */
static int dots_planes(const Call *call, int matrix, int64_t num_rows) {
    return call->isa->dot_planes && call->kinds[matrix] == KIND_BF16_DOT && num_rows <= call->isa->max_panel_rows;
}

/* Rows of an expert times some rows of one of its matrices. Those that are decoded are so a few at a time: what was decoded
 * is in the cache when it is multiplied, as any rows of its type are. */
static void multiply(Call *call, int matrix, Matrix weight, int64_t count, int64_t k, const char *packed, int64_t num_rows,
                     float *out, int64_t ldo, Matrix next, Local *local) {
    const PlanesMatrix *planes = planes_of(&weight);
    PlanesReader reader;
    if (planes) planes_begin(&reader, planes, weight.data, weight.first_row);
    if (planes && dots_planes(call, matrix, num_rows)) {
        if (!planes_multiply(&reader, call->isa->dot_planes, count, packed, (int)num_rows, out, ldo))
            atomic_store_explicit(&call->is_damaged, 1, memory_order_relaxed);
        return;
    }
    if (!is_decoded(call, &weight)) {
        call->isa->multiply(call->kinds[matrix], weight, count, k, packed, num_rows, out, ldo, next);
        return;
    }
    const Matrix decoded = {.data = local->decoded, .stride = decoded_stride(call, &weight, k)};
    const int64_t most = decoded_rows(call, call->kinds[matrix]);
    for (int64_t row = 0; row < count; row += most) {
        const int64_t rows = min64(most, count - row);
        if (!planes)
            call->isa->dequantize(rows_from(weight, row), rows, k, local->decoded, decoded.stride, call->x_dtype);
        else if (!planes_read(&reader, rows, local->decoded, decoded.stride)) {
            atomic_store_explicit(&call->is_damaged, 1, memory_order_relaxed);
            return;
        }
        call->isa->multiply_cached(call->kinds[matrix], decoded, rows, k, packed, num_rows, out + row, ldo);
    }
}

static void compute_hidden(Call *call, ExpertWork *work, int64_t index, Local *local, Matrix next) {
    const Isa *isa = call->isa;
    const Expert *weights = work->weights;
    const int64_t first = index * work->hidden_block, count = min64(work->hidden_block, call->dim_hidden - first);
    const int64_t ldo = work->hidden_block;
    const int has_gate = weights->gate.data != NULL;
    const Matrix up = rows_from(weights->up, first);
    float *up_sums = local->sums, *gate_sums = local->sums + work->num_rows * ldo;
    if (has_gate)
        multiply(call, GATE, rows_from(weights->gate, first), count, call->dim_in, pack_rows(call, work, GATE, local),
                 work->num_rows, gate_sums, ldo, up, local);
    multiply(call, UP, up, count, call->dim_in, pack_rows(call, work, UP, local), work->num_rows, up_sums, ldo, next, local);
    for (int64_t r = 0; r < work->num_rows; r++) {
        float *up_row = up_sums + r * ldo, *gate_row = gate_sums + r * ldo;
        if (weights->up_bias.data) isa->add_bias(up_row, weights->up_bias, first, call->bias_dtype, count);
        if (weights->gate_bias.data) isa->add_bias(gate_row, weights->gate_bias, first, call->bias_dtype, count);
        if (call->formula)
            moe_hidden_values(call->activation, call->formula, has_gate, gate_row, up_row, count);
        else if (has_gate)
            isa->activate(call->activation, gate_row, up_row, count);
        else
            isa->activate(call->activation, up_row, NULL, count);
    }
    pack_hidden(call, work, has_gate || call->formula ? gate_sums : up_sums, first, count, ldo);
    atomic_fetch_add_explicit(&work->hidden_done, 1, memory_order_release);
}

static void compute_out(Call *call, ExpertWork *work, int64_t index, Local *local, Matrix next) {
    const Isa *isa = call->isa;
    const Expert *weights = work->weights;
    const int64_t first = index * work->out_block, count = min64(work->out_block, call->dim_out - first);
    const int64_t ldo = work->out_block, depth = call->dim_hidden ? call->dim_hidden : call->dim_in;
    float *sums = local->sums;
    wait_for_hidden(work);
    const char *packed = call->dim_hidden ? work->hidden : pack_rows(call, work, DOWN, local);
    multiply(call, DOWN, rows_from(weights->down, first), count, depth, packed, work->num_rows, sums, ldo, next, local);
    for (int64_t r = 0; r < work->num_rows; r++) {
        const int64_t row = work->first_row + r, place = call->destinations ? call->destinations[row] : row;
        if (weights->down_bias.data) isa->add_bias(sums + r * ldo, weights->down_bias, first, call->bias_dtype, count);
        isa->store(call->out + place * call->out_stride + first * dtype_bytes(call->x_dtype), call->x_dtype, sums + r * ldo,
                   count);
    }
}

/* Runs items until there are none. The next of its own is taken before the present one runs, so that its weights can be
 * fetched; another thread's only afterwards. */
static void work_on(void *context) {
    Call *call = context;
    const int thread = atomic_fetch_add(&call->next_thread, 1);
    char *buffer = call->buffers + thread * thread_bytes(call);
    char *sums = buffer + call->packed_bytes;
    Local local = {.packed = buffer, .sums = (float *)sums, .decoded = sums + call->sums_bytes};
    Item item = take_item(call, thread, (Item){STAGE_HIDDEN, 0, 0});
    while (item.stage < NUM_STAGES) {
        const int waits = would_steal(call, thread, item.stage);
        Item following = waits ? item : take_item(call, thread, item);
        const Matrix next = waits ? (Matrix){0} : first_weights(call, following);
        ExpertWork *work = &call->work[item.expert];
        if (item.stage == STAGE_HIDDEN)
            compute_hidden(call, work, item.index, &local, next);
        else
            compute_out(call, work, item.index, &local, next);
        item = waits ? take_item(call, thread, item) : following;
    }
}

/* ---- calls ---- */

/* The pool's lock is held. */
static int run_call(Call *call, const Expert *experts, const int64_t *counts, int64_t num_experts) {
    int status = plan_call(call, experts, counts, num_experts);
    if (status == STATUS_OK) {
        if (call->num_threads == 1)
            work_on(call);
        else
            pool_run(work_on, call, call->share_threads);
        if (atomic_load(&call->is_damaged)) status = STATUS_DAMAGED;
    }
    free(call->work);
    return status;
}

/* A linear layer is an expert without hidden values. */
static int run_linear(Call *call, const Expert *layer, int64_t num_rows) {
    pool_begin();
    const int status = run_call(call, layer, &num_rows, 1);
    pool_end();
    return status;
}

MOE_EXPORT int moe_linear(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, int64_t weight_stride,
                          const char *bias, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                          int weight_dtype, int share_threads) {
    const Expert layer = {.down = {.data = weight, .stride = weight_stride}, .down_bias = {bias, dtype_bytes(weight_dtype)}};
    Call call = {.x_dtype = x_dtype, .weight_dtype = weight_dtype, .bias_dtype = weight_dtype, .dim_in = dim_in,
                 .dim_out = dim_out, .x = x, .x_stride = x_stride, .out = out, .out_stride = out_stride,
                 .share_threads = share_threads};
    return run_linear(&call, &layer, num_rows);
}

/* The same by a quantised matrix, which `decodes` as in moe_expert_ffn. */
MOE_EXPORT int moe_quantized_linear(const char *x, int64_t x_stride, int64_t num_rows, const Matrix *weight, const char *bias,
                                    int bias_dtype, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                                    int decodes, int share_threads) {
    const Expert layer = {.down = *weight, .down_bias = {bias, dtype_bytes(bias_dtype)}};
    Call call = {.x_dtype = x_dtype, .weight_dtype = DTYPE_BF16, .bias_dtype = bias_dtype, .decodes = decodes, .dim_in = dim_in,
                 .dim_out = dim_out, .x = x, .x_stride = x_stride, .out = out, .out_stride = out_stride,
                 .share_threads = share_threads};
    return run_linear(&call, &layer, num_rows);
}

static int rows_in_range(const int64_t *rows, int64_t count, int64_t limit) {
    for (int64_t r = 0; r < count; r++)
        if (rows[r] < 0 || rows[r] >= limit) return 0;
    return 1;
}

/* For quantised experts: by their codes as they are or, where it `decodes`, by their values, rounded to the type of x. */
MOE_EXPORT int moe_expert_ffn(const Expert *experts, int64_t num_experts, const int64_t *counts, const char *x, int64_t x_stride,
                              int64_t num_tokens, const int64_t *token_ids, const int64_t *destinations, char *out,
                              int64_t out_stride, int64_t num_out_rows, int64_t dim_in, int64_t dim_hidden, int64_t dim_out,
                              int x_dtype, int weight_dtype, int bias_dtype, int activation, const float *formula,
                              int decodes, int share_threads) {
    Call call = {.x_dtype = x_dtype, .weight_dtype = weight_dtype, .bias_dtype = bias_dtype, .activation = activation,
                 .formula = formula, .decodes = decodes, .dim_in = dim_in,
                 .dim_hidden = dim_hidden, .dim_out = dim_out, .x = x, .x_stride = x_stride,
                 .token_ids = token_ids, .destinations = destinations, .out = out, .out_stride = out_stride,
                 .share_threads = share_threads};
    int64_t num_rows = 0;
    for (int64_t e = 0; e < num_experts; e++) num_rows += counts[e];
    if (!rows_in_range(token_ids, num_rows, num_tokens) || !rows_in_range(destinations, num_rows, num_out_rows))
        return STATUS_BAD_ROW;
    pool_begin();
    int status = run_call(&call, experts, counts, num_experts);
    pool_end();
    return status;
}
