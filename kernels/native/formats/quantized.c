/* Quantised matrices as plain ones. */
#include <stdatomic.h>

#include "kernels.h"
#include "pool.h"

enum { ROWS_AT_ONCE = 16 };

typedef struct {
    Matrix matrix;
    int64_t num_rows, num_cols;
    char *out;
    int64_t out_stride;
    int dtype;
    atomic_llong next;
} Dequantizing;

static void dequantize_rows(void *context) {
    Dequantizing *call = context;
    for (;;) {
        const int64_t first = atomic_fetch_add(&call->next, ROWS_AT_ONCE), left = call->num_rows - first;
        if (left <= 0) return;
        Matrix rows = call->matrix;
        rows.data += first * rows.stride;
        rows.first_row += first;
        current_isa()->dequantize(rows, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE, call->num_cols,
                                  call->out + first * call->out_stride, call->out_stride, call->dtype);
    }
}

/* The values of a quantised matrix, rounded to fp32 and then to `dtype`. */
MOE_EXPORT void moe_dequantize(const Matrix *matrix, int64_t num_rows, int64_t num_cols, char *out, int64_t out_stride, int dtype,
                               int share_threads) {
    Dequantizing call = {.matrix = *matrix, .num_rows = num_rows, .num_cols = num_cols, .out = out, .out_stride = out_stride,
                         .dtype = dtype};
    pool_begin();
    pool_run(dequantize_rows, &call, share_threads);
    pool_end();
}
