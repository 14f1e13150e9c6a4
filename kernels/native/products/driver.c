/* Products of linear layers and experts: cuts a call into items that any thread may run.
 *
 * A call has two stages for every expert: multiply by gate and up and activate; multiply by down. A linear layer is an
 * expert with only the second stage. Every thread packs the rows of x of its expert for itself, so the first product waits
 * for nothing.
 *
 * The items of a stage are numbered in the order of experts and blocks, and every thread has a contiguous range of them:
 * memory serves one long stream for each thread best (measured: blocks taken in turn are a seventh slower). A thread with an
 * empty range takes items from the ends of the others', so a late thread only costs its help. The second stage of an expert
 * waits for its first. No thread begins the second stage before all items of the first are taken, and threads that hold
 * those can finish them. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "formats/quantized.h"
#include "kernels.h"

enum { STAGE_HIDDEN, STAGE_OUT, NUM_STAGES };
enum { GATE, UP, DOWN, NUM_MATRICES };

/* Items [begin, end) of one stage that no thread has taken, as begin << 32 | end; alone on its cache line. */
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
    const float *added; /* added to the sums of each row, those of the gate first; or NULL */
    float *hidden_rows; /* where hidden values are also written, row by row; or NULL */
    int64_t dim_in, dim_hidden, dim_out, num_works;
    const char *x;
    int64_t x_stride;
    const int64_t *token_ids, *destinations; /* NULL: row r of x, row r of out */
    char *out;
    int64_t out_stride;
    ExpertWork *work; /* the caller frees it, also after STATUS_NO_MEMORY */
    char *buffers; /* for every thread packed_bytes + sums_bytes + decoded_bytes */
    int64_t packed_bytes, sums_bytes, decoded_bytes;
    int num_threads, share_threads;
    int decodes; /* multiplies by the values of quantised matrices, in the type of x */
    Range *ranges; /* [stage][thread] */
    atomic_int next_thread, is_damaged;
} Call;

/* Rows of a matrix decoded at once: as many tiles as stay in the first-level cache, at least one. */
static int64_t decoded_rows(const Call *call, int kind) {
    enum { DECODED_ROWS = 8 };
    return kind == KIND_BF16_TILES ? 2 * PANEL_ROWS_OF_TILES : DECODED_ROWS / call->isa->tile_rows * call->isa->tile_rows;
}

static const PlanesMatrix *planes_of(const Matrix *matrix) {
    const int is_coded = matrix->quantized && matrix->quantized->codes == CODE_PLANES;
    return is_coded ? (const PlanesMatrix *)matrix->quantized : NULL;
}

/* Whether its rows are decoded before they are multiplied; and the distance of decoded rows, in bytes. */
static int is_decoded(const Call *call, const Matrix *matrix) {
    return matrix->quantized && (call->decodes || planes_of(matrix));
}

static int64_t decoded_stride(const Call *call, const Matrix *matrix, int64_t k) {
    if (planes_of(matrix)) return planes_blocks(k) * PLANES_BLOCK * 2;
    return (parts_of(k * dtype_bytes(call->x_dtype), 64) | 1) * 64;
}

/* Columns of the last matrix. */
static int64_t depth_of(const Call *call) { return call->dim_hidden ? call->dim_hidden : call->dim_in; }

static int64_t thread_bytes(const Call *call) { return call->packed_bytes + call->sums_bytes + call->decoded_bytes; }

/* ---- how a call is divided ---- */

/* Weight rows of one item: a multiple of every k_step and tile height, so that hidden values are packed whole. */
enum { BLOCK_ROWS = 32, BLOCK_ROWS_BY_THREES = 48 };
enum { BLOCK_BYTES = 128 << 10, MAX_BLOCK_ROWS = 512, MAX_BLOCK_SUMS = 1 << 14 };

/* Bytes of packed rows that an expert's weights are multiplied by at once: those of two threads stay in the cache they
 * share. More rows are computed in portions, each like an expert of its own. Matrix units need them in each thread's
 * second-level cache (measured on Granite Rapids: at 512 rows of 4 KiB, reading the weights once more takes a third less
 * time). */
enum { PORTION_BYTES = 4 << 20, PORTION_BYTES_OF_TILES = 1 << 20 };

/* Weights times rows, in bytes, that the calling thread computes alone: a few microseconds, the time it takes to be sure
 * that no other thread is inside. A small router is such a call. */
enum { ALONE_BYTES = 32 << 10 };

static int64_t weight_row_bytes(const Call *call, const Matrix *matrix, int64_t k) {
    if (!matrix->quantized) return k * dtype_bytes(call->weight_dtype);
    if (planes_of(matrix)) return planes_row_bytes(k);
    return code_row_bytes(matrix->quantized, k) + groups_of_row(matrix->quantized, k) * SCALE_BYTES[matrix->quantized->scale_type];
}

/* A block for every thread, if there are rows enough. */
static int64_t block_rows(const Call *call, const Matrix *matrix, int64_t k, int64_t num_rows, int64_t weight_rows) {
    /* the lossless code tells where every 32nd row begins; 32 hidden values share a scale */
    const int by_32 = planes_of(matrix) || call->kinds[DOWN] >= KIND_QUANT_INT4;
    int64_t rows = call->isa->tile_rows == 3 && !by_32 ? BLOCK_ROWS_BY_THREES : BLOCK_ROWS;
    const int64_t threads = call->num_threads, row_bytes = weight_row_bytes(call, matrix, k);
    while (rows * 2 * row_bytes <= BLOCK_BYTES && rows * 2 <= MAX_BLOCK_ROWS && rows * 2 * num_rows <= MAX_BLOCK_SUMS &&
           rows * 2 * threads <= weight_rows)
        rows *= 2;
    return rows;
}

/* The experts of a call have one format. */
static void choose_kinds(Call *call, const Expert *experts) {
    const Matrix *matrices[NUM_MATRICES] = {&experts->gate, &experts->up, &experts->down};
    for (int i = 0; i < NUM_MATRICES; i++) {
        const int is_coded = matrices[i]->quantized && !planes_of(matrices[i]);
        const int64_t k = i == DOWN ? depth_of(call) : call->dim_in;
        if (is_coded && !call->decodes)
            call->kinds[i] = call->isa->quantized_kind(matrices[i]->quantized, call->x_dtype);
        else
            call->kinds[i] = weight_kind(call->isa, call->x_dtype, is_coded ? call->x_dtype : call->weight_dtype);
        if (is_decoded(call, matrices[i]))
            call->decoded_bytes = max64(call->decoded_bytes, decoded_rows(call, call->kinds[i]) * decoded_stride(call, matrices[i], k));
    }
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
    return max64(1, parts_of(num_rows, most));
}

static void plan_expert(Call *call, ExpertWork *work) {
    const int64_t rows = work->num_rows;
    work->hidden_block = block_rows(call, &work->weights->up, call->dim_in, rows, call->dim_hidden);
    work->out_block = block_rows(call, &work->weights->down, depth_of(call), rows, call->dim_out);
    if (rows) {
        work->hidden_items = parts_of(call->dim_hidden, work->hidden_block);
        work->out_items = parts_of(call->dim_out, work->out_block);
    }
    const int64_t packed = round_up(rows * largest_packed_row(call), 64);
    const int64_t sums = round_up(rows * max64(2 * work->hidden_block, work->out_block) * 4, 64);
    call->packed_bytes = max64(call->packed_bytes, packed);
    call->sums_bytes = max64(call->sums_bytes, sums);
}

/* Numbers the items of each stage and gives each thread its range. */
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
    const int64_t values = 2 * call->dim_hidden * call->dim_in + depth_of(call) * call->dim_out;
    int64_t bytes = 0;
    for (int64_t e = 0; e < num_experts && bytes <= ALONE_BYTES; e++) bytes += counts[e] * values * dtype_bytes(call->weight_dtype);
    return bytes <= ALONE_BYTES;
}

/* Cuts the call into items, shares them among threads and lays everything out in the pool's scratch memory; the pool's lock
 * is held. */
static int plan_call(Call *call, const Expert *experts, const int64_t *counts, int64_t num_experts) {
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
    const int64_t hidden_bytes = round_up(total_rows * row_bytes, 64);
    char *scratch = pool_scratch(range_bytes + hidden_bytes + thread_bytes(call) * call->num_threads);
    if (!scratch) return STATUS_NO_MEMORY;
    call->ranges = (Range *)scratch;
    call->buffers = scratch + range_bytes + hidden_bytes;
    for (int64_t e = 0; e < call->num_works; e++) call->work[e].hidden = scratch + range_bytes + call->work[e].first_row * row_bytes;
    share_items(call);
    return STATUS_OK;
}

/* ---- items ---- */

/* What one thread keeps during a call. */
typedef struct {
    char *packed; /* rows of x of packed_for */
    float *sums;
    char *decoded; /* rows of a matrix */
    const ExpertWork *packed_for;
    int64_t packed_token; /* if it is a single row; else -1 */
    int packed_as;
} Local;

typedef struct {
    int stage; /* NUM_STAGES: there are no more items */
    int64_t expert, index;
} Item;

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

/* Whether the next item would be another thread's. Its owner may still come for it, unless this thread is idle. */
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

/* The weights that an item reads first. */
static Matrix first_weights(const Call *call, Item item) {
    if (item.stage == NUM_STAGES) return (Matrix){0};
    const ExpertWork *work = &call->work[item.expert];
    const Expert *weights = work->weights;
    if (item.stage == STAGE_OUT) return rows_from(weights->down, item.index * work->out_block);
    return rows_from(weights->gate.data ? weights->gate : weights->up, item.index * work->hidden_block);
}

/* The packed rows of x of one expert, for one of its matrices. */
static const char *pack_rows(const Call *call, const ExpertWork *work, int matrix, Local *local) {
    const int kind = call->kinds[matrix];
    const int64_t *ids = call->token_ids ? call->token_ids + work->first_row : NULL;
    const int64_t token = work->num_rows > 1 ? -1 : ids ? ids[0] : work->first_row;
    const int is_same = local->packed_for == work || (local->packed_for && token >= 0 && local->packed_token == token);
    if (is_same && local->packed_as == kind) return local->packed;
    const char *x = call->x + (ids ? 0 : work->first_row) * call->x_stride;
    pack_panels(call->isa, kind, x, call->x_stride, call->x_dtype, ids, work->num_rows, 0, call->dim_in, call->dim_in, local->packed);
    local->packed_for = work;
    local->packed_token = token;
    local->packed_as = kind;
    return local->packed;
}

/* Whether rows in the lossless code are multiplied as they are decoded: by a single panel. */
static int dots_planes(const Call *call, int matrix, int64_t num_rows) {
    return call->isa->dot_planes && call->kinds[matrix] == KIND_BF16_DOT && num_rows <= call->isa->max_panel_rows;
}

/* Rows of an expert times some rows of one of its matrices. Rows to be decoded are decoded a few at a time and are still in
 * the cache when they are multiplied, like plain rows of that type. */
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
        if (call->added) {
            const Bias added = {(const char *)(call->added + (work->first_row + r) * (1 + has_gate) * call->dim_hidden), 4};
            if (has_gate) isa->add_bias(gate_row, added, first, DTYPE_F32, count);
            isa->add_bias(up_row, added, first + has_gate * call->dim_hidden, DTYPE_F32, count);
        }
        if (call->formula)
            moe_hidden_values(call->activation, call->formula, has_gate, gate_row, up_row, count);
        else if (has_gate)
            isa->activate(call->activation, gate_row, up_row, count);
        else if (call->activation >= 0)
            isa->activate(call->activation, up_row, NULL, count);
        if (call->hidden_rows)
            memcpy(call->hidden_rows + (work->first_row + r) * call->dim_hidden + first,
                   has_gate || call->formula ? gate_row : up_row, (size_t)count * sizeof(float));
    }
    pack_panels(isa, call->kinds[DOWN], (const char *)(has_gate || call->formula ? gate_sums : up_sums), ldo * 4, DTYPE_F32, NULL,
                work->num_rows, first, count, call->dim_hidden, work->hidden);
    atomic_fetch_add_explicit(&work->hidden_done, 1, memory_order_release);
}

static void compute_out(Call *call, ExpertWork *work, int64_t index, Local *local, Matrix next) {
    const Isa *isa = call->isa;
    const Expert *weights = work->weights;
    const int64_t first = index * work->out_block, count = min64(work->out_block, call->dim_out - first);
    const int64_t ldo = work->out_block, depth = depth_of(call);
    float *sums = local->sums;
    for (int turn = 0; atomic_load_explicit(&work->hidden_done, memory_order_acquire) < work->hidden_items; turn++) pool_relax(turn);
    const char *packed = call->dim_hidden ? work->hidden : pack_rows(call, work, DOWN, local);
    multiply(call, DOWN, rows_from(weights->down, first), count, depth, packed, work->num_rows, sums, ldo, next, local);
    for (int64_t r = 0; r < work->num_rows; r++) {
        const int64_t row = work->first_row + r, place = call->destinations ? call->destinations[row] : row;
        if (weights->down_bias.data) isa->add_bias(sums + r * ldo, weights->down_bias, first, call->bias_dtype, count);
        isa->store(call->out + place * call->out_stride + first * dtype_bytes(call->x_dtype), call->x_dtype, sums + r * ldo,
                   count);
    }
}

/* Runs items until there are none. Takes its own next item before it runs the present one, so that its weights can be
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

static int run_call(Call *call, const Expert *experts, const int64_t *counts, int64_t num_experts) {
    pool_begin();
    int status = plan_call(call, experts, counts, num_experts);
    if (status == STATUS_OK) {
        call->num_threads == 1 ? work_on(call) : pool_run(work_on, call, call->share_threads);
        if (atomic_load(&call->is_damaged)) status = STATUS_DAMAGED;
    }
    free(call->work);
    pool_end();
    return status;
}

/* A linear layer is an expert without hidden values. */
MOE_EXPORT int moe_linear(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, int64_t weight_stride,
                          const char *bias, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                          int weight_dtype, int share_threads) {
    const Expert layer = {.down = {.data = weight, .stride = weight_stride}, .down_bias = {bias, dtype_bytes(weight_dtype)}};
    Call call = {.x_dtype = x_dtype, .weight_dtype = weight_dtype, .bias_dtype = weight_dtype, .dim_in = dim_in,
                 .dim_out = dim_out, .x = x, .x_stride = x_stride, .out = out, .out_stride = out_stride,
                 .share_threads = share_threads};
    return run_call(&call, &layer, &num_rows, 1);
}

/* The same by a quantised matrix; `decodes` as in moe_expert_ffn. */
MOE_EXPORT int moe_quantized_linear(const char *x, int64_t x_stride, int64_t num_rows, const Matrix *weight, const char *bias,
                                    int bias_dtype, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                                    int decodes, int share_threads) {
    const Expert layer = {.down = *weight, .down_bias = {bias, dtype_bytes(bias_dtype)}};
    Call call = {.x_dtype = x_dtype, .weight_dtype = DTYPE_BF16, .bias_dtype = bias_dtype, .decodes = decodes, .dim_in = dim_in,
                 .dim_out = dim_out, .x = x, .x_stride = x_stride, .out = out, .out_stride = out_stride,
                 .share_threads = share_threads};
    return run_call(&call, &layer, &num_rows, 1);
}

static int rows_in_range(const int64_t *rows, int64_t count, int64_t limit) {
    for (int64_t r = 0; r < count; r++)
        if (rows[r] < 0 || rows[r] >= limit) return 0;
    return 1;
}

/* Quantised experts are multiplied by their codes or, with `decodes`, by their values rounded to the type of x. Without a
 * gate, a negative activation means none. */
MOE_EXPORT int moe_expert_ffn(const Expert *experts, int64_t num_experts, const int64_t *counts, const char *x, int64_t x_stride,
                              int64_t num_tokens, const int64_t *token_ids, const int64_t *destinations, char *out,
                              int64_t out_stride, int64_t num_out_rows, int64_t dim_in, int64_t dim_hidden, int64_t dim_out,
                              int x_dtype, int weight_dtype, int bias_dtype, int activation, const float *formula,
                              const float *added, float *hidden_rows, int decodes, int share_threads) {
    Call call = {.x_dtype = x_dtype, .weight_dtype = weight_dtype, .bias_dtype = bias_dtype, .activation = activation,
                 .formula = formula, .added = added, .hidden_rows = hidden_rows, .decodes = decodes, .dim_in = dim_in,
                 .dim_hidden = dim_hidden, .dim_out = dim_out, .x = x, .x_stride = x_stride, .token_ids = token_ids,
                 .destinations = destinations, .out = out, .out_stride = out_stride, .share_threads = share_threads};
    int64_t num_rows = 0;
    for (int64_t e = 0; e < num_experts; e++) num_rows += counts[e];
    if (!rows_in_range(token_ids, num_rows, num_tokens) || !rows_in_range(destinations, num_rows, num_out_rows))
        return STATUS_BAD_ROW;
    return run_call(&call, experts, counts, num_experts);
}

/* Sorts rows by expert, those of one expert in their order; 0 if an expert does not exist. */
static int sort_rows(const int64_t *expert_of_row, int64_t num_rows, int64_t choices, int64_t num_experts, int64_t *counts,
                     int64_t *next, int64_t *token_ids, int64_t *rows) {
    for (int64_t r = 0; r < num_rows; r++) {
        if (expert_of_row[r] < 0 || expert_of_row[r] >= num_experts) return 0;
        counts[expert_of_row[r]]++;
    }
    for (int64_t e = 0, first = 0; e < num_experts; first += counts[e++]) next[e] = first;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t place = next[expert_of_row[r]]++;
        token_ids[place] = r / choices;
        rows[place] = r;
    }
    return 1;
}

/* A step of a few tokens: their experts, and the weighted sums of the results. Row r is choice r % choices of token r /
 * choices and goes through experts[expert_of_row[r]]. Gate weights and out lie without gaps. */
MOE_EXPORT int moe_expert_step(const Expert *experts, int64_t num_experts, const int64_t *expert_of_row, const char *x,
                               int64_t x_stride, int64_t num_tokens, int64_t choices, const char *gates, char *out,
                               int64_t dim_in, int64_t dim_hidden, int64_t dim_out, int x_dtype, int weight_dtype,
                               int bias_dtype, int gates_dtype, int activation, const float *formula, int share_threads) {
    const int64_t num_rows = num_tokens * choices, row_bytes = dim_out * dtype_bytes(x_dtype);
    const int64_t words = 2 * (num_experts + num_rows);
    int64_t *counts = malloc((size_t)(words * (int64_t)sizeof *counts + num_rows * row_bytes));
    if (!counts) return STATUS_NO_MEMORY;
    memset(counts, 0, (size_t)num_experts * sizeof *counts);
    int64_t *next = counts + num_experts, *token_ids = next + num_experts, *rows = token_ids + num_rows;
    char *results = (char *)(counts + words);
    int status = STATUS_BAD_ROW;
    if (sort_rows(expert_of_row, num_rows, choices, num_experts, counts, next, token_ids, rows))
        status = moe_expert_ffn(experts, num_experts, counts, x, x_stride, num_tokens, token_ids, rows, results, row_bytes,
                                num_rows, dim_in, dim_hidden, dim_out, x_dtype, weight_dtype, bias_dtype, activation, formula, NULL,
                                NULL, 0, share_threads);
    if (status == STATUS_OK)
        status = moe_combine_slots(results, gates, out, num_tokens, choices, dim_out, x_dtype, gates_dtype, share_threads);
    free(counts);
    return status;
}
