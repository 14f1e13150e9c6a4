/* Many small products with the matrices where they lie: a few rows of x times each of a batch of matrices.
 *
 * Attention over a cache of keys and values is such a batch when few tokens ask: one matrix for each head, read once.
 * One thread computes a whole batch element, so neither the number of threads nor the other elements change a bit.
 */
#include <stdatomic.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

typedef struct {
    const float *x; /* [outer, inner, num_rows, x_cols] */
    const char *w;  /* [outer, inner, w_rows, w_cols] by strides in bytes, unit stride along w_cols */
    float *out;     /* [outer, inner, num_rows, out_cols] */
    int64_t outer, inner, num_rows, w_rows, w_cols;
    int64_t outer_stride, inner_stride, row_stride;
    int dtype, transposed;
    atomic_llong next;
} Batch;

/* out[m] = sum over n of x[m, n] * w[n]: a loop over columns that every compiler vectorises. */
#define DEFINE_MIX(NAME, LOAD, BYTES)                                                                                   \
    MOE_CLONES static void mix_##NAME(const Batch *batch, const float *x, const char *w, float *restrict out) {         \
        const int64_t rows = batch->w_rows, cols = batch->w_cols, stride = batch->row_stride;                           \
        for (int64_t k = 0; k < cols; k++) out[k] = 0;                                                                  \
        for (int64_t n = 0; n < rows; n++, w += stride) {                                                               \
            const float weight = x[n];                                                                                  \
            for (int64_t k = 0; k < cols; k++) out[k] += weight * LOAD(w + k * BYTES);                                  \
        }                                                                                                               \
    }

static inline float load_bf16(const char *src) { return bf16_to_f32(load_u16(src)); }
static inline float load_f16(const char *src) { return f16_to_f32(load_u16(src)); }

DEFINE_MIX(f32, load_f32, 4)
DEFINE_MIX(bf16, load_bf16, 2)
DEFINE_MIX(f16, load_f16, 2)

typedef void (*Mix)(const Batch *, const float *, const char *, float *);
static const Mix mixes[] = {mix_f32, mix_bf16, mix_f16};
static const int kinds[] = {KIND_F32, KIND_BF16, KIND_F16};

/* out[m, n] = dot(x[m], w[n]), by the kernel of linear layers, one row of x at a time. */
static void multiply_transposed(const Batch *batch, const float *x, const char *w, float *out) {
    const Isa *isa = current_isa();
    const int kind = kinds[batch->dtype];
    char packed[packed_row_bytes(kind, batch->w_cols, isa->k_step)] __attribute__((aligned(64)));
    const Matrix matrix = {w, batch->row_stride}, none = {0, 0};
    for (int64_t m = 0; m < batch->num_rows; m++, x += batch->w_cols, out += batch->w_rows) {
        isa->pack(kind, (const char *)x, DTYPE_F32, batch->w_cols, packed, 0, 0, 1);
        isa->multiply(kind, matrix, batch->w_rows, batch->w_cols, packed, 1, out, batch->w_rows, none);
    }
}

static void multiply_elements(void *context) {
    Batch *batch = context;
    const int64_t x_cols = batch->transposed ? batch->w_cols : batch->w_rows;
    const int64_t out_cols = batch->transposed ? batch->w_rows : batch->w_cols;
    for (;;) {
        const int64_t element = atomic_fetch_add(&batch->next, 1);
        if (element >= batch->outer * batch->inner) return;
        const char *w = batch->w + element / batch->inner * batch->outer_stride + element % batch->inner * batch->inner_stride;
        const float *x = batch->x + element * batch->num_rows * x_cols;
        float *out = batch->out + element * batch->num_rows * out_cols;
        if (batch->transposed)
            multiply_transposed(batch, x, w, out);
        else
            for (int64_t m = 0; m < batch->num_rows; m++) mixes[batch->dtype](batch, x + m * x_cols, w, out + m * out_cols);
    }
}

/* out = x @ w^T where `transposed`, else x @ w, for each of outer * inner matrices. */
MOE_EXPORT void moe_batched_matmul(const float *x, const char *w, float *out, int64_t outer, int64_t inner, int64_t num_rows,
                                   int64_t w_rows, int64_t w_cols, int64_t outer_stride, int64_t inner_stride,
                                   int64_t row_stride, int dtype, int transposed, int share_threads) {
    Batch batch = {.x = x, .w = w, .out = out, .outer = outer, .inner = inner, .num_rows = num_rows, .w_rows = w_rows,
                   .w_cols = w_cols, .outer_stride = outer_stride, .inner_stride = inner_stride,
                   .row_stride = row_stride, .dtype = dtype, .transposed = transposed != 0};
    pool_begin();
    pool_run(multiply_elements, &batch, share_threads);
    pool_end();
}
