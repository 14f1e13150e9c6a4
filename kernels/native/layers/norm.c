/* Root-mean-square normalisation of rows, as models write it in several operations, in one pass over each row.
 *
 * The calling thread does few rows alone: in a step of few tokens a row is a few kilobytes. One thread computes a whole
 * row, so the number of threads changes no bit. */
#include "kernels.h"

enum { PARTIAL_SUMS = 64, ROWS_ALONE = 64, ROWS_AT_ONCE = 16 };

/* out = round(x * rsqrt(mean(x^2) + eps)) * weight, where round is to the data type; or with one rounding at the end, and
 * there perhaps with one added to the weight. Sums run in a fixed number of partial sums: every instruction set adds in the
 * same order. */
INLINE void norm_as(int dtype, const char *x, const char *weight, char *out, int64_t count, float eps, int form) {
    float sums[PARTIAL_SUMS] = {0}, total = 0;
    int64_t k = 0;
    for (; k + PARTIAL_SUMS <= count; k += PARTIAL_SUMS)
        for (int i = 0; i < PARTIAL_SUMS; i++) {
            const float value = load_as(dtype, x, k + i);
            sums[i] += value * value;
        }
    for (; k < count; k++) sums[k % PARTIAL_SUMS] += load_as(dtype, x, k) * load_as(dtype, x, k);
    for (int i = 0; i < PARTIAL_SUMS; i++) total += sums[i];
    const float scale = 1.0f / sqrtf(total / (float)count + eps), more = form == NORM_PLUS_ONE ? 1 : 0;
    if (form == NORM_ROUNDED)
        for (k = 0; k < count; k++)
            store_as(dtype, out, k, load_as(dtype, weight, k) * round_as(dtype, load_as(dtype, x, k) * scale));
    else
        for (k = 0; k < count; k++) store_as(dtype, out, k, load_as(dtype, x, k) * scale * (more + load_as(dtype, weight, k)));
}

MOE_CLONES static void norm(int dtype, const char *x, const char *weight, char *out, int64_t count, float eps, int form) {
#define NORM(type) norm_as(type, x, weight, out, count, eps, form)
    BY_DTYPE(dtype, NORM)
}

void moe_norm_rows(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, char *out, int64_t count,
                   float eps, int dtype, int form) {
    const int64_t row_bytes = count * dtype_bytes(dtype);
    for (int64_t r = 0; r < num_rows; r++) norm(dtype, x + r * x_stride, weight, out + r * row_bytes, count, eps, form);
}

typedef struct {
    const char *x, *weight;
    char *out;
    int64_t x_stride, count;
    float eps;
    int dtype, form;
} Norms;

static void norm_some(void *context, int thread, int64_t first, int64_t end) {
    Norms *call = context;
    (void)thread;
    moe_norm_rows(call->x + first * call->x_stride, call->x_stride, end - first, call->weight,
                  call->out + first * call->count * dtype_bytes(call->dtype), call->count, call->eps, call->dtype, call->form);
}

MOE_EXPORT void moe_rms_norm(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, char *out, int64_t count,
                             float eps, int dtype, int form, int share_threads) {
    if (num_rows <= ROWS_ALONE) {
        moe_norm_rows(x, x_stride, num_rows, weight, out, count, eps, dtype, form);
        return;
    }
    Norms call = {.x = x, .weight = weight, .out = out, .x_stride = x_stride, .count = count, .eps = eps, .dtype = dtype, .form = form};
    pool_begin();
    pool_each(norm_some, &call, num_rows, ROWS_AT_ONCE, share_threads);
    pool_end();
}
