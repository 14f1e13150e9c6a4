/* Products of a transposed matrix, [dim_in, dim_out], where a weight's outputs are neighbours. Some families store experts
 * so; every matrix lies so for the gradient of its input, and rows for the gradient of a matrix. In the last case the other
 * factor is transposed as well, and all threads first bring it into panels.
 *
 * A thread takes a block of columns and reads it once, from the first line to the last. Sums run over k in one order:
 * neither the block nor the number of threads nor the other rows change a bit. */
#include <stdatomic.h>

#include "kernels.h"

/* Bytes of a block's sums, which leave room in the first-level cache, and columns of a block. */
enum { SUM_BYTES = 24 << 10, MIN_COLUMNS = 64, MAX_COLUMNS = 2048 };

typedef struct {
    const Isa *isa;
    int kind, weight_dtype, x_dtype;
    Matrix weight;
    Bias bias;
    Rows x; /* [num_rows, dim_in]; rows of pairs have an even number of values */
    int64_t num_rows, dim_in, dim_out, block;
    char *out;
    int64_t out_stride;
    int adds; /* to what is in `out` */
    float *sums; /* [threads, 2, num_rows, block] */
    atomic_int next_thread;
    atomic_llong next;
    Matrix left; /* x as it lies transposed, [dim_in, num_rows], or no data */
    char *panels; /* where its panels go: x.data */
    atomic_llong next_line, ready_lines;
} Columns;

/* ---- the other factor, where it lies transposed ---- */

enum { LINES_AT_ONCE = 16, ROWS_AT_ONCE = 1024 };

INLINE void widen(int dtype, const char *src, int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = load_as(dtype, src, i);
}

/* Four bytes of every row in this step: two lines as pairs of bf16, or one line as fp32. */
MOE_CLONES static void copy_line(int kind, int dtype, const char *first, const char *second, int64_t count, uint32_t *restrict out) {
#define WIDEN(type) widen(type, first, count, (float *)out)
    if (kind == KIND_BF16_DOT)
        for (int64_t i = 0; i < count; i++) out[i] = load_u16(first + 2 * i) | (second ? (uint32_t)load_u16(second + 2 * i) << 16 : 0);
    else
        BY_DTYPE(dtype, WIDEN)
}

/* One step of all rows, to where each panel reads it. */
INLINE void spread(const uint32_t *line, int64_t count, int panel_rows, char *out, int64_t panel) {
    for (; count >= panel_rows; count -= panel_rows, line += panel_rows, out += panel) memcpy(out, line, (size_t)(4 * panel_rows));
    if (count) memcpy(out, line, (size_t)(4 * count));
}

static void bring_into_panels(Columns *call) {
    const int together = call->kind == KIND_BF16_DOT ? 2 : 1, rows = call->isa->max_panel_rows;
    const int64_t steps = parts_of(call->dim_in, together);
    uint32_t line[ROWS_AT_ONCE];
    for (;;) {
        const int64_t begin = atomic_fetch_add(&call->next_line, LINES_AT_ONCE), count = min64(LINES_AT_ONCE, steps - begin);
        if (count <= 0) break;
        for (int64_t s = begin; s < begin + count; s++) {
            const char *first = call->left.data + s * together * call->left.stride;
            const char *second = s * together + 1 < call->dim_in ? first + call->left.stride : NULL;
            copy_line(call->kind, call->x_dtype, first, second, call->num_rows, line);
            char *out = call->panels + s * call->x.step;
            rows == 6 ? spread(line, call->num_rows, 6, out, call->x.panel) : spread(line, call->num_rows, 4, out, call->x.panel);
        }
        atomic_fetch_add_explicit(&call->ready_lines, count, memory_order_release);
    }
    for (int turn = 0; atomic_load_explicit(&call->ready_lines, memory_order_acquire) < steps; turn++) pool_relax(turn);
}

static void compute_blocks(void *context) {
    Columns *call = context;
    const Isa *isa = call->isa;
    const int64_t size = call->num_rows * call->block;
    float *sums = call->sums + atomic_fetch_add(&call->next_thread, 1) * 2 * size, *values = sums + size;
    if (call->left.data) bring_into_panels(call);
    for (;;) {
        const int64_t first = atomic_fetch_add(&call->next, 1) * call->block;
        if (first >= call->dim_out) return;
        const int64_t count = min64(call->block, call->dim_out - first);
        const Matrix here = {.data = call->weight.data + first * dtype_bytes(call->weight_dtype), .stride = call->weight.stride};
        isa->multiply_columns(call->kind, here, call->dim_in, count, call->x, call->num_rows, sums, values, call->block);
        for (int64_t m = 0; m < call->num_rows; m++) {
            float *row = values + m * call->block;
            char *out = call->out + m * call->out_stride;
            const Bias before = {out, dtype_bytes(call->x_dtype)};
            if (call->bias.data) isa->add_bias(row, call->bias, first, call->weight_dtype, count);
            if (call->adds) isa->add_bias(row, before, first, call->x_dtype, count);
            isa->store(out + first * dtype_bytes(call->x_dtype), call->x_dtype, row, count);
        }
    }
}

/* Columns of a block: few enough for their sums, and as many blocks for every thread. */
static int64_t block_columns(int64_t dim_out, int64_t num_rows, int64_t step, int64_t threads) {
    const int64_t most = max64(MIN_COLUMNS, min64(MAX_COLUMNS, SUM_BYTES / (4 * num_rows)));
    return round_up(parts_of(dim_out, parts_of(dim_out, most * threads) * threads), step);
}

/* A row of x as the products read it: bf16 for the instruction for pairs, else fp32. */
MOE_CLONES static void copy_row(char *out, int kind, const char *x, int dtype, int64_t count, int64_t padded) {
#define WIDEN_ROW(type) widen(type, x, count, (float *)out)
    const int64_t size = kind == KIND_BF16_DOT ? 2 : 4;
    memset(out + size * count, 0, (size_t)(size * (padded - count)));
    if (kind == KIND_BF16_DOT)
        memcpy(out, x, (size_t)(2 * count));
    else
        BY_DTYPE(dtype, WIDEN_ROW)
}

/* Whether rows of x already lie so: fp32, or whole pairs of bf16 at addresses of pairs. */
static int is_as_read(int kind, const char *x, int64_t x_stride, int x_dtype, int64_t dim_in) {
    if (kind == KIND_BF16_DOT) return dim_in % 2 == 0 && (uintptr_t)x % 4 == 0 && x_stride % 4 == 0;
    return x_dtype == DTYPE_F32;
}

/* Like moe_linear, but `weight` is [dim_in, dim_out]. */
MOE_EXPORT int moe_linear_transposed(const char *x, int64_t x_stride, int64_t num_rows, const char *weight,
                                     int64_t weight_stride, const char *bias, char *out, int64_t out_stride, int64_t dim_in,
                                     int64_t dim_out, int x_dtype, int weight_dtype, int share_threads) {
    const Isa *isa = current_isa();
    const int kind = column_kind(isa, x_dtype, weight_dtype);
    const int64_t padded = dim_in + dim_in % 2, row_bytes = padded * (kind == KIND_BF16_DOT ? 2 : 4);
    Columns call = {.isa = isa, .kind = kind, .weight_dtype = weight_dtype, .x_dtype = x_dtype,
                    .weight = {.data = weight, .stride = weight_stride}, .bias = {bias, dtype_bytes(weight_dtype)},
                    .num_rows = num_rows, .dim_in = dim_in, .dim_out = dim_out, .out = out, .out_stride = out_stride};
    if (!num_rows || !dim_out) return STATUS_OK;
    pool_begin();
    const int64_t threads = pool_threads(), x_bytes = round_up(num_rows * row_bytes, 64);
    call.block = block_columns(dim_out, num_rows, isa->k_step, threads);
    const int64_t copied = is_as_read(kind, x, x_stride, x_dtype, dim_in) ? 0 : x_bytes;
    char *scratch = pool_scratch(copied + 2 * threads * num_rows * call.block * (int64_t)sizeof(float));
    if (scratch) {
        if (copied)
            for (int64_t m = 0; m < num_rows; m++)
                copy_row(scratch + m * row_bytes, kind, x + m * x_stride, x_dtype, dim_in, padded);
        const int64_t row = copied ? row_bytes : x_stride;
        call.x = (Rows){copied ? scratch : x, row, 4, row * isa->max_panel_rows};
        call.sums = (float *)(scratch + copied);
        pool_run(compute_blocks, &call, share_threads);
    }
    pool_end();
    return scratch ? STATUS_OK : STATUS_NO_MEMORY;
}

/* out[a, b] = sum of left[n, a] * right[n, b] over `num_lines` lines, for at most ROWS_AT_ONCE columns of `left`; with
 * `adds`, added to out. All three have one type. */
MOE_EXPORT int moe_outer(const char *left, int64_t left_stride, const char *right, int64_t right_stride, int64_t num_lines,
                         char *out, int64_t out_stride, int64_t dim_a, int64_t dim_b, int dtype, int adds, int share_threads) {
    const Isa *isa = current_isa();
    const int kind = column_kind(isa, dtype, dtype), panel_rows = isa->max_panel_rows;
    const int64_t steps = kind == KIND_BF16_DOT ? (num_lines + 1) / 2 : num_lines;
    /* an odd number of cache lines: panels written side by side share no set of the cache */
    const int64_t panel = (steps * 4 * panel_rows / 64 | 1) * 64 + (steps * 4 * panel_rows / 64 % 2 ? 128 : 0);
    Columns call = {.isa = isa, .kind = kind, .weight_dtype = dtype, .x_dtype = dtype, .weight = {.data = right, .stride = right_stride},
                    .num_rows = dim_a, .dim_in = num_lines, .dim_out = dim_b, .out = out, .out_stride = out_stride, .adds = adds,
                    .left = {.data = left, .stride = left_stride}};
    if (!dim_a || !dim_b) return STATUS_OK;
    if (dim_a > ROWS_AT_ONCE) return STATUS_BAD_ROW;
    pool_begin();
    const int64_t threads = pool_threads(), panel_bytes = round_up(parts_of(dim_a, panel_rows) * panel, 64);
    call.block = block_columns(dim_b, dim_a, isa->k_step, threads);
    char *scratch = pool_scratch(panel_bytes + 2 * threads * dim_a * call.block * (int64_t)sizeof(float));
    if (scratch) {
        call.panels = scratch;
        call.x = (Rows){scratch, 4, 4 * panel_rows, panel};
        call.sums = (float *)(scratch + panel_bytes);
        pool_run(compute_blocks, &call, share_threads);
    }
    pool_end();
    return scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
