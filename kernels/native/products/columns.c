/* A linear layer whose matrix lies transposed: few rows of x times [dim_in, dim_out] where a weight's outputs are
 * neighbours. So lie the experts of some families, and so lies every matrix for the gradient of its input.
 *
 * A thread takes a block of columns and reads it once, from the first line to the last. A sum runs over k in one order
 * whatever the block, so neither the number of threads nor the other rows change a bit.
 */
#include <stdatomic.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

/* Sums of one block, in bytes, that leave room in the first-level cache, and columns of a block. */
enum { SUM_BYTES = 24 << 10, MIN_COLUMNS = 64, MAX_COLUMNS = 2048 };

typedef struct {
    const Isa *isa;
    int kind, weight_dtype, x_dtype;
    Matrix weight;
    Bias bias;
    const char *x; /* [num_rows, dim_in], rows `x_stride` bytes apart, an even number of values in each */
    int64_t x_stride, num_rows, dim_in, dim_out, block;
    char *out;
    int64_t out_stride;
    float *sums; /* [threads, 2, num_rows, block] */
    atomic_int next_thread;
    atomic_llong next;
} Columns;

static void compute_blocks(void *context) {
    Columns *call = context;
    const Isa *isa = call->isa;
    const int64_t size = call->num_rows * call->block;
    float *sums = call->sums + atomic_fetch_add(&call->next_thread, 1) * 2 * size, *values = sums + size;
    for (;;) {
        const int64_t first = atomic_fetch_add(&call->next, 1) * call->block;
        if (first >= call->dim_out) return;
        const int64_t rest = call->dim_out - first, count = rest < call->block ? rest : call->block;
        const Matrix here = {.data = call->weight.data + first * dtype_bytes(call->weight_dtype), .stride = call->weight.stride};
        isa->multiply_columns(call->kind, here, call->dim_in, count, call->x, call->x_stride, call->num_rows, sums, values,
                              call->block);
        for (int64_t m = 0; m < call->num_rows; m++) {
            float *row = values + m * call->block;
            if (call->bias.data) isa->add_bias(row, call->bias, first, call->weight_dtype, count);
            isa->store(call->out + m * call->out_stride + first * dtype_bytes(call->x_dtype), call->x_dtype, row, count);
        }
    }
}

/* Columns of a block: few enough for their sums, and every thread has as many blocks as the others. */
static int64_t block_columns(int64_t dim_out, int64_t num_rows, int64_t step, int64_t threads) {
    int64_t most = SUM_BYTES / (4 * num_rows);
    most = most < MIN_COLUMNS ? MIN_COLUMNS : most > MAX_COLUMNS ? MAX_COLUMNS : most;
    const int64_t turns = (dim_out + most * threads - 1) / (most * threads);
    const int64_t even = (dim_out + turns * threads - 1) / (turns * threads);
    return (even + step - 1) / step * step;
}

/* One row of x as the products read it: bf16 for the instruction for pairs, else fp32. */
MOE_CLONES static void copy_row(char *out, int kind, const char *x, int dtype, int64_t count, int64_t padded) {
    if (kind == KIND_BF16_DOT) {
        memset(out + 2 * count, 0, (size_t)(2 * (padded - count)));
        memcpy(out, x, (size_t)(2 * count));
        return;
    }
    float *values = (float *)out;
    for (int64_t i = count; i < padded; i++) values[i] = 0;
    if (dtype == DTYPE_F32)
        memcpy(values, x, (size_t)(4 * count));
    else if (dtype == DTYPE_BF16)
        for (int64_t i = 0; i < count; i++) values[i] = load_bf16(x + 2 * i);
    else
        for (int64_t i = 0; i < count; i++) values[i] = load_f16(x + 2 * i);
}

/* Whether rows of x already lie as the products read them: fp32, or whole pairs of bf16 at addresses of pairs. */
static int is_as_read(int kind, const char *x, int64_t x_stride, int x_dtype, int64_t dim_in) {
    if (kind == KIND_BF16_DOT) return dim_in % 2 == 0 && (uintptr_t)x % 4 == 0 && x_stride % 4 == 0;
    return x_dtype == DTYPE_F32;
}

/* Arguments as those of moe_linear, with `weight` [dim_in, dim_out]. */
MOE_EXPORT int moe_linear_transposed(const char *x, int64_t x_stride, int64_t num_rows, const char *weight,
                                     int64_t weight_stride, const char *bias, char *out, int64_t out_stride, int64_t dim_in,
                                     int64_t dim_out, int x_dtype, int weight_dtype, int share_threads) {
    const Isa *isa = current_isa();
    const int kind = weight_kind(isa, x_dtype, weight_dtype);
    const int64_t padded = dim_in + dim_in % 2, row_bytes = padded * (kind == KIND_BF16_DOT ? 2 : 4);
    Columns call = {.isa = isa, .kind = kind, .weight_dtype = weight_dtype, .x_dtype = x_dtype, .x_stride = row_bytes,
                    .weight = {.data = weight, .stride = weight_stride}, .bias = {bias, dtype_bytes(weight_dtype)},
                    .num_rows = num_rows, .dim_in = dim_in, .dim_out = dim_out, .out = out, .out_stride = out_stride};
    if (!num_rows || !dim_out) return STATUS_OK;
    pool_begin();
    const int64_t threads = pool_threads(), x_bytes = (num_rows * row_bytes + 63) / 64 * 64;
    call.block = block_columns(dim_out, num_rows, isa->k_step, threads);
    const int64_t copied = is_as_read(kind, x, x_stride, x_dtype, dim_in) ? 0 : x_bytes;
    char *scratch = pool_scratch(copied + 2 * threads * num_rows * call.block * (int64_t)sizeof(float));
    if (scratch) {
        if (!copied) {
            call.x = x;
            call.x_stride = x_stride;
        } else {
            for (int64_t m = 0; m < num_rows; m++)
                copy_row(scratch + m * row_bytes, kind, x + m * x_stride, x_dtype, dim_in, padded);
            call.x = scratch;
        }
        call.sums = (float *)(scratch + copied);
        pool_run(compute_blocks, &call, share_threads);
    }
    pool_end();
    return scratch ? STATUS_OK : STATUS_NO_MEMORY;
}
